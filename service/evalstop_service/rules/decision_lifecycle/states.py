"""The words of a decision's life: its states, what may befall it, and what is to be done about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from evalstop_service.rules.event_types import EventType

SERVICE = "evalstop"
"""The actor of what the service does by itself."""

PAUSED = "paused"
"""The kind of the guard that nobody can release a decision from: its project is paused."""


class DecisionState(StrEnum):
    """Where a decision stands."""

    SHADOW = "shadow"
    HELD_OUT = "held_out"
    ON_HOLD = "on_hold"
    PENDING = "pending"
    REQUESTED = "requested"
    ACKNOWLEDGED = "acknowledged"
    ESCALATED = "escalated"
    CONFIRMED = "confirmed"
    FAILED = "failed"
    VETOED = "vetoed"
    MOOT = "moot"
    UNDONE = "undone"


class Mode(StrEnum):
    """Whether the stops of a policy are carried out or only recorded."""

    SHADOW = "shadow"
    ENFORCE = "enforce"


NEXT_STATES: dict[DecisionState, frozenset[DecisionState]] = {
    DecisionState.SHADOW: frozenset({DecisionState.REQUESTED}),
    DecisionState.HELD_OUT: frozenset({DecisionState.REQUESTED}),
    DecisionState.ON_HOLD: frozenset(
        {DecisionState.PENDING, DecisionState.REQUESTED, DecisionState.VETOED, DecisionState.MOOT}
    ),
    DecisionState.PENDING: frozenset(
        {DecisionState.ON_HOLD, DecisionState.REQUESTED, DecisionState.VETOED, DecisionState.MOOT}
    ),
    DecisionState.REQUESTED: frozenset(
        {
            DecisionState.ACKNOWLEDGED,
            DecisionState.ESCALATED,
            DecisionState.CONFIRMED,
            DecisionState.FAILED,
            DecisionState.MOOT,
            DecisionState.UNDONE,
        }
    ),
    DecisionState.ACKNOWLEDGED: frozenset(
        {DecisionState.ESCALATED, DecisionState.CONFIRMED, DecisionState.FAILED, DecisionState.UNDONE}
    ),
    DecisionState.ESCALATED: frozenset(
        {
            DecisionState.ACKNOWLEDGED,
            DecisionState.CONFIRMED,
            DecisionState.FAILED,
            DecisionState.MOOT,
            DecisionState.UNDONE,
        }
    ),
    DecisionState.CONFIRMED: frozenset({DecisionState.UNDONE}),
    DecisionState.FAILED: frozenset({DecisionState.CONFIRMED, DecisionState.UNDONE}),
    DecisionState.VETOED: frozenset({DecisionState.REQUESTED}),
    DecisionState.MOOT: frozenset({DecisionState.CONFIRMED}),
    DecisionState.UNDONE: frozenset(),
}
"""Which state may follow which."""

LET_RUN = frozenset({DecisionState.SHADOW, DecisionState.HELD_OUT})
"""The states in which nobody is told, so that the run goes on and shows whether its stop is right."""

AWAITING_CONFIRMATION = frozenset({DecisionState.REQUESTED, DecisionState.ACKNOWLEDGED, DecisionState.ESCALATED})
"""The states in which somebody's word is waited for, until a deadline."""

STOPPING = AWAITING_CONFIRMATION | {DecisionState.CONFIRMED, DecisionState.FAILED}
"""The states in which the job is meant to end."""


@dataclass(frozen=True)
class Guard:
    """One reason to hold a stop back: its `kind` for machines, the `reason` for people, and the numbers behind it."""

    kind: str
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeouts:
    """For how long a person may veto, and how long a stop may wait for its confirmation, in seconds."""

    veto_window_seconds: float
    confirm_seconds: float


@dataclass(frozen=True)
class Lifecycle:
    """How a decision stands.

    `due_at`: the end of its veto window. `deadline_at`: when the service looks after it by itself, None in states in
    which it does not. `held_by`: the kinds of guards that it was last said to be on hold for. `heard`: what receivers
    reported after it was undone.
    """

    state: DecisionState
    due_at: datetime
    deadline_at: datetime | None = None
    escalations: int = 0
    held_by: frozenset[str] = frozenset()
    heard: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StopDecided:
    """The policy wants a stop. `held_out`: chance keeps it from being carried out, by the numbers in `chance`."""

    at: datetime
    actor: str
    reason: str
    mode: Mode
    guards: tuple[Guard, ...]
    held_out: bool = False
    chance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TimePassed:
    """Time has passed. `gone_on`: the run is in a later attempt than the one that was to be stopped."""

    at: datetime
    gone_on: bool = False


@dataclass(frozen=True)
class GuardsChecked:
    """What speaks against the stop was looked at again; `wanted`: the verdict still calls for it."""

    at: datetime
    guards: tuple[Guard, ...]
    wanted: bool


@dataclass(frozen=True)
class GuardsRaised:
    """Something came up that speaks against the stop."""

    at: datetime
    guards: tuple[Guard, ...]


@dataclass(frozen=True)
class Released:
    """A person has it carried out despite what speaks against it."""

    at: datetime
    actor: str
    reason: str
    guards: tuple[Guard, ...]


@dataclass(frozen=True)
class StopOrdered:
    """A person has the run stopped at once, whatever its policy, its mode and the guards say, but for a pause."""

    at: datetime
    actor: str
    reason: str
    paused: bool = False


@dataclass(frozen=True)
class Vetoed:
    """A person lets the run go on."""

    at: datetime
    actor: str
    reason: str


@dataclass(frozen=True)
class Reported:
    """A receiver says what it sees: `acknowledged`, `confirmed` or `failed`.

    `expected_seconds`: with `acknowledged`, how long it will take before the job can be gone.
    """

    at: datetime
    state: DecisionState
    actor: str
    reason: str
    details: dict[str, Any]
    expected_seconds: float = 0.0


@dataclass(frozen=True)
class RunEnded:
    """The run ended by itself, as `status`; `told`: some receiver may know of the stop."""

    at: datetime
    status: str
    told: bool


@dataclass(frozen=True)
class RunResumed:
    """The trainer went on from a step in a new attempt; `told`: the stop may have reached a receiver."""

    at: datetime
    step: int
    told: bool


@dataclass(frozen=True)
class Undone:
    """A person takes back a stop that was handed out."""

    at: datetime
    actor: str
    reason: str


Event = (
    TimePassed
    | GuardsChecked
    | GuardsRaised
    | Released
    | StopOrdered
    | Vetoed
    | Reported
    | RunEnded
    | RunResumed
    | Undone
)


@dataclass(frozen=True)
class Record:
    """Add this to the history."""

    state: DecisionState
    actor: str
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Announce:
    """Tell of it by an event, at once or from `due_at` on."""

    type: EventType
    data: dict[str, Any] = field(default_factory=dict)
    due_at: datetime | None = None


@dataclass(frozen=True)
class Cancel:
    """Keep back what was not sent yet of the stop."""

    why: str


@dataclass(frozen=True)
class Refuse:
    """This cannot follow: nothing is changed, and whoever asked for it is told why."""

    why: str


Instruction = Record | Announce | Cancel | Refuse
