"""Declares every event once (data, sentence, headline, example) and announces it.

The JSON Schemas of the API, the messages for people and the reference in docs/events.md are made from this module.
Receivers ignore fields that they do not know: fields may be added within a version of the API, and none is removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta, Struct, UnsetType, field

from evalstop_service.rules.confidence_sequences import Bounds, Estimate
from evalstop_service.rules.event_types import EventType
from evalstop_service.rules.metric_health import FaultKind, MetricFault
from evalstop_service.rules.run_results import BestCheckpoint, Call, Evidence, Verdict
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision as StoredDecision
from evalstop_service.store.projects import Project as StoredProject
from evalstop_service.store.queue import outbox
from evalstop_service.store.runs import Run as StoredRun
from evalstop_service.webhooks import event_size

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Time = Annotated[datetime, Meta(tz=True)]
Stage = Literal["shadow", "canary", "enforce"]
Url = Annotated[str, Meta(description="the page of what it is about; missing without EVALSTOP_PUBLIC_URL")] | UnsetType


class Project(Struct):
    """The project."""

    id: UUID
    name: str


class Run(Struct):
    """The training job. Its labels identify the job to a scheduler; of more than an event can hold, the longest are
    left out."""

    id: UUID
    name: str
    attempt: Annotated[int, Meta(description="1, and one more each time the run was resumed")]
    labels: dict[str, str]


class Decision(Struct):
    """The decision to stop the run."""

    id: UUID
    state: str
    step: int
    due_at: Annotated[datetime, Meta(tz=True, description="the end of the veto window")]


class Guard(Struct):
    """A reason to hold a stop back."""

    kind: str
    reason: str
    details: dict[str, Any] = {}


class Health(Struct):
    """When the run last posted anything."""

    state: str
    last_seen_at: Time
    cadence_seconds: Annotated[float | None, Meta(description="learned: the usual time between two posts")]


class Endpoint(Struct):
    """The endpoint under test."""

    id: UUID
    url: str


class Policy(Struct):
    """The policy whose rollout stage changed."""

    name: str
    version: int


class RolloutStage(Struct, kw_only=True, omit_defaults=True):
    """How much the policy may do, before and after, with the numbers behind the change."""

    from_stage: Stage = field(name="from")
    to: Stage
    reason: str
    required_precision: Annotated[float, Meta(description="what the lower bound of the precision has to reach")]
    canary_share: Annotated[float, Meta(description="share of its stops that a canary carries out")]
    precision: Annotated[Estimate | None, Meta(description="of all cases of this version")] = None
    precision_since: Annotated[Estimate | None, Meta(description="of those since the last change of stage")] = None


class _AboutRun(Struct, kw_only=True):
    project: Project
    run: Run
    verdict: Verdict
    best_checkpoint: BestCheckpoint | None


class RunEvent(_AboutRun, kw_only=True):
    """Something happened to a run."""

    decision: None


class EvalRequest(Struct):
    """A paired evaluation: of the best checkpoint and of the current one, on the same prompts."""

    id: UUID
    step: Annotated[int, Meta(description="of the current checkpoint: the first that is registered from here on")]
    best_step: int
    best_uri: str
    multiplier: Annotated[int, Meta(description="so many times the prompts of a usual eval")]
    seed: Annotated[int, Meta(description="from which both draw their prompts")]
    probability: Annotated[float | None, Meta(description="that the run has turned, as things stand")]
    deadline_at: Time


class EvalRequested(RunEvent, kw_only=True):
    """An evaluation is asked for; `request` is null where any eval would do, and nobody said to answer requests."""

    request: EvalRequest | None


class DecisionEvent(_AboutRun, kw_only=True):
    """Something happened to a decision."""

    decision: Decision


class StopOnHold(DecisionEvent, kw_only=True):
    """Guards put a stop on hold."""

    guards: list[Guard]


class StopReported(DecisionEvent, kw_only=True):
    """The stop came to an end; `report` is what the receiver said, or how often the service asked without success."""

    report: dict[str, Any]


class HealthChanged(RunEvent, kw_only=True):
    """A run went silent."""

    health: Health


class MetricFaultFound(RunEvent, kw_only=True):
    """A watched metric has no data."""

    metric_fault: MetricFault


class RolloutStageChanged(Struct):
    """A policy changed its rollout stage in a project, or may."""

    project: Project
    policy: Policy
    rollout_stage: RolloutStage


class EndpointTest(Struct):
    """An operator tests an endpoint."""

    project: Project
    endpoint: Endpoint


EventData = RunEvent | DecisionEvent | RolloutStageChanged | EndpointTest


@dataclass(frozen=True)
class Declaration:
    """One type of event: a sentence for the reference, a headline that follows the run's name, and example data."""

    sentence: str
    headline: str
    example: EventData


