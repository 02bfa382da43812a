"""Whether a run is alive, by the time since its last report. Pure.

    alive ──> stale ──> lost          it is silent for longer than its cadence explains
      ^─────────┴─────────┘           it reports again, or its trainer's client sends a heartbeat

The cadence of a run is the longest pause that occurred at least twice between its newest reports. A median would treat
the pause of each long eval as silence, and a maximum would remember one outage forever. A run is stale after three
such pauses, but not before the project's `stale_seconds`, which alone counts while there are few reports. It is lost
once it has been stale for eleven times as long: by default after an hour of silence in total. Stale is a warning and
puts stops on hold; lost ends the run, so neither a slow file system nor an outage of the service may cause it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from itertools import pairwise

FEWEST_PAUSES = 4
"""With fewer pauses between reports a run has no cadence."""

STALE_PAUSES = 3.0
LOST_TIMES = 11.0


class Liveness(StrEnum):
    """Whether a run is alive."""

    ALIVE = "alive"
    STALE = "stale"
    LOST = "lost"


def measure_cadence(newest: Sequence[Sequence[datetime]], most: int) -> float | None:
    """The longest pause in seconds that occurred at least twice between reports; None when there are too few.

    `newest`: for each metric the times of its newest values, at most `most` each, in any order. Times before the oldest
    one of a metric with `most` values are ignored, because reports would be missing there.
    """
    start = max((min(times) for times in newest if len(times) >= most), default=None)
    reports = sorted({time for times in newest for time in times if start is None or time >= start})
    pauses = sorted((later - earlier).total_seconds() for earlier, later in pairwise(reports))
    return pauses[-2] if len(pauses) >= FEWEST_PAUSES else None


def stale_after_seconds(stale_seconds: float, cadence_seconds: float | None) -> float:
    """The seconds of silence after which a run is stale."""
    return max(stale_seconds, STALE_PAUSES * (cadence_seconds or 0.0))


def assess_liveness(
    silence_seconds: float, stale_for_seconds: float | None, stale_seconds: float, cadence_seconds: float | None
) -> Liveness:
    """The liveness of a run that has been silent and, unless None, stale for this long."""
    limit = stale_after_seconds(stale_seconds, cadence_seconds)
    if silence_seconds < limit:
        return Liveness.ALIVE
    return Liveness.LOST if (stale_for_seconds or 0.0) >= LOST_TIMES * limit else Liveness.STALE


def seconds_until_check(
    silence_seconds: float, stale_for_seconds: float | None, stale_seconds: float, cadence_seconds: float | None
) -> float:
    """The seconds until the next check of a run that is not lost: when it would become stale or lost, at least one.

    A stale run may report and fall silent again, so it is checked as often as one that is alive.
    """
    limit = stale_after_seconds(stale_seconds, cadence_seconds)
    if silence_seconds < limit:
        return max(1.0, limit - silence_seconds)
    return max(1.0, min(limit, LOST_TIMES * limit - (stale_for_seconds or 0.0)))
