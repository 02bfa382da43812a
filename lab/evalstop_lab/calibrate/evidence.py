"""The records that a detector's evidence set over a run, which are enough to evaluate every threshold at once.

A policy stops at the first evidence that reaches its threshold. The running maximum of the evidence reaches any
threshold at the same step, so one pass over a run is enough for all thresholds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from evalstop_detectors import Detector, Kind, MetricRole, Observation

from evalstop_lab.errors import UnusableArguments
from evalstop_lab.replay.runs import Run
from evalstop_lab.worlds.scoring import Share, clopper_pearson


@dataclass(frozen=True)
class Records:
    """The strictly increasing values of the evidence that were the highest so far, and the `steps` at which each was
    reached.

    `kind` is None for a run without evidence. Evidence of the run's last step is ignored: stopping there saves nothing.
    """

    kind: Kind | None
    steps: tuple[int, ...]
    alarms: tuple[float, ...]

    @property
    def highest(self) -> float:
        """The most alarming evidence; minus infinity without any."""
        return self.alarms[-1] if self.alarms else -math.inf

    def first_at(self, alarm: float) -> int | None:
        """The step at which evidence first reached `alarm`."""
        index = bisect_left(self.alarms, alarm)
        return self.steps[index] if index < len(self.steps) else None


def record_evidence(detector: Detector[Any], observations: Iterable[Observation], last_step: int) -> Records:
    """Run the detector over a whole run, given in order; when the eval's measurement changes, it restarts."""
    state, kind, eval_version = detector.start(), None, 0
    steps: list[int] = []
    alarms: list[float] = []
    for item in observations:
        if item.step >= last_step:
            break
        if item.role not in detector.roles:
            continue
        if item.eval_version != eval_version:
            eval_version = item.eval_version
            state = detector.start_anew(state) if MetricRole.EVAL in detector.roles else state
        state, evidence = detector.step(state, item)
        kind = evidence.kind
        if not alarms or evidence.value > alarms[-1]:
            steps.append(item.step)
            alarms.append(evidence.value)
    return Records(kind, tuple(steps), tuple(alarms))


def record_run(detector: Detector[Any], run: Run) -> Records:
    return record_evidence(detector, run.observations(), run.last_step)


@dataclass(frozen=True)
class Threshold:
    """A threshold that stops at most `rate` of the runs on which it was calibrated.

    `value` is the `stop_at` of a policy; None if no threshold is strict enough, because more than that share of the
    runs showed the most alarming evidence possible. `stopped` is the share of these runs that `value` stops.
    """

    rate: float
    value: float | None
    stopped: Share


def calibrate_thresholds(records: Sequence[Records], rates: Sequence[float]) -> list[Threshold]:
    """The threshold at each rate; raises UnusableArguments if there was no evidence."""
    kind = next((item.kind for item in records if item.kind is not None), None)
    if kind is None:
        raise UnusableArguments("No run has a metric with a role of the detector; give runs that have one.")
    highest = [item.highest for item in records]
    return [calibrate_threshold(kind, highest, rate) for rate in rates]


def calibrate_threshold(kind: Kind, highest: Sequence[float], rate: float) -> Threshold:
    """Find the most lenient threshold that stops at most `rate` of the runs with these `highest` alarms, one per run.

    It lies halfway between two observed values. With few runs above it, it is uncertain: 1 % of 100 runs is one run.
    """
    ordered = sorted(highest, reverse=True)
    allowed = math.floor(rate * len(ordered) + 1e-9)
    if allowed >= len(ordered):
        alarm: float | None = ordered[-1]
    else:
        alarm = _choose_alarm(kind, ordered[allowed], [item for item in ordered[:allowed] if item > ordered[allowed]])
    if alarm is not None:
        alarm = max(alarm, math.nextafter(0.0, 1.0))  # a policy accepts only positive thresholds
    stopped = 0 if alarm is None else sum(item >= alarm for item in ordered)
    return Threshold(rate, alarm, clopper_pearson(stopped, len(ordered)))


def _choose_alarm(kind: Kind, below: float, above: Sequence[float]) -> float | None:
    """An alarm above `below`, and no higher than the lowest of `above`."""
    if below == -math.inf:
        return min(above, default=0.0)
    if kind is Kind.COUNT:
        return math.floor(below) + 1.0
    if not above:
        return math.nextafter(below, math.inf) if below < kind.upper_bound else None
    middle = (below + min(above)) / 2
    return middle if below < middle else min(above)
