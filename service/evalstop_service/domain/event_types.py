"""The types of events; `webhooks.events` declares their contents."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EventType(StrEnum):
    """The types of events that endpoints subscribe to."""

    SUSPECTED = "run.suspected"
    EVAL_REQUESTED = "run.eval_requested"
    STOP_PENDING = "run.stop_pending"
    STOP_REQUESTED = "run.stop_requested"
    STOP_ON_HOLD = "run.stop_on_hold"
    STOP_ESCALATED = "run.stop_escalated"
    STOPPED = "run.stopped"
    PARK_PENDING = "run.park_pending"
    PARK_REQUESTED = "run.park_requested"
    EXPLOIT_PENDING = "run.exploit_pending"
    EXPLOIT_REQUESTED = "run.exploit_requested"
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
    RULE_MET = "run.rule_met"
    ALERT = "run.alert"
    ROLLOUT_STAGE_PROPOSED = "policy.rollout_stage_proposed"
    ROLLOUT_STAGE_CHANGED = "policy.rollout_stage_changed"
    DIGEST = "project.digest"
    ENDPOINT_TEST = "endpoint.test"


SUBSCRIBABLE = tuple(event_type for event_type in EventType if event_type is not EventType.ENDPOINT_TEST)

STOP_EVENTS = (EventType.STOP_REQUESTED, EventType.STOP_ESCALATED)
"""Events that ask a receiver to end a job."""

PARKING_EVENTS = (*STOP_EVENTS, EventType.PARK_REQUESTED)
"""Events that ask a receiver to end or to park a job."""

REQUEST_EVENTS = (*PARKING_EVENTS, EventType.EXPLOIT_REQUESTED)
"""The same, and the event that asks one to restart a job from the checkpoint of another run."""

PENDING_EVENTS = (EventType.STOP_PENDING, EventType.PARK_PENDING, EventType.EXPLOIT_PENDING)
"""Events that tell people of a stop or copy while they can veto it."""

URGENT_EVENTS = frozenset({*REQUEST_EVENTS, EventType.RESUME_REQUESTED})
"""Events that ask a receiver to act: they do not wait behind other events of their run."""

NOTICES = (EventType.RULE_MET, EventType.ALERT)
"""Events by which a project's rules and its trainers notify people; the page of the run lists them."""

NAMED_EVENTS = frozenset({EventType.DIGEST})
"""Events for those who subscribe to them by name: `*` leaves them out, and without a subscriber none is written."""


@dataclass(frozen=True)
class Preset:
    """The event types of one kind of endpoint; `purpose` completes "for ..."."""

    purpose: str
    event_types: tuple[EventType, ...]


_FOR_PEOPLE = (
    *PENDING_EVENTS,
    EventType.STOP_ON_HOLD,
    EventType.STOPPED,
    EventType.PARKED,
    EventType.STOP_FAILED,
    EventType.FAILED,
    *NOTICES,
)

PRESETS = {
    "receiver": Preset("a receiver that stops jobs", (*STOP_EVENTS, EventType.RESUME_REQUESTED)),
    "parking_receiver": Preset("a receiver that can park jobs too", (*PARKING_EVENTS, EventType.RESUME_REQUESTED)),
    "owner": Preset(
        "the owner of each run", (*_FOR_PEOPLE, EventType.PARK_OVERDUE, EventType.LOST, EventType.METRIC_FAULT)
    ),
    "team": Preset("a team's channel", (EventType.SUSPECTED, *_FOR_PEOPLE, EventType.COMPLETED)),
}
"""What each kind of endpoint subscribes to by default: the shell, the API and the pages all offer these."""
