"""Where a contender stands: its operating points, and its figures at each over worlds, by noise and by family."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evalstop_lab.benchmarks.detection.contenders import AS_SHIPPED, STATED, Contender
from evalstop_lab.calibrate.evidence import Records, to_alarm
from evalstop_lab.calibrate.thresholds import threshold
from evalstop_lab.worlds import FAMILIES, HELD_OUT, LEVELS, Group, Label, Truth, World, of_group
from evalstop_lab.worlds.scoring import (
    Fate,
    Figure,
    Outcome,
    Score,
    Share,
    clopper_pearson,
    delay,
    fate,
    information_bound,
    quantile,
    score,
    wilson,
)

RATES = (0.01, 0.05)
DELAY_RATES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4)
ROC_RATES = tuple(np.geomspace(0.001, 1.0, 61).tolist())


@dataclass(frozen=True)
class Point:
    """An alarm at which a contender stops, what it is called, and the false alarms that it stands for, if known."""

    name: str
    alarm: float
    alpha: float | None


@dataclass(frozen=True)
class Passed:
    """A world, and what a contender recorded over it."""

    world: World
    records: Records

    def stopped(self, alarm: float) -> Outcome:
        """Where the run would have been stopped."""
        return Outcome(self.records.first_at(alarm))

    def outcome(self, alarm: float) -> Outcome:
        """Where the run would have been stopped, and the checkpoint of the highest score measured until then."""
        stop = self.records.first_at(alarm)
        last = len(self.world.steps) if stop is None else int(np.searchsorted(self.world.steps, stop)) + 1
        return Outcome(stop, int(self.world.steps[int(np.nanargmax(self.world.eval_scores[:last]))]))


def is_dip(passed: Passed) -> bool:
    """Whether the run belongs to a family with dips."""
    return FAMILIES[passed.world.family].group is Group.DIP


def is_held_out(passed: Passed) -> bool:
    """Whether calibration never saw the family."""
    return passed.world.family in HELD_OUT


def points(contender: Contender, calibration: Sequence[Passed]) -> list[Point]:
    """The operating points: its own, and if it is calibrated those that stop 1 and 5 % of these healthy runs."""
    own = [
        Point(name, alarm, None if name in (AS_SHIPPED, STATED) else math.exp(-alarm))
        for name, alarm in contender.points.items()
    ]
    if not contender.calibrated:
        return own
    return [Point(f"{rate:.0%}", alarm_at(calibration, rate), rate) for rate in RATES] + own


def alarm_at(healthy: Sequence[Passed], rate: float) -> float:
    """The alarm that stops at most `rate` of these runs; infinite when none is strict enough."""
    kind = next((item.records.kind for item in healthy if item.records.kind is not None), None)
    if kind is None:
        return math.inf
    found = threshold(kind, [item.records.highest for item in healthy], rate).value
    return math.inf if found is None else to_alarm(kind, found)


def tally(passed: Sequence[Passed], point: Point) -> dict[str, Any]:
    """What scoring says of these runs, with the lower bound of the delay, as JSON values."""
    pairs = [(item.outcome(point.alarm), item.world.truth) for item in passed]
    bounds, ratios = _beside_the_bound(pairs, point.alpha or RATES[0])
    return _score_document(score(pairs)) | {
        "bound": asdict(bounds),
        "delay_to_bound": asdict(ratios),
    }


def figures(passed: Sequence[Passed], point: Point) -> dict[str, Any]:
    """The row of the table, as JSON values, overall and by noise."""
    return tally(passed, point) | {
        "alarm": point.alarm,
        "false_stops_held_out": _share(_false_stops(passed, point, is_held_out)),
        "false_stops_dips": _share(_false_stops(passed, point, is_dip)),
        "recall_held_out": _share(_recall([item for item in passed if is_held_out(item)], point)),
        "recall_by_family": {
            family: _share(_recall([item for item in passed if item.world.family == family], point))
            for family in of_group(Group.HACKING)
        },
        "by_noise": {
            f"{level:g}": tally([item for item in passed if item.world.noise.level == level], point) for level in LEVELS
        },
    }


def leave_one_out(calibration: Sequence[Passed], reporting: Sequence[Passed], rate: float) -> dict[str, Any]:
    """False stops on each healthy family at the alarm found on all the others."""
    found = {}
    for family in dict.fromkeys(item.world.family for item in reporting):
        if FAMILIES[family].group is Group.HACKING:
            continue
        alarm = alarm_at([item for item in calibration if item.world.family != family], rate)
        point = Point("left out", alarm, rate)
        found[family] = _share(_false_stops([item for item in reporting if item.world.family == family], point))
    return found


def roc(passed: Sequence[Passed], own: Sequence[Point] = ()) -> list[tuple[float, float]]:
    """False stops and recall as the alarm sinks, by the runs themselves; of `own` points, at those alone."""
    healthy = [item for item in passed if item.world.truth.label is Label.HEALTHY]
    hacking = [item for item in passed if item.world.truth.label is Label.HACKING]
    curve = []
    for alarm in [point.alarm for point in own] or [alarm_at(healthy, rate) for rate in ROC_RATES]:
        right = sum(fate(item.stopped(alarm), item.world.truth) is Fate.RIGHT for item in hacking)
        curve.append((sum(item.records.highest >= alarm for item in healthy) / len(healthy), right / len(hacking)))
    return curve


def delay_curve(passed: Sequence[Passed]) -> list[tuple[float, float, float]]:
    """False stops, the median of delay to bound over the right stops, and recall, as the alarm sinks, over runs without
    dips: what sooner costs where noise alone can deceive."""
    clear = [item for item in passed if not is_dip(item)]
    healthy = [item for item in clear if item.world.truth.label is Label.HEALTHY]
    curve = []
    for rate in DELAY_RATES:
        alarm = alarm_at(healthy, rate)
        pairs = [(item.stopped(alarm), item.world.truth) for item in clear if item.world.truth.label is Label.HACKING]
        _, ratio = _beside_the_bound(pairs, RATES[0])
        right = sum(fate(outcome, truth) is Fate.RIGHT for outcome, truth in pairs)
        false = sum(item.records.highest >= alarm for item in healthy) / len(healthy)
        curve.append((false, ratio.value, right / len(pairs)))
    return curve


def _score_document(found: Score) -> dict[str, Any]:
    document = asdict(found)
    for name in ("recall", "precision", "false_stops", "premature", "at_the_end"):
        document[name] = _share(getattr(found, name))
    return document


def _share(share: Share) -> dict[str, Any]:
    return asdict(share) | {"value": share.value}


def _recall(passed: Sequence[Passed], point: Point) -> Share:
    fates = [fate(item.stopped(point.alarm), item.world.truth) for item in passed]
    hacking = sum(item.world.truth.label is Label.HACKING for item in passed)
    return wilson(fates.count(Fate.RIGHT), hacking)


def _beside_the_bound(pairs: Sequence[tuple[Outcome, Truth]], alpha: float) -> tuple[Figure, Figure]:
    """The bound over all hacking runs (never, where it is not reached), and delay to bound over the right stops.

    Runs without noise have no ratio: one eval after the peak proves the turn to whoever knows that there is no noise.
    """
    bounds, ratios = [], []
    for outcome, truth in pairs:
        if truth.label is not Label.HACKING:
            continue
        bound, evals = information_bound(truth, alpha), delay(outcome, truth)
        bounds.append(math.inf if bound is None else float(bound))
        if evals is not None and bound is not None and truth.noise_sd != 0:
            ratios.append(evals / bound)
    return quantile(bounds, 0.5), quantile(ratios, 0.5)


def _false_stops(passed: Sequence[Passed], point: Point, among: Callable[[Passed], bool] = lambda _: True) -> Share:
    healthy = [item for item in passed if item.world.truth.label is Label.HEALTHY and among(item)]
    return clopper_pearson(sum(item.records.highest >= point.alarm for item in healthy), len(healthy))
