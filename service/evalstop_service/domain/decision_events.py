"""The events that change the state of a decision, and the instructions that follow.

Elapsed time is an event too: `TimePassed` for deadlines, `WindowEnded` for veto windows. `decision_transitions` applies
events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from evalstop_service.domain.decision_lifecycle import Action, DecisionState, Guard, Lifecycle, Mode
from evalstop_service.domain.event_types import EventType


@dataclass(frozen=True)
class StopDecided:
    """The policy, or the rule of the run's group, calls for a stop, for the job to be parked, or for a copy.

    `held_out`: random assignment holds it out, with the numbers in `draw`.
    """

    at: datetime
    actor: str
    reason: str
    mode: Mode
    guards: tuple[Guard, ...]
    held_out: bool = False
    draw: dict[str, float] = field(default_factory=dict)
    action: Action = Action.STOP


@dataclass(frozen=True)
class TimePassed:
    """Time has passed. `attempt_over`: the run is in a later attempt than the one to be stopped.

    `refusal`: why no receiver will ever accept the stop; None: one accepted it, or still may.
    """

    at: datetime
    attempt_over: bool = False
    refusal: str | None = None


@dataclass(frozen=True)
class WindowEnded:
    """All vetoes that were sent before `heard_until` have been dealt with."""

    at: datetime
    heard_until: datetime


@dataclass(frozen=True)
class WindowReopened:
    """A stop that nobody was handed has to wait until `due_at`, for `reason`."""

    at: datetime
    due_at: datetime
    reason: str


@dataclass(frozen=True)
class GuardsChecked:
    """The guards of a decision on hold were rechecked; `verdict_stops`: the verdict still calls for the stop.

    `withdrawn`: why the rule of a group that called for it no longer does.
    """

    at: datetime
    guards: tuple[Guard, ...]
    verdict_stops: bool
    withdrawn: str | None = None


@dataclass(frozen=True)
class GuardsRaised:
    """Guards were raised against a stop that nobody was handed."""

    at: datetime
    guards: tuple[Guard, ...]


@dataclass(frozen=True)
class Command:
    """A person's command, with a reason."""

    at: datetime
    actor: str
    reason: str


class Vetoed(Command):
    """A person lets the run continue."""


@dataclass(frozen=True)
class Postponed(Command):
    """A person has a pending stop wait until then; once in a veto window."""

    until: datetime


@dataclass(frozen=True)
class Undone(Command):
    """A person takes back a requested stop, or has a parked job return.

    `heard_at`: when the run last reported; None: it ended.
    """

    heard_at: datetime | None = None


class Recovered(Command):
    """The policy, which parks runs, no longer suspects this one."""


@dataclass(frozen=True)
class Released(Command):
    """A person releases a stop on hold despite its guards."""

    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True)
class StopOrdered(Command):
    """A person stops the run at once, regardless of policy, mode and guards, except for a pause of the project."""

    paused: bool = False


@dataclass(frozen=True)
class Reported:
    """A receiver reports `acknowledged`, `confirmed`, `parked` or `failed`.

    `expected_seconds`: with `acknowledged`, how long the job may take to end.
    """

    at: datetime
    state: DecisionState
    actor: str
    reason: str
    details: dict[str, Any]
    expected_seconds: float = 0.0


@dataclass(frozen=True)
class RunEnded:
    """The run ended by itself; `receiver_informed`: a receiver may have the stop."""

    at: datetime
    status: str
    receiver_informed: bool


@dataclass(frozen=True)
class RunObeyed:
    """The trainer saw the stop and ended the run by itself; `actor`: the key of its report."""

    at: datetime
    actor: str


@dataclass(frozen=True)
class RunResumed:
    """The trainer resumed from a step in a new attempt; `receiver_informed`: a receiver may have the stop."""

    at: datetime
    step: int
    receiver_informed: bool


Event = (
    TimePassed
    | WindowEnded
    | WindowReopened
    | GuardsChecked
    | GuardsRaised
    | Released
    | StopOrdered
    | Vetoed
    | Postponed
    | Undone
    | Recovered
    | Reported
    | RunEnded
    | RunObeyed
    | RunResumed
)


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