_AT = datetime(2026, 1, 1, 14, 31, 7, 250_000, UTC)
_PROJECT = Project(UUID("0199aa0c-3333-7f44-9a55-665544332211"), "alignment")
_EVIDENCE = Evidence("k_decline", ("eval",), "count", 3.0, 1.0, 3.0, 120, "")
_PRECISION = Estimate(0.989, 0.918, 0.9999, Bounds(0.902, 0.9999), 92, 1)
_ROLLOUT_STAGE = RolloutStage(
    from_stage="shadow",
    to="canary",
    reason="at least 90.2 % of its stops were right, and 90.0 % are wanted",
    required_precision=0.9,
    canary_share=0.2,
    precision=_PRECISION,
    precision_since=_PRECISION,
)
_RUN: dict[str, Any] = {
    "project": _PROJECT,
    "run": Run(UUID("0199aa0d-1111-7e22-8f33-445566778899"), "ppo-7b-seed3", 1, {"slurm_job_id": "4711"}),
    "verdict": Verdict(Call.STOP, 150, 120, "3 evals in a row fell", (_EVIDENCE,), "turned"),
    "best_checkpoint": BestCheckpoint(120, "s3://runs/ppo-7b-seed3/120", 0.71, "smoothed_maximum", 0.698, 0.006),
}
_REQUEST = EvalRequest(
    id=UUID("0199aa12-5555-7c77-8d88-112233445566"),
    step=150,
    best_step=120,
    best_uri="s3://runs/ppo-7b-seed3/120",
    multiplier=4,
    seed=861230182,
    probability=0.74,
    deadline_at=datetime(2026, 1, 1, 20, 31, 7, 250_000, UTC),
)
_NO_DECISION: dict[str, Any] = {**_RUN, "decision": None}


def _decided(state: str) -> dict[str, Any]:
    return {**_RUN, "decision": Decision(UUID("0199aa11-7777-7b88-9c99-aabbccddeeff"), state, 150, _AT)}


def _silent(state: str) -> HealthChanged:
    return HealthChanged(**_NO_DECISION, health=Health(state, datetime(2026, 1, 1, 14, 1, 7, 250_000, UTC), 61.5))


DECLARATIONS: dict[EventType, Declaration] = {
    EventType.SUSPECTED: Declaration(
        "The policy suspects, for the first time in this attempt, that the run has stopped improving.",
        "may have stopped improving",
        RunEvent(**_NO_DECISION),
    ),
    EventType.EVAL_REQUESTED: Declaration(
        "An eval now would show whether the run has stopped improving. With a `request`, somebody said to answer it: "
        "see evaluate-now.md.",
        "should be evaluated now",
        EvalRequested(
            **_NO_DECISION,
            request=_REQUEST,
        ),
    ),
    EventType.STOP_REQUESTED: Declaration(
        "The receiver must end the job. Sent again, as a new event, when nobody confirms the stop.",
        "is to be stopped",
        DecisionEvent(**_decided("requested")),
    ),
    EventType.STOP_ON_HOLD: Declaration(
        "The policy wants a stop, and a guard holds it back.",
        "should be stopped, and a guard holds the stop back",
        StopOnHold(**_decided("on_hold"), guards=[Guard("paused", "dana has paused the project")]),
    ),
    EventType.STOP_ESCALATED: Declaration(
        "The receiver must end the job by force: nobody confirmed the stop for the second time.",
        "is to be stopped by force: nobody has confirmed the stop",
        DecisionEvent(**_decided("escalated")),
    ),
    EventType.STOPPED: Declaration(
        "The scheduler reports that the job is gone (`confirmed`), or the trainer ended it by itself (`obeyed`).",
        "was stopped",
        StopReported(**_decided("confirmed"), report={"exit_status": -15, "ended_at": "2026-01-01T14:31:30.000000Z"}),
    ),
    EventType.STOP_FAILED: Declaration(
        "The job could not be ended, or no receiver answered. A person should look.",
        "could not be stopped. A person should look",
        StopReported(**_decided("failed"), report={"escalations": 2}),
    ),
    EventType.RESUME_REQUESTED: Declaration(
        "A stop was undone: the job may continue from the best checkpoint.",
        "may continue: its stop was undone",
        DecisionEvent(**_decided("undone")),
    ),
    EventType.BEST_CHECKPOINT_CHANGED: Declaration(
        "Another checkpoint is the one to ship.",
        "has a new best checkpoint",
        RunEvent(**_NO_DECISION),
    ),
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
        "A watched metric is missing, renamed, constant or not a number: its detectors see nothing.",
        "has a metric that its detectors cannot use",
        MetricFaultFound(
            **_NO_DECISION,
            metric_fault=MetricFault("eval/score", FaultKind.CONSTANT, "its last 20 values are the same, 0.5"),
        ),
    ),
    EventType.ROLLOUT_STAGE_PROPOSED: Declaration(
        "By its measured precision a policy may do more, once an admin confirms it: on the page Overview, or by the "
        "API. As with the next, the event is about no run.",
        "may move",
        RolloutStageChanged(_PROJECT, Policy("early", 3), _ROLLOUT_STAGE),
    ),
    EventType.ROLLOUT_STAGE_CHANGED: Declaration(
        "A policy may now do more, by an admin's word, or less, by its measured precision. The event is about no run; "
        "deliveries order it with the newest run of the policy.",
        "moves",
        RolloutStageChanged(_PROJECT, Policy("early", 3), _ROLLOUT_STAGE),
    ),
    EventType.ENDPOINT_TEST: Declaration(
        "An operator tests whether an endpoint answers. Endpoints cannot subscribe to it.",
        "",
        EndpointTest(
            _PROJECT, Endpoint(UUID("0199aa0e-9999-7a11-8b22-c3d4e5f60718"), "https://receiver.example:8788/")
        ),
    ),
}


