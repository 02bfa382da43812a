"""Whether a run is alive, as its silence tells. Pure.

    alive ──> stale ──> lost          it is silent for longer than its own habit explains
      ^─────────┴─────────┘           it posts again, or its trainer's client says that it is there

A run's habit is the longest pause that it made twice, among its newest posts. That is a robust measure of the right
thing: a median would take the pause of each long eval for silence, and a maximum would remember one outage for ever.
A run is stale after three such pauses, but not before the project's `stale_seconds`, which alone counts while there is
too little to learn from. It is lost once it has been known to be stale for eleven times as long: an hour of silence in
all where nothing else is said. Stale is a warning and holds stops back; lost ends the run on record, which neither a
slow file system nor an hour in which the service itself heard nothing must do.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from typing import Any

FEWEST_PAUSES = 4
"""With fewer of them between posts there is no habit to speak of."""

STALE_PAUSES = 3.0
LOST_TIMES = 11.0


class Liveness(StrEnum):
    """How a run is."""

    ALIVE = "alive"
    STALE = "stale"
    LOST = "lost"


FOUND_AGAIN: dict[str, Any] = {"status": "running", "ended_at": None, "turn": None}
"""What changes of a run that was lost, and ended thereby, when something is heard of it."""


def measure_cadence(newest: Sequence[Sequence[datetime]], most: int) -> float | None:
    """The longest pause in seconds that occurred at least twice between posts; None when there are too few of them.

    `newest`: of each metric the moments at which its newest values came, at most `most` each, in any order. What lies
    before a metric's oldest moment, of one that has more than are given, is left out: there posts would be missing.
    """
    begins = max((min(moments) for moments in newest if len(moments) >= most), default=None)
    posts = sorted({moment for moments in newest for moment in moments if begins is None or moment >= begins})
    pauses = sorted((later - earlier).total_seconds() for earlier, later in pairwise(posts))
    return pauses[-2] if len(pauses) >= FEWEST_PAUSES else None


def stale_after_seconds(stale_seconds: float, cadence_seconds: float | None) -> float:
    """The seconds of silence from which a run is stale."""
    return max(stale_seconds, STALE_PAUSES * (cadence_seconds or 0.0))


def assess_liveness(
    silence_seconds: float, stale_for_seconds: float | None, stale_seconds: float, cadence_seconds: float | None
) -> Liveness:
    """How a run is that has been silent for so long and, unless None, known to be stale for so long."""
    limit = stale_after_seconds(stale_seconds, cadence_seconds)
    if silence_seconds < limit:
        return Liveness.ALIVE
    return Liveness.LOST if (stale_for_seconds or 0.0) >= LOST_TIMES * limit else Liveness.STALE


def seconds_until_check(
    silence_seconds: float, stale_for_seconds: float | None, stale_seconds: float, cadence_seconds: float | None
) -> float:
    """In how many seconds a run that is not lost is to be looked at again: when it would turn stale, or be lost.

    One that is stale may post meanwhile and fall silent again, so it is looked at as often as one that is alive. What
    is closer than a second is not worth being exact about.
    """
    limit = stale_after_seconds(stale_seconds, cadence_seconds)
    if silence_seconds < limit:
        return max(1.0, limit - silence_seconds)
    return max(1.0, min(limit, LOST_TIMES * limit - (stale_for_seconds or 0.0)))
