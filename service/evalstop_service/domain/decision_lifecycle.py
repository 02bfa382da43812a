"""The life cycle of a decision: its states, which may follow each other, and the guards that put it on hold.

    on_hold <──> pending ──> requested ──> acknowledged      acknowledged and escalated may follow each other:
       │             │           │   └──> escalated <──┘      requested again, then escalated, then failed
       ├─> vetoed <──┤           │            └──> failed
       └─> moot   <──┴───────────┘                            from requested only while no receiver has the stop

    requested, acknowledged, escalated, failed ──> obeyed     the trainer saw the stop and ended the run by itself
    the same, and obeyed ────────────────────────> confirmed  the scheduler reports that the job is gone
    every state after the request ───────────────> undone     a person takes the stop back
    every state before it, except moot ──────────> requested  a person stops the run at once
    requested, escalated, failed ────────────────> vetoed     while nobody was handed the stop
    requested, acknowledged, escalated, failed ──> parked     an action to park: the job is set aside, and may return
    parked ──> undone | requested | confirmed | moot          it returns, a person has it stopped, or it ends
    requested, acknowledged, escalated, failed ──> confirmed  an exploit: the trainer has made the copy
    shadow                                                    recorded only
    held_out                                                  not carried out by random assignment

A stop is handed over when a worker or a receiver claims its delivery, or an answer tells the trainer to stop. Until
then it can be vetoed, whatever the time. `decision_events`, and `decision_commands` of people, change a state: a state
machine without I/O, events in, instructions out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, TypeVar
from uuid import UUID

from msgspec import Meta, Struct

from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.times import StopHours

SERVICE = "evalstop"
"""The actor of changes that the service makes itself."""


class DecisionState(StrEnum):
    """The state of a decision."""

    SHADOW = "shadow"
    HELD_OUT = "held_out"
    ON_HOLD = "on_hold"
    PENDING = "pending"
    REQUESTED = "requested"
    ACKNOWLEDGED = "acknowledged"
    ESCALATED = "escalated"
    CONFIRMED = "confirmed"
    OBEYED = "obeyed"
    PARKED = "parked"
    FAILED = "failed"
    VETOED = "vetoed"
    MOOT = "moot"
    UNDONE = "undone"


class Action(StrEnum):
    """What receivers are asked to do: end the job, or park it so that it can return; or the trainer, to go on from the
    checkpoint of another run of its group.

    A parked job holds no GPU for which others wait: it is held, suspended, or runs on otherwise idle GPUs.
    """

    STOP = "stop"
    PARK = "park"
    EXPLOIT = "exploit"


class Exploit(Struct, frozen=True):
    """The checkpoint of another run that a trainer is to load, and the hyperparameters to go on with."""

    decision_id: Annotated[UUID, Meta(description="the decision, to be confirmed once the copy is made")]
    source_run: Annotated[UUID, Meta(description="the run that is copied")]
    source_name: Annotated[str, Meta(description="its name")]
    source_step: Annotated[int, Meta(description="the step of its checkpoint; the copy goes on from there")]
    source_checkpoint: Annotated[str, Meta(description="the URI of its checkpoint")]
    hyperparameters: Annotated[dict[str, float | str], Meta(description="those that the copy goes on with")]


class Mode(StrEnum):
    """Whether the stops of a policy are carried out or only recorded."""

    SHADOW = "shadow"
    ENFORCE = "enforce"


class GuardKind(StrEnum):
    """Why a stop is put on hold; `evalstop_detectors.GuardKind` names those that a policy may override."""

    PAUSED = "paused"
    STOPS_PER_HOUR = "stops_per_hour"
    STOPS_SHARE = "stops_share"
    STALE = "stale"
    METRIC_FAULT = "metric_fault"
    NO_CHECKPOINT = "no_checkpoint"
    CANNOT_PARK = "cannot_park"
    SHARED_JOB = "shared_job"
    GROUP_LAST = "group_last"
    GROUP_SHARE = "group_share"


NEXT_STATES: dict[DecisionState, frozenset[DecisionState]] = {
    DecisionState(state): frozenset(map(DecisionState, following.split()))
    for state, following in {
        "shadow": "requested",
        "held_out": "requested",
        "on_hold": "pending requested vetoed moot",
        "pending": "on_hold requested vetoed moot",
        "requested": "on_hold pending acknowledged escalated confirmed obeyed parked failed vetoed moot undone",
        "acknowledged": "escalated confirmed obeyed parked failed undone",
        "escalated": "on_hold pending acknowledged confirmed obeyed parked failed vetoed moot undone",
        "confirmed": "undone",
        "obeyed": "confirmed failed undone",
        "parked": "requested confirmed moot undone",
        "failed": "confirmed obeyed parked vetoed undone",
        "vetoed": "requested",
        "moot": "confirmed",
        "undone": "",
    }.items()
}
"""The states that may follow each state."""

OBSERVED = frozenset({DecisionState.SHADOW, DecisionState.HELD_OUT})
"""No stop is sent: the run continues and shows whether the stop would have been right."""

AWAITING_CONFIRMATION = frozenset({DecisionState.REQUESTED, DecisionState.ACKNOWLEDGED, DecisionState.ESCALATED})
"""A receiver has to report before a deadline."""

STOPPED = frozenset({DecisionState.CONFIRMED, DecisionState.OBEYED})
"""The run ended because of the stop."""

STOPPING = AWAITING_CONFIRMATION | STOPPED | {DecisionState.PARKED, DecisionState.FAILED}
"""The job is to end, or to be parked."""

UNSENT = frozenset({DecisionState.PENDING, DecisionState.REQUESTED, DecisionState.ESCALATED})
"""The stop is to go out; if nobody was handed it, what would hold a pending one holds it too."""

VETOABLE = UNSENT | {DecisionState.ON_HOLD, DecisionState.FAILED}
"""A person can veto the stop, unless it was handed over."""

OPEN_EXPLOIT = AWAITING_CONFIRMATION | {DecisionState.ON_HOLD, DecisionState.PENDING}
"""The run is to copy another one, and has not done so."""

RETURNING = AWAITING_CONFIRMATION | {DecisionState.ON_HOLD, DecisionState.PENDING, DecisionState.PARKED}
"""A run that recovers leaves these states, if the action is to park it."""


@dataclass(frozen=True)
class Guard:
    """A reason to put a stop on hold: `kind` is for programs, `reason` for people, `details` holds the numbers."""

    kind: GuardKind
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeouts:
    """The veto window, and how long a stop may wait for its confirmation, in seconds; the hours in which stops may go
    out (None: all)."""

    veto_window_seconds: float
    confirm_seconds: float
    stop_hours: StopHours | None = None

    def find_opening(self, at: datetime) -> datetime:
        """The first time from then on at which a stop may go out."""
        return at if self.stop_hours is None else self.stop_hours.find_opening(at)


@dataclass(frozen=True)
class Lifecycle:
    """The state of a decision; a row of decisions has more.

    `guard_kinds`: the guards that hold it. `was_postponed`: whether a person had it wait in this veto window, by its
    history.
    """

    state: Annotated[DecisionState, Meta(description="its state in the life cycle")]
    due_at: Annotated[
        datetime, Meta(description="the end of the veto window; it can be vetoed until it is handed over")
    ]
    deadline_at: Annotated[
        datetime | None,
        Meta(description="next check: a stop on hold is tried again, an unconfirmed one is escalated"),
    ] = None
    escalations: Annotated[int, Meta(description="how often it was not confirmed in time")] = 0
    state_reason: Annotated[
        str, Meta(description="why it is in this state; for a stop on hold, the guards' reasons")
    ] = ""
    guard_kinds: list[str] = field(default_factory=list)
    action: Annotated[Action, Meta(description="stop the job, park it, or exploit: copy another run")] = Action.STOP
    handed_over_at: Annotated[
        datetime | None, Meta(description="when the stop first went out; null: it can still be vetoed")
    ] = None
    handed_over_to: Annotated[str | None, Meta(description="to whom it went out first, a receiver or the trainer")] = (
        None
    )
    failed_at: Annotated[datetime | None, Meta(description="when the stop last failed; null: it has not")] = None
    was_postponed: bool = field(default=False, compare=False)

    @property
    def is_vetoable(self) -> bool:
        """Whether a person can veto the stop: nobody was handed it yet."""
        return self.state in VETOABLE and self.handed_over_at is None

    @property
    def is_unsent(self) -> bool:
        """Whether the stop is to go out, and nobody was handed it yet."""
        return self.state in UNSENT and self.handed_over_at is None

    def has_missed(self, heard_at: datetime | None) -> bool:
        """Whether the stop failed and the run has reported since; `heard_at`: its last report, None once it ended."""
        if self.state is not DecisionState.FAILED or self.failed_at is None:
            return False
        return heard_at is not None and heard_at > self.failed_at


@dataclass(frozen=True)
class Record:
    """Add this change to the history."""

    state: DecisionState
    actor: str
    reason: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def state_reason(self) -> str:
        """Why the decision is in this state: for a stop on hold its guards, else the reason of the change."""
        guards = self.details.get("guards", ()) if self.state is DecisionState.ON_HOLD else ()
        return "; ".join(guard["reason"] for guard in guards) or self.reason


@dataclass(frozen=True)
class Announce:
    """Send an event to the endpoints."""

    type: EventType
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    """Cancel the unsent deliveries of the stop."""

    why: str


@dataclass(frozen=True)
class Refuse:
    """The event is not allowed in this state: nothing changes, and the caller gets an error with the reason."""

    why: str


Instruction = Record | Announce | Cancel | Refuse
L = TypeVar("L", bound=Lifecycle)

Transition = tuple[L, list[Instruction]]

RECHECK_SECONDS = 60.0
"""The time between two checks of the guards of a decision on hold."""


def put_on_hold(lifecycle: L, at: datetime, guards: tuple[Guard, ...], actor: str, reason: str) -> Transition[L]:
    """Hold the stop back, and tell people, until its guards are rechecked."""
    # The last decision of a job releases the others, which wait for nothing else.
    is_last = all(guard.kind is GuardKind.SHARED_JOB and guard.details["waiting"] for guard in guards)
    deadline_at = at + timedelta(seconds=0.0 if is_last else RECHECK_SECONDS)
    on_hold = replace(lifecycle, state=DecisionState.ON_HOLD, deadline_at=deadline_at, escalations=0)
    on_hold = replace(on_hold, guard_kinds=list_kinds(guards))
    details = describe_guards(guards)
    announced = [] if lifecycle.action is Action.EXPLOIT else [Announce(EventType.STOP_ON_HOLD, details)]
    return on_hold, [Record(on_hold.state, actor, reason, details), *announced]


def open_veto_window(
    lifecycle: L,
    at: datetime,
    actor: str,
    reason: str,
    timeouts: Timeouts,
    details: dict[str, Any] | None = None,
) -> Transition[L]:
    """Carry the stop out: start its veto window and tell people, or request it at once if there is none."""
    due_at = timeouts.find_opening(at + timedelta(seconds=timeouts.veto_window_seconds))
    lifecycle = replace(lifecycle, state=DecisionState.PENDING, due_at=due_at, deadline_at=None)
    if due_at > at:
        return lifecycle, [Record(lifecycle.state, actor, reason, details or {}), Announce(pending_type(lifecycle))]
    lifecycle = await_report(lifecycle, DecisionState.REQUESTED, at, timeouts)
    return lifecycle, [Record(lifecycle.state, actor, reason, details or {}), Announce(request_type(lifecycle))]


def request_type(lifecycle: Lifecycle) -> EventType:
    return EventType(f"run.{lifecycle.action}_requested")


def pending_type(lifecycle: Lifecycle) -> EventType:
    return EventType(f"run.{lifecycle.action}_pending")


def await_report(
    lifecycle: L, state: DecisionState, at: datetime, timeouts: Timeouts, expected_seconds: float = 0.0
) -> L:
    """Give a receiver until a deadline to report; `expected_seconds`: how long the job may take to end."""
    deadline_at = at + timedelta(seconds=expected_seconds + timeouts.confirm_seconds)
    return replace(lifecycle, state=state, deadline_at=deadline_at)


def fail_decision(lifecycle: L, at: datetime, actor: str, reason: str, report: dict[str, Any]) -> Transition[L]:
    """End it as failed, and tell people; a copy that failed is only recorded."""
    failed, record = end_decision(lifecycle, DecisionState.FAILED, actor, reason, report)
    announced = [] if lifecycle.action is Action.EXPLOIT else [Announce(EventType.STOP_FAILED, {"report": report})]
    return replace(failed, failed_at=at), [record, *announced]


def end_decision(
    lifecycle: L, state: DecisionState, actor: str, reason: str, details: dict[str, Any] | None = None
) -> tuple[L, Record]:
    """Nothing is awaited any more, though a later event may still change the state."""
    record = Record(state, actor, reason, details or {})
    return replace(lifecycle, state=state, deadline_at=None), record


def list_kinds(guards: Iterable[Guard]) -> list[str]:
    return sorted({guard.kind for guard in guards})


def join_reasons(guards: Iterable[Guard]) -> str:
    return "; ".join(guard.reason for guard in guards)


def describe_guards(guards: Iterable[Guard]) -> dict[str, Any]:
    return {"guards": [asdict(guard) for guard in guards]}
