"""Whether a run is alive, by the time since its last report, and which of its metrics give its detectors no data. Pure.

    alive ──> stale ──> lost          it is silent for longer than its cadence explains
      ^─────────┴─────────┘           it reports again, or its trainer's client sends a heartbeat

The cadence of a run is the longest pause that occurred at least twice between its newest reports. A median would treat
the pause of each long eval as silence, and a maximum would remember one outage forever. A run is stale after three
such pauses, but not before the project's `stale_seconds`, which alone counts while there are few reports. It is lost
once it has been stale for eleven times as long: by default after an hour of silence in total. Stale is a warning and
puts stops on hold; lost ends the run, so neither a slow file system nor an outage of the service may cause it.

A metric gives no data if it is not reported while others are. Perhaps it has another name: it was never reported, for
a third of the steps or six hours. Perhaps it was renamed: it stopped, for five times its longest gap.

A gap is measured in steps and in time, and both must be exceeded: evals that are computed elsewhere arrive many steps
late but regularly, and a trainer that waits loses time but no steps. Gaps may grow: five times allows evals at steps 1,
2, 4, 8. Two or three values show only one or two gaps; then the factor is ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, NamedTuple

from msgspec import Struct

from evalstop_service.domain.fields import doc

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


def check_liveness(
    silence_seconds: float, stale_for_seconds: float | None, stale_seconds: float, cadence_seconds: float | None
) -> tuple[Liveness, float]:
    """The liveness of a run that has been silent and, unless None, stale for this long, and the seconds until its next
    check: when it would become stale or lost, at least one; 0 for a lost run.

    A stale run may report and fall silent again, so it is checked as often as one that is alive.
    """
    limit = stale_after_seconds(stale_seconds, cadence_seconds)
    if silence_seconds < limit:
        return Liveness.ALIVE, max(1.0, limit - silence_seconds)
    left_seconds = LOST_TIMES * limit - (stale_for_seconds or 0.0)
    if left_seconds <= 0:
        return Liveness.LOST, 0.0
    return Liveness.STALE, max(1.0, min(limit, left_seconds))


NEWEST = 32
"""The number of newest values of a metric that are examined."""

CEASED_GAPS, CEASED_GAPS_OF_FEW, FEW = 5.0, 10.0, 4
MISSING_SHARE, MISSING_SECONDS = 1 / 3, 6 * 3600.0


class Reading(NamedTuple):
    """The step of a value of a metric, and when it was received."""

    step: int
    received_at: datetime


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run, over all its metrics.

    `begun_at`: the start of its current attempt. `reported_at`: its last report. `last_step`: None before the first.
    """

    begun_at: datetime
    reported_at: datetime
    last_step: int | None
    total_steps: int | None = None


class MetricFault(Struct, frozen=True):
    """A metric that is not reported while others are."""

    metric: Annotated[str, doc("the name of the series")]
    reason: Annotated[str, doc("what is missing, for people")]


def find_fault(
    metric: str, readings: Sequence[Reading], progress: RunProgress, *, required: bool
) -> MetricFault | None:
    """The fault of a metric that a policy needs, by its newest readings, at most `NEWEST`, by ascending step.

    `required`: the trainer named it, or no stop is decided without it; other metrics may be missing.
    """
    if progress.last_step is None:  # no metric is ahead of another yet
        return None
    if readings:
        reason = _check_ceased(readings, progress, progress.last_step)
    else:
        reason = _check_missing(progress, progress.last_step) if required else None
    return MetricFault(metric, reason) if reason is not None else None


def _check_missing(progress: RunProgress, last_step: int) -> str | None:
    if progress.total_steps is not None:
        late = last_step >= MISSING_SHARE * progress.total_steps
    else:
        late = (progress.reported_at - progress.begun_at).total_seconds() >= MISSING_SECONDS
    reason = f"it was never reported, and other metrics are at step {last_step}; does it have another name?"
    return reason if late else None


def _check_ceased(readings: Sequence[Reading], progress: RunProgress, last_step: int) -> str | None:
    last = readings[-1]
    received = sorted({reading.received_at for reading in readings})
    # A single value, or values received in one request, have one gap: from the start to the first of them.
    steps = [after.step - before.step for before, after in pairwise(readings)] or [last.step]
    seconds = [(after - before).total_seconds() for before, after in pairwise(received)]
    seconds = seconds or [(received[0] - progress.begun_at).total_seconds()]
    allowed = CEASED_GAPS if len(readings) >= FEW else CEASED_GAPS_OF_FEW
    behind_steps = last_step - last.step
    behind_seconds = (progress.reported_at - received[-1]).total_seconds()
    if behind_steps <= allowed * max(1, *steps) or behind_seconds <= allowed * max(0.0, *seconds):
        return None
    return f"it was last reported at step {last.step}, and other metrics are at step {last_step}; was it renamed?"


def select_new_faults(before: Sequence[MetricFault], faults: Sequence[MetricFault]) -> list[MetricFault]:
    """The faults of metrics that had none before."""
    earlier = {fault.metric for fault in before}
    return [fault for fault in faults if fault.metric not in earlier]
