"""Declares every event once (data, sentence, headline, example) and writes events to the outbox.

The JSON Schemas of the API, the messages for people and the reference in docs/events.md are generated from this module.
Receivers ignore unknown fields: within a version of the API, fields may be added and none is removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from uuid import UUID

import msgspec

from evalstop_service.domain.confidence_sequences import Bounds, Estimate
from evalstop_service.domain.decision_lifecycle import Exploit, Guard, GuardKind
from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.health import MetricFault
from evalstop_service.domain.metric_rules import RuleBreach
from evalstop_service.domain.run import BestCheckpoint, Call, Evidence, Verdict
from evalstop_service.domain.statuses import Stage
from evalstop_service.store import run_details
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision as StoredDecision
from evalstop_service.store.projects import Project as StoredProject
from evalstop_service.store.queue import outbox
from evalstop_service.store.runs import Run as StoredRun
from evalstop_service.webhooks import event_data

DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True)
class Declaration:
    """One type of event: a sentence for the reference, a headline that follows the run's name, and example data."""

    sentence: str
    headline: str
    example: event_data.ProjectEvent


_AT = datetime(2026, 1, 1, 14, 31, 7, 250_000, UTC)
_PROJECT = event_data.Project(UUID("0199aa0c-3333-7f44-9a55-665544332211"), "alignment")
_EVIDENCE = Evidence("k_decline", ("eval",), "count", 3.0, 1.0, 3.0, 120, "")
_PRECISION = Estimate(0.989, 0.918, 0.9999, Bounds(0.902, 0.9999), 92, 1)
_ROLLOUT_STAGE = event_data.RolloutStage(
    from_stage=Stage.SHADOW,
    to=Stage.CANARY,
    reason="at least 90.2 % of its stops were right, and 90.0 % are required",
    required_precision=0.9,
    canary_share=0.2,
    precision=_PRECISION,
    precision_since=_PRECISION,
)
_RUN: dict[str, Any] = {
    "project": _PROJECT,
    "run": event_data.Run(
        UUID("0199aa0d-1111-7e22-8f33-445566778899"),
        "ppo-7b-seed3",
        1,
        {"slurm_job_id": "4711"},
        "dana@example.org",
        "ppo-7b",
        150,
        2000,
    ),
    "verdict": Verdict(Call.STOP, 150, 120, "3 evals in a row fell", (_EVIDENCE,), "turned"),
    "best_checkpoint": BestCheckpoint(120, "s3://runs/ppo-7b-seed3/120", 0.71, "smoothed_maximum", 0.698, 0.006),
}
_JOB = event_data.Job("job", [])
_EXPLOIT = Exploit(
    decision_id=UUID("0199aa11-7777-7b88-9c99-aabbccddeeff"),
    source_run=UUID("0199aa0d-2222-7e22-8f33-445566778899"),
    source_name="ppo-7b-seed5",
    source_step=120,
    source_checkpoint="s3://runs/ppo-7b-seed5/120",
    hyperparameters={"lr": 8e-7},
)
_REQUEST = event_data.EvalRequest(
    id=UUID("0199aa12-5555-7c77-8d88-112233445566"),
    step=150,
    best_step=120,
    best_uri="s3://runs/ppo-7b-seed3/120",
    multiplier=4,
    seed=861230182,
    probability=0.74,
    deadline_at=datetime(2026, 1, 1, 20, 31, 7, 250_000, UTC),
)
_DIGEST = event_data.Digest(
    since=datetime(2026, 1, 5, 7, tzinfo=UTC),
    until=datetime(2026, 1, 12, 7, tzinfo=UTC),
    stops=12,
    right=9,
    wrong=1,
    recorded_only=4,
    vetoes=2,
    to_label=2,
    gpu_hours_saved=310.5,
    gpu_hours_lost=12.0,
    gpu_hours_would_have_saved=41.5,
    ready=["early may move from shadow to canary"],
)
_DECISION_ID = UUID("0199aa11-7777-7b88-9c99-aabbccddeeff")


def _of_project(**fields: object) -> event_data.ProjectEvent:
    return event_data.make_data(event_data.ProjectEvent, {"project": _PROJECT}, **fields)


def _of_run(**fields: object) -> event_data.ProjectEvent:
    return event_data.make_data(event_data.RunEvent, _RUN | {"decision": None}, **fields)


def _of_decision(state: str, action: str = "stop", **fields: object) -> event_data.ProjectEvent:
    decision = event_data.Decision(_DECISION_ID, action, state, 150, _AT + timedelta(minutes=15))
    return event_data.make_data(
        event_data.DecisionEvent, _RUN | {"decision": decision, "gpu_hours_left": 41.5}, **fields
    )


def _silent(state: str) -> event_data.ProjectEvent:
    return _of_run(health=event_data.Health(state, datetime(2026, 1, 1, 14, 1, 7, 250_000, UTC), 61.5))


