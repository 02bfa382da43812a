"""Finds the threshold that stops a given share of healthy runs from the highest evidence on each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evalstop_detectors import Kind

from evalstop_lab.calibrate.evidence import Records
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.worlds.scoring import Share, clopper_pearson, find_quantile_ranks


@dataclass(frozen=True)
class Threshold:
    """A threshold that stops at most `rate` of the runs on which it was calibrated.

    `value` is the `stop_at` of a policy; None if no threshold is strict enough, because more than that share of the
    runs showed the most alarming evidence possible. `low` and `high` are the interval of the threshold that would stop
    exactly `rate` of all such runs; `stopped` is the share of these runs that `value` stops.
    """

    rate: float
    value: float | None
    low: float
    high: float
    stopped: Share


def calibrate_thresholds(records: Sequence[Records], rates: Sequence[float]) -> tuple[Kind, list[Threshold]]:
    """The kind of the evidence, and the threshold at each rate; raises UnusableArguments if there was no evidence."""
    kind = next((item.kind for item in records if item.kind is not None), None)
    if kind is None:
        raise UnusableArguments("No run has a metric with a role of the detector; give runs that have one.")
    highest = [item.highest for item in records]
    return kind, [calibrate_threshold(kind, highest, rate) for rate in rates]


def calibrate_threshold(kind: Kind, highest: Sequence[float], rate: float) -> Threshold:
    """Find the most lenient threshold that stops at most `rate` of the runs with these `highest` alarms, one per run.

    It lies halfway between two observed values. Beyond the highest one, or with few runs above it, it is as uncertain
    as its interval shows: 1 % of 100 runs is one run.
    """
    ordered = sorted(highest, reverse=True)
    allowed = math.floor(rate * len(ordered) + 1e-9)
    if allowed >= len(ordered):
        alarm: float | None = ordered[-1]
    else:
        alarm = _choose_alarm(kind, ordered[allowed], [item for item in ordered[:allowed] if item > ordered[allowed]])
    low, high = (ordered[::-1][rank] for rank in find_quantile_ranks(len(ordered), 1 - rate))
    if kind is Kind.COUNT:  # the quantile is the highest count that is not to stop, and its threshold the next one
        low, high = low + 1.0, high + 1.0
    if alarm is not None:
        alarm = max(alarm, math.nextafter(0.0, 1.0))  # a policy accepts only positive thresholds
    return Threshold(
        rate=rate,
        value=alarm,
        low=low,
        high=high,
        stopped=clopper_pearson(0 if alarm is None else sum(item >= alarm for item in ordered), len(ordered)),
    )


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
