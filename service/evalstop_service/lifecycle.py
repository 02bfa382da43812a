"""The life of a decision: its states, and which may follow which. Pure.

shadow                                    recorded, nobody is told
pending ──> requested ──> confirmed       the grace period is over; the event goes out; the job is gone
   │            └─────> failed ──> confirmed
   └──────> vetoed                        a person said no within the grace period
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a decision stands."""

    SHADOW = "shadow"
    PENDING = "pending"
    REQUESTED = "requested"
    CONFIRMED = "confirmed"
    VETOED = "vetoed"
    FAILED = "failed"


class Mode(StrEnum):
    """Whether the stops of a policy are carried out or only recorded."""

    SHADOW = "shadow"
    ENFORCE = "enforce"


FOLLOWS: dict[State, frozenset[State]] = {
    State.SHADOW: frozenset(),
    State.PENDING: frozenset({State.REQUESTED, State.VETOED}),
    State.REQUESTED: frozenset({State.CONFIRMED, State.FAILED}),
    State.CONFIRMED: frozenset(),
    State.VETOED: frozenset(),
    State.FAILED: frozenset({State.CONFIRMED}),
}

STOPPING = frozenset({State.REQUESTED, State.CONFIRMED, State.FAILED})
"""The states in which the job is meant to end."""


def opening(mode: Mode, grace_seconds: float) -> State:
    """The state in which a decision is born."""
    if mode is Mode.SHADOW:
        return State.SHADOW
    return State.PENDING if grace_seconds > 0 else State.REQUESTED


def may_follow(present: State, following: State) -> bool:
    """Whether a decision may go from one state to the other."""
    return following in FOLLOWS[present]