def announce_run_event(
    tx: Transaction,
    event_type: EventType,
    project: StoredProject,
    run: StoredRun,
    now: datetime,
    *,
    decision: StoredDecision | None = None,
    due_at: datetime | None = None,
    **details: object,
) -> UUID:
    """Write an event about a run, or about a decision on it, and its deliveries; returns the `webhook-id`.

    `due_at`: nothing is sent before; None sends at once. `details`: the fields that only this type has.
    """
    fields = {
        "project": project,
        "run": run,
        "verdict": run.verdict,
        "best_checkpoint": run.best_checkpoint,
        "decision": decision,
        **details,
    }
    decision_id = decision.id if decision is not None else None
    return announce_event(tx, event_type, project.id, run.id, fields, now, due_at=due_at, decision_id=decision_id)


def announce_event(
    tx: Transaction,
    event_type: EventType,
    project_id: UUID,
    run_id: UUID,
    fields: Mapping[str, object],
    now: datetime,
    *,
    due_at: datetime | None = None,
    decision_id: UUID | None = None,
) -> UUID:
    """Write an event and its deliveries; raises msgspec.ValidationError unless `fields` are those of its type."""
    return outbox.add_event(
        tx,
        project_id=project_id,
        run_id=run_id,
        type=event_type,
        data=build_data(event_type, fields),
        now=now,
        due_at=due_at,
        decision_id=decision_id,
    )


def build_data(event_type: EventType, fields: Mapping[str, object]) -> dict[str, Any]:
    """The data of an event as JSON values; rows of the store may stand for the structs of this module."""
    data = msgspec.convert(fields, type(DECLARATIONS[event_type].example), from_attributes=True)
    document: dict[str, Any] = msgspec.to_builtins(data)
    return event_size.fit_data(document)


@cache
def event_schema(event_type: EventType) -> dict[str, Any]:
    """The JSON Schema (2020-12) of one type of event, with an example."""
    declaration = DECLARATIONS[event_type]
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = [
        ("url", Url, msgspec.UNSET),
        ("timestamp", Time),
        ("data", type(declaration.example)),
    ]
    event = msgspec.defstruct("Event", fields, tag_field="type", tag=str(event_type), kw_only=True)
    _, parts = msgspec.json.schema_components([event], ref_template="#/$defs/{name}")
    schema = parts.pop("Event") | {"title": event_type, "description": declaration.sentence}
    return {"$schema": DIALECT, **schema, "$defs": parts, "examples": [example_event(event_type)]}


def example_event(event_type: EventType) -> dict[str, Any]:
    """An event as it may be sent."""
    document = {"type": event_type, "timestamp": _AT, "data": DECLARATIONS[event_type].example}
    example: dict[str, Any] = json.loads(msgspec.json.encode(document))
    return example
