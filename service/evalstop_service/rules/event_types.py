"""The types of events; `webhooks.events` declares their contents."""

from __future__ import annotations

from enum import StrEnum


class EventType(StrEnum):
    """The types of events that endpoints subscribe to."""

    SUSPECTED = "run.suspected"
    EVAL_REQUESTED = "run.eval_requested"
    STOP_REQUESTED = "run.stop_requested"
    STOP_ON_HOLD = "run.stop_on_hold"
    STOP_ESCALATED = "run.stop_escalated"
    STOPPED = "run.stopped"
    PARK_REQUESTED = "run.park_requested"
    PARKED = "run.parked"
    PARK_OVERDUE = "run.park_overdue"
    STOP_FAILED = "run.stop_failed"
    RESUME_REQUESTED = "run.resume_requested"
    BEST_CHECKPOINT_CHANGED = "run.best_checkpoint_changed"
    COMPLETED = "run.completed"
    FAILED = "run.failed"
    STALE = "run.stale"
    LOST = "run.lost"
    METRIC_FAULT = "run.metric_fault"
    ROLLOUT_STAGE_PROPOSED = "policy.rollout_stage_proposed"
    ROLLOUT_STAGE_CHANGED = "policy.rollout_stage_changed"
    ENDPOINT_TEST = "endpoint.test"


SUBSCRIBABLE = tuple(event_type for event_type in EventType if event_type is not EventType.ENDPOINT_TEST)

STOP_EVENTS = (EventType.STOP_REQUESTED, EventType.STOP_ESCALATED)
"""Events that ask a receiver to end a job."""

REQUEST_EVENTS = (*STOP_EVENTS, EventType.PARK_REQUESTED)
"""Events that ask a receiver to end or to park a job."""

URGENT_EVENTS = frozenset({*REQUEST_EVENTS, EventType.RESUME_REQUESTED})
"""Events that ask a receiver to act: they do not wait behind other events of their run."""

PRESETS = {
    "receiver": (*STOP_EVENTS, EventType.RESUME_REQUESTED),
    "parking_receiver": (*REQUEST_EVENTS, EventType.RESUME_REQUESTED),
    "team": (
        EventType.SUSPECTED,
        EventType.STOP_ON_HOLD,
        EventType.STOPPED,
        EventType.PARKED,
        EventType.COMPLETED,
        EventType.FAILED,
    ),
    "on_call": (
        EventType.STOP_ON_HOLD,
        EventType.STOP_FAILED,
        EventType.PARK_OVERDUE,
        EventType.STALE,
        EventType.LOST,
        EventType.METRIC_FAULT,
    ),
}
"""The default subscription of each kind of endpoint."""