DECLARATIONS: dict[EventType, Declaration] = {
    EventType.SUSPECTED: Declaration(
        "The policy suspects that the run has stopped improving. Sent once per attempt.",
        "may have stopped improving",
        _of_run(),
    ),
    EventType.EVAL_REQUESTED: Declaration(
        "An eval now would show whether the run has stopped improving. A `request` asks for a paired evaluation.",
        "should be evaluated now",
        _of_run(request=_REQUEST),
    ),
    EventType.STOP_PENDING: Declaration(
        "A veto window opens: the stop goes out at `due_at` unless a person vetoes it. Not sent again if the window is "
        "extended.",
        "will be stopped unless somebody vetoes it",
        _of_decision("pending", act_from_messages=True),
    ),
    EventType.STOP_REQUESTED: Declaration(
        "The receiver must end the job. Sent again, as a new event, if nobody confirms the stop.",
        "is to be stopped",
        _of_decision("requested", job=_JOB),
    ),
    EventType.STOP_ON_HOLD: Declaration(
        "The policy wants a stop, and a guard puts it on hold.",
        "should be stopped, but a guard puts the stop on hold",
        _of_decision("on_hold", guards=[Guard(GuardKind.PAUSED, "dana paused the project")]),
    ),
    EventType.STOP_ESCALATED: Declaration(
        "The receiver must end the job by force: nobody confirmed the stop for the second time.",
        "is to be stopped by force: nobody has confirmed the stop",
        _of_decision("escalated", job=_JOB),
    ),
    EventType.STOPPED: Declaration(
        "The scheduler reports that the job is gone (`confirmed`), or the trainer ended it by itself (`obeyed`).",
        "was stopped",
        _of_decision("confirmed", report={"exit_status": -15, "gone_at": "2026-01-01T14:31:30.000000Z"}),
    ),
    EventType.PARK_PENDING: Declaration(
        "A veto window opens: the run is parked at `due_at` unless a person vetoes it.",
        "will be parked unless somebody vetoes it",
        _of_decision("pending", "park", act_from_messages=True),
    ),
    EventType.PARK_REQUESTED: Declaration(
        "The receiver must set the job aside, never by force. Sent again, as a new event, if nobody confirms it. An "
        "endpoint that subscribes to this type can park jobs.",
        "is to be parked",
        _of_decision("requested", "park", job=_JOB),
    ),
    EventType.EXPLOIT_PENDING: Declaration(
        "A veto window opens: the run copies another one of its group at `due_at` unless a person vetoes it.",
        "will go on from the checkpoint of another run unless somebody vetoes it",
        _of_decision("pending", "exploit", act_from_messages=True, exploit=_EXPLOIT),
    ),
    EventType.EXPLOIT_REQUESTED: Declaration(
        "The run is to go on from the checkpoint of another run of its group: its trainer loads it, or the receiver "
        "restarts the job with it. Never a stop. Sent again, as a new event, if the trainer does not confirm.",
        "is to go on from the checkpoint of another run",
        _of_decision("requested", "exploit", job=_JOB, exploit=_EXPLOIT),
    ),
    EventType.PARKED: Declaration(
        "The scheduler reports that the job is set aside: held, suspended, or ended to be started again.",
        "was parked",
        _of_decision("parked", "park", report={"parked_as": "held"}),
    ),
    EventType.PARK_OVERDUE: Declaration(
        "A job has been parked for a week; repeated weekly. A person should resume or stop it.",
        "is still parked. A person should resume or stop it",
        _of_decision("parked", "park"),
    ),
    EventType.STOP_FAILED: Declaration(
        "The job could not be ended or parked, or no receiver answered. A person should look.",
        "could not be stopped or parked. A person should look",
        _of_decision("failed", report={"escalations": 2}),
    ),
    EventType.RESUME_REQUESTED: Declaration(
        "A stop was undone, or a parked job should resume: the receiver resumes the job if its scheduler can.",
        "may continue: it is no longer to be stopped or parked",
        _of_decision("undone"),
    ),
    EventType.BEST_CHECKPOINT_CHANGED: Declaration(
        "Another checkpoint is the one to ship.", "has a new best checkpoint", _of_run()
    ),
    EventType.COMPLETED: Declaration("The run completed.", "has completed", _of_run()),
    EventType.FAILED: Declaration("The trainer reports that the run ended with an error.", "failed", _of_run()),
    EventType.STALE: Declaration(
        "The run has not posted for longer than usual.",
        "is stale: it has not posted for longer than usual",
        _silent("stale"),
    ),
    EventType.LOST: Declaration(
        "The run has not posted for so long that it is considered ended.",
        "is lost: it has not posted for so long that it is considered ended",
        _silent("lost"),
    ),
    EventType.METRIC_FAULT: Declaration(
        "A watched metric is missing or was renamed: its detectors see nothing.",
        "has a metric that its detectors cannot use",
        _of_run(
            metric_fault=MetricFault("eval/score", "it was last reported at step 20, others are at step 150"),
        ),
    ),
    EventType.RULE_MET: Declaration(
        "The run met one of the project's rules on metrics. Not sent again for this rule within its pause. Nothing is "
        "stopped.",
        "met a rule",
        _of_run(rule=RuleBreach("kl > 20", "kl", 150, 23.1, "kl is 23.1 at step 150")),
    ),
    EventType.ALERT: Declaration(
        "The trainer called `run.alert`.",
        "raised an alert",
        _of_run(
            alert=event_data.Alert(
                UUID("0199aa13-2222-7d33-8e44-778899aabbcc"), "The grader is slow", "9 s an answer instead of 2"
            ),
        ),
    ),
    EventType.ROLLOUT_STAGE_PROPOSED: Declaration(
        "A policy's measured precision allows a higher rollout stage. An admin has to confirm it.",
        "may move",
        _of_project(policy=event_data.Policy("early", 3), rollout_stage=_ROLLOUT_STAGE),
    ),
    EventType.ROLLOUT_STAGE_CHANGED: Declaration(
        "A policy's rollout stage changed: up by an admin's confirmation, or down by its measured precision.",
        "moves",
        _of_project(policy=event_data.Policy("early", 3), rollout_stage=_ROLLOUT_STAGE),
    ),
    EventType.DIGEST: Declaration(
        "The week of a project, Mondays at 07:00 UTC: stops, vetoes, GPU-hours, and what waits for people. `*` does "
        "not subscribe to it: name it.",
        "the week until",
        _of_project(digest=_DIGEST),
    ),
    EventType.ENDPOINT_TEST: Declaration(
        "An operator tests whether an endpoint answers. Endpoints cannot subscribe to it.",
        "",
        _of_project(
            endpoint=event_data.Endpoint(
                UUID("0199aa0e-9999-7a11-8b22-c3d4e5f60718"), "https://receiver.example:9000/"
            ),
        ),
    ),
}

