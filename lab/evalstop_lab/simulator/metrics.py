"""Evaluates a schedule against the truth: times, GPU-hours by use, and the quality of stops.

Read them together. Any rule that stops jobs, rightly or not, improves the time to completion: compare it with the
GPU-hours of jobs that were stopped wrongly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from evalstop_lab.simulator.drawing import Hidden
from evalstop_lab.simulator.engine import Schedule
from evalstop_lab.simulator.jobs import Integers, Workload
from evalstop_lab.worlds.scoring import Share, wilson


@dataclass(frozen=True)
class Figures:
    """The figures of one simulation.

    `jct`: mean hours from submission to end of the measured jobs. `post_peak`: GPU-hours of hacking jobs after their
    peak. `false_stop`: of jobs that were stopped wrongly, healthy or before their peak.
    """

    jct: float
    post_peak: float
    false_stop: float

    @property
    def wasted(self) -> float:
        """GPU-hours after the peak, plus those of false stops."""
        return self.post_peak + self.false_stop


@dataclass(frozen=True)
class Counts:
    """The number of flagged jobs, by their truth. `late_hacking`, `late_healthy`: flags at the last eval, which save
    nothing and count in neither `right` nor `wrong`. `premature`: flags of hacking jobs before their peak."""

    hacking: int
    healthy: int
    right: int
    premature: int
    wrong: int
    late_hacking: int
    late_healthy: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def precision(self, late: bool = True) -> Share:
        """The share of flagged jobs that were hacking, before or after their peak."""
        right = self._right(late)
        return wilson(right, right + self._wrong(late))

    def recall(self, late: bool = True) -> Share:
        """The share of hacking jobs that were flagged."""
        return wilson(self._right(late), self.hacking)

    def false_stops(self, late: bool = True) -> Share:
        """The share of jobs that were not hacking and were flagged."""
        return wilson(self._wrong(late), self.healthy)

    def _right(self, late: bool) -> int:
        return self.right + self.premature + (self.late_hacking if late else 0)

    def _wrong(self, late: bool) -> int:
        return self.wrong + (self.late_healthy if late else 0)


def count_flags(workload: Workload, hidden: Hidden, stops: Integers) -> Counts:
    evals = np.array([job.evals for job in workload.jobs])
    late, early = stops == evals, (stops > 0) & (stops < evals)
    premature = early & hidden.hacking & (stops < hidden.peaks * evals)
    return Counts(
        hacking=int(hidden.hacking.sum()),
        healthy=int((~hidden.hacking).sum()),
        right=int((early & hidden.hacking & ~premature).sum()),
        premature=int(premature.sum()),
        wrong=int((early & ~hidden.hacking).sum()),
        late_hacking=int((late & hidden.hacking).sum()),
        late_healthy=int((late & ~hidden.hacking).sum()),
    )


def measure_schedule(
    workload: Workload, hidden: Hidden, schedule: Schedule, measured: tuple[float, float] = (0.0, 1.0)
) -> Figures:
    """All figures; times are of the jobs between these shares, in order of submission."""
    n = len(workload.jobs)
    inside = slice(math.floor(measured[0] * n), math.ceil(measured[1] * n))
    gpus, hours = workload.gpus, workload.hours
    jct = (schedule.ended - workload.submitted)[inside]
    peak_at = hidden.peaks * hours
    after_peak = np.maximum(schedule.ran - peak_at, 0.0)
    falsely = (schedule.ran < hours) & (~hidden.hacking | (schedule.ran < peak_at * (1 - 1e-9)))
    return Figures(
        jct=float(jct.mean()) if len(jct) else math.nan,
        post_peak=float((after_peak * gpus)[hidden.hacking].sum()),
        false_stop=float((schedule.held * gpus)[falsely].sum()),
    )
