"""What events look like, as JSON Schema (2020-12) with an example each; documentation and tests are made from here.

Receivers pass over what they do not know: fields may be added within a version of the API, and none is taken away.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from evalstop_detectors import Kind
from pydantic import BaseModel, ConfigDict, Field, create_model

DIALECT = "https://json-schema.org/draft/2020-12/schema"

TEST = "endpoint.test"
"""Sent by hand to see whether an endpoint answers; nobody subscribes to it."""

Number = float | Literal["NaN", "Infinity", "-Infinity"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")


class Project(_Part):
    """The tenant."""

    id: str
    name: str


class Run(_Part):
    """The training job. Its labels say which one it is to a scheduler."""

    id: str
    name: str
    attempt: int = Field(description="counts how often it was resumed, from 1")
    labels: dict[str, str]


class Evidence(_Part):
    """What one detector found, beside the thresholds that it was held against."""

    detector: str
    roles: list[str]
    kind: str = Field(description=f"what the number means: {', '.join(Kind)}")
    value: Number
    suspect_at: Number | None
    stop_at: Number | None
    turn_step: int | None
    note: str


class Verdict(_Part):
    """What the policy makes of the run so far."""

    verdict: Literal["continue", "suspect", "stop"]
    step: int | None
    turn_step: int | None = Field(description="where the detectors believe the turn was")
    reason: str
    evidence: list[Evidence]


class BestCheckpoint(_Part):
    """The checkpoint one should ship."""

    step: int
    uri: str
    score: Number
    chosen_by: str


class Decision(_Part):
    """The stop that this is about."""

    id: str
    state: str
    step: int
    due_at: str = Field(description="the end of its grace period, RFC 3339", json_schema_extra={"format": "date-time"})


class Guard(_Part):
    """One reason to hold a stop back."""

    kind: str
    reason: str
    details: dict[str, Any]


class Pulse(_Part):
    """When the run was last heard of."""

    state: str
    heard_at: str = Field(json_schema_extra={"format": "date-time"})
    cadence_seconds: float | None = Field(description="learnt: the usual time between two posts")


class Dead(_Part):
    """A metric that tells its detectors nothing."""

    metric: str
    kind: str
    reason: str


class Endpoint(_Part):
    """The endpoint that is tried."""

    id: str
    url: str


class Policy(_Part):
    """The policy that has moved."""

    name: str
    version: int


class Bounds(_Part):
    """The ends of an interval if all undecided cases were to turn out badly, and if all were to turn out well."""

    low: float
    high: float


class Measured(_Part):
    """A precision as it was measured, with its interval."""

    value: float | None
    low: float
    high: float
    bounds: Bounds
    decided: int
    undecided: int


class RolloutStage(_Part):
    """How much the policy may do by itself, from now on and until now, and the numbers that decided it."""

    from_stage: Literal["shadow", "canary", "enforce"] = Field(alias="from")
    to: Literal["shadow", "canary", "enforce"]
    reason: str
    precision_wanted: float = Field(description="the line that the lower bound has to pass")
    canary_share: float = Field(description="of its stops, carried out while it is a canary")
    precision: Measured | None = Field(None, description="of all cases of this version")
    precision_since: Measured | None = Field(None, description="of those that ended since it came to its last stage")


class Data(_Part):
    """What every event about a run says, as far as it applies."""

    project: Project
    run: Run
    verdict: Verdict
    best_checkpoint: BestCheckpoint | None
    decision: None


class Decided(Data):
    """An event about a decision."""

    decision: Decision  # type: ignore[assignment]


class OnHold(Decided):
    """With what speaks against the stop."""

    guards: list[Guard]


class Reported(Decided):
    """With what a receiver reported, or how often the service asked in vain."""

    report: dict[str, Any]


class Silent(Data):
    """With the run's pulse."""

    pulse: Pulse


class Blind(Data):
    """With the metric that is dead."""

    dead: Dead


class Moved(_Part):
    """A policy moves in its project as a whole, and not for one run."""

    project: Project
    policy: Policy
    rollout_stage: RolloutStage


class Tried(_Part):
    """A test of an endpoint is about no run."""

    project: Project
    endpoint: Endpoint