_RUN_FIELDS = ("id", "name", "attempt", "labels", "last_step", "total_steps")


def announce_run_event(
    tx: Transaction,
    event_type: EventType,
    project: StoredProject,
    run: StoredRun,
    now: datetime,
    *,
    decision: StoredDecision | None = None,
    **details: object,
) -> UUID:
    """Write an event about a run, or about a decision on it, and its deliveries; returns the `webhook-id`.

    `details`: the fields that only this type has.
    """
    description = run_details.load_descriptions(tx, [run.id])[run.id]
    fields = {
        "project": project,
        "run": {name: getattr(run, name) for name in _RUN_FIELDS}
        | {"owner": description.owner, "group": description.group},
        "verdict": decision.verdict if decision is not None and decision.group is not None else run.verdict,
        "best_checkpoint": run.best_checkpoint,
        "decision": decision,
        **details,
    }
    decision_id = decision.id if decision is not None else None
    return announce_event(tx, event_type, project.id, run.id, fields, now, decision_id=decision_id)


def announce_event(
    tx: Transaction,
    event_type: EventType,
    project_id: UUID,
    run_id: UUID,
    fields: Mapping[str, object],
    now: datetime,
    *,
    decision_id: UUID | None = None,
) -> UUID:
    """Write an event and its deliveries; raises msgspec.ValidationError unless `fields` are those of its type."""
    data = build_data(event_type, fields)
    return outbox.add_event(tx, project_id, run_id, event_type, data, now, decision_id)


def build_data(event_type: EventType, fields: Mapping[str, object]) -> dict[str, Any]:
    """The data of an event as JSON values; `fields` may hold rows of the store in place of the structs of
    event_data."""
    data = msgspec.convert(fields, type(DECLARATIONS[event_type].example), from_attributes=True)
    document: dict[str, Any] = msgspec.to_builtins(data)
    return event_data.fit_data(document)


@cache
def build_schema(event_type: EventType) -> dict[str, Any]:
    """The JSON Schema (2020-12) of one type of event, with an example."""
    declaration = DECLARATIONS[event_type]
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = [
        ("url", event_data.Url, msgspec.UNSET),
        ("timestamp", event_data.Time),
        ("data", type(declaration.example)),
    ]
    event = msgspec.defstruct("Event", fields, tag_field="type", tag=str(event_type), kw_only=True)
    _, parts = msgspec.json.schema_components([event], ref_template="#/$defs/{name}")
    schema = parts.pop("Event") | {"title": event_type, "description": declaration.sentence}
    return {"$schema": DIALECT, **schema, "$defs": parts, "examples": [build_example(event_type)]}


def build_example(event_type: EventType) -> dict[str, Any]:
    """An example of an event as it is sent."""
    document = {"type": event_type, "timestamp": _AT, "data": DECLARATIONS[event_type].example}
    example: dict[str, Any] = json.loads(msgspec.json.encode(document))
    return example
