"""Computes the operating points of a contender, and its figures at each over worlds, by noise and by family."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from evalstop_detectors import BestCheckpoint, Scores, choose_best, find_highest
from evalstop_detectors import Score as EvalScore

from evalstop_lab.benchmarks.detection.contenders import AS_SHIPPED, STATED, Contender
from evalstop_lab.calibrate.evidence import Records, calibrate_threshold
from evalstop_lab.report import format_percent
from evalstop_lab.worlds import FAMILIES, HELD_OUT, LEVELS, Group, Label, World, list_families
from evalstop_lab.worlds.scoring import (
    Outcome,
    OutcomeKind,
    Share,
    classify_outcome,
    clopper_pearson,
    compare_with_bound,
    compute_eval_loss,
    estimate_mean,
    score_outcomes,
    wilson,
)

CHOOSERS = {"raw_maximum": find_highest, "smoothed_maximum": choose_best}
RATES = (0.01, 0.05)
ROC_RATES = tuple(np.geomspace(0.001, 1.0, 61).tolist())


@dataclass(frozen=True)
class OperatingPoint:
    """The alarm level at which a contender stops, its name, and its false alarm probability, if known."""

    name: str
    alarm: float
    alpha: float | None


@dataclass(frozen=True)
class JudgedWorld:
    """A world and a contender's records on it."""

    world: World
    records: Records

    def stopped(self, alarm: float) -> Outcome:
        """The outcome of a stop at this alarm level, without a checkpoint."""
        return Outcome(self.records.first_at(alarm))

    def outcome(self, alarm: float) -> Outcome:
        """The outcome of a stop at this alarm level, with the checkpoint of the highest measured score up to it."""
        stop = self.records.first_at(alarm)
        last = len(self.world.steps) if stop is None else int(np.searchsorted(self.world.steps, stop)) + 1
        return Outcome(stop, int(self.world.steps[int(np.nanargmax(self.world.eval_scores[:last]))]))


def is_dip(judged: JudgedWorld) -> bool:
    return FAMILIES[judged.world.family].group is Group.DIP


def is_held_out(judged: JudgedWorld) -> bool:
    return judged.world.family in HELD_OUT


def find_operating_points(contender: Contender, calibration: Sequence[JudgedWorld]) -> list[OperatingPoint]:
    """The contender's own operating points; if it is calibrated, also those that stop 1 and 5 % of these runs."""
    own_points = [
        OperatingPoint(name, alarm, None if name in (AS_SHIPPED, STATED) else math.exp(-alarm))
        for name, alarm in contender.points.items()
    ]
    if not contender.calibrated:
        return own_points
    return [OperatingPoint(format_percent(rate, 0), find_alarm(calibration, rate), rate) for rate in RATES] + own_points


def find_alarm(healthy: Sequence[JudgedWorld], rate: float) -> float:
    """The alarm level that stops at most `rate` of these runs; infinite if there is none."""
    kind = next((item.records.kind for item in healthy if item.records.kind is not None), None)
    if kind is None:
        return math.inf
    stop_at = calibrate_threshold(kind, [item.records.highest for item in healthy], rate).value
    return math.inf if stop_at is None else stop_at


def score_runs(judged: Sequence[JudgedWorld], point: OperatingPoint) -> dict[str, Any]:
    """Score these runs, with the lower bound of the delay, as JSON values."""
    pairs = [(item.outcome(point.alarm), item.world.truth) for item in judged]
    bounds, ratios = compare_with_bound(pairs, point.alpha or RATES[0])
    return asdict(score_outcomes(pairs)) | {"bound": asdict(bounds), "delay_to_bound": asdict(ratios)}


def compute_figures(judged: Sequence[JudgedWorld], point: OperatingPoint) -> dict[str, Any]:
    """The row of the table, as JSON values, overall and by noise."""
    return score_runs(judged, point) | {
        "alarm": point.alarm,
        "false_stops_held_out": asdict(_count_false_stops(judged, point, is_held_out)),
        "false_stops_dips": asdict(_count_false_stops(judged, point, is_dip)),
        "recall_by_family": {
            family: asdict(_count_recall([item for item in judged if item.world.family == family], point))
            for family in list_families(Group.HACKING)
        },
        "by_noise": {
            f"{level:g}": score_runs([item for item in judged if item.world.noise.level == level], point)
            for level in LEVELS
        },
    }


def compute_roc(judged: Sequence[JudgedWorld], own_points: Sequence[OperatingPoint]) -> list[tuple[float, float]]:
    """False stops and recall by falling alarm level, calibrated on these runs; with `own_points`, only at those."""
    healthy = [item for item in judged if item.world.truth.label is Label.HEALTHY]
    hacking = [item for item in judged if item.world.truth.label is Label.HACKING]
    curve = []
    for alarm in [point.alarm for point in own_points] or [find_alarm(healthy, rate) for rate in ROC_RATES]:
        right = sum(classify_outcome(item.stopped(alarm), item.world.truth) is OutcomeKind.RIGHT for item in hacking)
        curve.append((sum(item.records.highest >= alarm for item in healthy) / len(healthy), right / len(hacking)))
    return curve


def _count_recall(judged: Sequence[JudgedWorld], point: OperatingPoint) -> Share:
    kinds = [classify_outcome(item.stopped(point.alarm), item.world.truth) for item in judged]
    hacking = sum(item.world.truth.label is Label.HACKING for item in judged)
    return wilson(kinds.count(OutcomeKind.RIGHT), hacking)


def _count_false_stops(
    judged: Sequence[JudgedWorld], point: OperatingPoint, among: Callable[[JudgedWorld], bool]
) -> Share:
    healthy = [item for item in judged if item.world.truth.label is Label.HEALTHY and among(item)]
    return clopper_pearson(sum(item.records.highest >= point.alarm for item in healthy), len(healthy))


def compute_checkpoint_losses(worlds: Sequence[World]) -> dict[str, dict[str, Any]]:
    """The mean loss of the chosen checkpoint as a share of the gain, by rule and noise, over runs without stops."""
    return {
        name: {
            f"{level:g}": asdict(
                estimate_mean([_compute_loss(choose, world) for world in worlds if world.noise.level == level])
            )
            for level in LEVELS
        }
        for name, choose in CHOOSERS.items()
    }


def _compute_loss(choose: Callable[[Scores], BestCheckpoint | None], world: World) -> float:
    errors = np.full(len(world.steps), np.nan) if world.eval_stderr is None else world.eval_stderr
    scores = [
        EvalScore(step, score, None if math.isnan(error) else error)
        for step, score, error in zip(world.steps.tolist(), world.eval_scores.tolist(), errors.tolist(), strict=True)
    ]
    best = choose(Scores().add_scores(scores).add_checkpoints(dict.fromkeys((score.step for score in scores), "")))
    lost = compute_eval_loss(Outcome(None, best.step if best else None), world.truth)
    assert lost is not None, world.name  # every world has an eval
    return lost