EVENTS: dict[str, tuple[type[BaseModel], str]] = {
    "run.suspected": (Data, "The policy suspects, for the first time in this attempt, that the run has turned."),
    "run.eval_requested": (Data, "An eval now would tell whether the run has turned."),
    "run.stop_requested": (Decided, "The job is to be ended. Sent again, as a new event, when nobody confirms it."),
    "run.stop_on_hold": (OnHold, "The policy wants a stop, and something speaks against it."),
    "run.stop_escalated": (Decided, "The job is to be ended, harder: nobody confirmed it for the second time."),
    "run.stopped": (Reported, "The scheduler says that the job is gone."),
    "run.stop_failed": (Reported, "Nobody could end the job, or nobody answered. A person should look."),
    "run.resume_requested": (Decided, "A stop was taken back: the job may go on from the best checkpoint."),
    "run.best_checkpoint_changed": (Data, "Another checkpoint is the one to ship."),
    "run.stale": (Silent, "The run has been silent for longer than is usual for it."),
    "run.lost": (Silent, "The run has been silent for so long that it is taken for ended."),
    "detector.dead": (Blind, "A metric is missing, renamed, constant or not a number: its detectors see nothing."),
    "policy.rollout_stage_changed": (Moved, "By what it has shown, a policy may do more by itself, or less."),
    TEST: (Tried, "Sent by hand to see whether an endpoint answers."),
}
"""By type: what its `data` holds, and what it says."""


@cache
def schema(event_type: str) -> dict[str, Any]:
    """The JSON Schema of one type of event. KeyError: there is no such type."""
    data, says = EVENTS[event_type]
    event = create_model(
        event_type,
        __config__=ConfigDict(extra="allow"),
        type=(Literal[event_type], ...),  # type: ignore[arg-type]
        timestamp=(str, Field(description="RFC 3339, UTC", json_schema_extra={"format": "date-time"})),
        data=(data, ...),
    )
    made = event.model_json_schema()
    return {"$schema": DIALECT, **made, "description": says, "examples": [example(event_type)]}


def example(event_type: str) -> dict[str, Any]:
    """An event as it may be sent."""
    data, _ = EVENTS[event_type]
    told = {name: _SAID[name] for name in data.model_fields}
    if data in (Tried, Moved):
        return {"type": event_type, "timestamp": _AT, "data": told}
    if not issubclass(data, Decided):
        told["decision"] = None
    elif event_type in _STATES:
        told["decision"] = _SAID["decision"] | {"state": _STATES[event_type]}
    if event_type == "run.lost":
        told["pulse"] = _SAID["pulse"] | {"state": "lost"}
    if event_type == "run.stop_failed":
        told["report"] = {"escalations": 2}
    return {"type": event_type, "timestamp": _AT, "data": told}


_AT = "2026-01-01T14:31:07.250000Z"

_STATES = {
    "run.stop_on_hold": "on_hold",
    "run.stop_escalated": "escalated",
    "run.stopped": "confirmed",
    "run.stop_failed": "failed",
    "run.resume_requested": "undone",
}

_MEASURED = {
    "value": 0.989,
    "low": 0.918,
    "high": 0.9999,
    "bounds": {"low": 0.902, "high": 0.9999},
    "decided": 92,
    "undecided": 1,
}

_SAID: dict[str, Any] = {
    "project": {"id": "0199aa0c-3333-7f44-9a55-665544332211", "name": "alignment"},
    "run": {
        "id": "0199aa0d-1111-7e22-8f33-445566778899",
        "name": "ppo-7b-seed3",
        "attempt": 1,
        "labels": {"slurm_job_id": "4711"},
    },
    "verdict": {
        "verdict": "stop",
        "step": 150,
        "turn_step": 120,
        "reason": "3 evals in a row fell",
        "evidence": [
            {
                "detector": "k_decline",
                "roles": ["eval"],
                "kind": "count",
                "value": 3.0,
                "suspect_at": 1.0,
                "stop_at": 3.0,
                "turn_step": 120,
                "note": "",
            }
        ],
    },
    "best_checkpoint": {
        "step": 120,
        "uri": "s3://runs/ppo-7b-seed3/120",
        "score": 0.71,
        "chosen_by": "smoothed_maximum",
    },
    "decision": {
        "id": "0199aa11-7777-7b88-9c99-aabbccddeeff",
        "state": "requested",
        "step": 150,
        "due_at": _AT,
    },
    "guards": [{"kind": "paused", "reason": "dana has paused the project", "details": {}}],
    "report": {"exit_status": -15, "ended_at": "2026-01-01T14:31:30.000000Z"},
    "pulse": {"state": "stale", "heard_at": "2026-01-01T14:01:07.250000Z", "cadence_seconds": 61.5},
    "dead": {"metric": "reward/gold", "kind": "constant", "reason": "its last 20 values are the same"},
    "policy": {"name": "early", "version": 3},
    "rollout_stage": {
        "from": "shadow",
        "to": "canary",
        "reason": "at least 90.2% of its stops were right, and 90.0% are wanted",
        "precision_wanted": 0.9,
        "canary_share": 0.2,
        "precision": _MEASURED,
        "precision_since": _MEASURED,
    },
    "endpoint": {"id": "0199aa0e-9999-7a11-8b22-c3d4e5f60718", "url": "https://receiver.example:8788/"},
}
