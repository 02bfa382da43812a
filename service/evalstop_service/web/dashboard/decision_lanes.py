"""A decision as swim lanes: its verdict and each of its states, over one time axis. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from evalstop_service.domain.decision_lifecycle import AWAITING_CONFIRMATION, DecisionState
from evalstop_service.store.decisions import Decision, DecisionChange
from evalstop_service.web.dashboard import formatting

LASTING = AWAITING_CONFIRMATION | {DecisionState.ON_HOLD, DecisionState.PENDING, DecisionState.PARKED}
"""States that another state must follow. Any other is shown as a moment while it is the last."""

WITH_DEADLINE = AWAITING_CONFIRMATION | {DecisionState.PENDING}
"""The ones with a deadline."""


@dataclass(frozen=True)
class Lane:
    """The verdict or a state: when it began, by whom and why, and its position in percent of the axis.

    `seconds`: how long it lasted; None: it is a moment, or still lasts (`is_open`), at the latest `until`, if known.
    `actor`, `reason`: empty if they are the same as in the verdict's lane.
    """

    name: str
    state: str
    at: datetime
    actor: str
    reason: str
    x: float
    width: float = 0.0
    seconds: float | None = None
    is_open: bool = False
    until: datetime | None = None
    details: dict[str, Any] | None = None


@dataclass(frozen=True)
class DecisionLanes:
    """The lanes of a decision, first to last, and the length of their axis in seconds."""

    lanes: Sequence[Lane]
    seconds: float


def draw_lanes(decision: Decision, changes: Sequence[DecisionChange], now: datetime) -> DecisionLanes:
    """The lanes of a decision and its changes, oldest first; there is at least one change."""
    first, last = changes[0], changes[-1]
    is_open = last.state in LASTING
    until = decision.due_at if last.state is DecisionState.PENDING else decision.deadline_at
    until = until if last.state in WITH_DEADLINE else None
    end = max(last.at, now, until or now) if is_open else last.at
    seconds = (end - first.at).total_seconds()

    def place(at: datetime) -> float:
        return round(100 * (at - first.at).total_seconds() / seconds, 2) if seconds else 0.0

    lanes = []
    if not decision.ordered:
        lanes.append(Lane("verdict", "verdict", first.at, first.actor, first.reason, x=0.0))
    for change, following in zip(changes, [*changes[1:], None], strict=True):
        ended = following.at if following else end
        is_last, is_told = following is None, change is first and bool(lanes)
        lanes.append(
            Lane(
                _name_lane(change.state, decision),
                change.state,
                change.at,
                "" if is_told else change.actor,
                "" if is_told else change.reason,
                x=place(change.at),
                width=round(place(ended) - place(change.at), 2),
                seconds=None if is_last else (ended - change.at).total_seconds(),
                is_open=is_last and is_open,
                until=until if is_last else None,
                details=formatting.list_change_details(change),
            )
        )
    return DecisionLanes(lanes, seconds)


def _name_lane(state: DecisionState, decision: Decision) -> str:
    return "veto window" if state is DecisionState.PENDING else formatting.name_state(state, decision.action)
