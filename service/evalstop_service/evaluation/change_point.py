"""The change point in hindsight: where an ended run turned, by all of its eval scores; and the segments of any run.

Source      Dynamic programming (Jackson et al. 2005) over the straight pieces of a continuous line, with a penalty for
            each piece, by `ruptures` (Truong, Oudre & Vayatis 2020). Its PELT takes a ninth of the time, but with this
            cost, which joins the pieces, it missed the cheapest line of one curve in ten.
Departs     The line joins the values at its knots, including their noise, so it is drawn through smoothed scores. It is
            then refitted by least squares, and the knot of the turn placed where it fits best. Among knots about as
            high as the highest, the last one is the turn: a plateau turns where it ends.
Cost        3 to 20 ms for a run of 30 to 80 evals, at most 0.2 s: more than `MAX_POINTS` scores are first reduced to
            block means.
Not done    The interval is where smoothed scores are as high as at the turn, up to three standard errors. It is not a
            confidence interval by construction; how often it holds the peak was measured. Autocorrelated noise makes it
            too narrow.
"""

from __future__ import annotations

import importlib
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Literal

import numpy as np
from evalstop_detectors import Score, select_version
from evalstop_detectors.checkpoint.smoothing import Smoothed, smooth_scores
from msgspec import structs
from numpy.typing import NDArray

from evalstop_service.background import PeriodicJob, Wait
from evalstop_service.domain.run import ChangePoint, EvalSegment
from evalstop_service.runs import watched_metrics
from evalstop_service.store import observations
from evalstop_service.store.database import Transaction
from evalstop_service.store.runs import Run

_log = logging.getLogger(__name__)

AVAILABLE = find_spec("ruptures") is not None
"""False on a Python that ruptures has no wheel for, where it could not be built: no run has a change point then."""

MAX_POINTS = 120
"""More scores are first reduced to block means, because the search takes their number squared."""

MAX_PIECES = 16
"""Of the line. Only curves without noise would use more."""

MIN_SCORES = 6

IMPORT_AFTER_SECONDS = 10.0
"""After the start of a process, so that it can answer sooner."""

_PENALTY = 3.0  # times ln n, per knot, in units of the noise's variance
_SIGNIFICANT = 3.0  # standard errors; the least fall of the eval score
_SHARE = 0.1  # of the gain; the least fall
_LIKELY = 3.84  # a 95 % interval of a border may raise the squared misfit by so many variances of the noise
_TINY = 1e-100  # a smaller range, or one beyond its inverse, would be lost in squares
_NEAR = 3.0  # standard errors; a smoothed score within them is as high as another: covers the peak nine times in ten

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


def create_job() -> PeriodicJob:
    """Imports ruptures, once. It imports all of scipy, which takes a second, and no transaction should wait for
    that."""

    def import_ruptures(wait: Wait) -> float:
        if not AVAILABLE:
            _log.warning("ruptures is not installed: no change point in hindsight; see docs/detectors/change_point.md")
        elif not wait(IMPORT_AFTER_SECONDS):
            importlib.import_module("ruptures")
        return threading.TIMEOUT_MAX

    return PeriodicJob("import-ruptures", import_ruptures)


def load_change_point(tx: Transaction, run: Run) -> ChangePoint | None:
    """The change point of a run; None where the eval shows no drop."""
    return find_change_point(_load_scores(tx, run))


def load_segments(tx: Transaction, run: Run) -> list[EvalSegment]:
    """The segments of a run's eval, with scores in the metric's own direction."""
    sign = watched_metrics.find_eval_sign(run)
    return [
        structs.replace(item, first_score=sign * item.first_score, last_score=sign * item.last_score)
        for item in find_segments(_load_scores(tx, run))
    ]


def _load_scores(tx: Transaction, run: Run) -> Sequence[Score]:
    metric = watched_metrics.find_eval_metric(run)
    if metric is None:
        return []
    return watched_metrics.select_scores(run, observations.load_series(tx, run.id, [metric]))


def find_change_point(scores: Sequence[Score]) -> ChangePoint | None:
    """Where scores by ascending step turned, higher being better, by those measured like the last one.

    A fall counts if it exceeds three standard errors and a tenth of the gain; None: none does.
    """
    curve = _read_curve(scores)
    at = _place_turn(curve) if curve is not None else None
    if curve is None or at is None:
        return None
    low_step, high_step = (curve.steps[index] for index in _around(at, curve.smoothed, curve.span))
    return ChangePoint(curve.steps[at], low_step, high_step)


_KINDS: dict[float, Literal["rise", "plateau", "fall"]] = {1.0: "rise", 0.0: "plateau", -1.0: "fall"}


def find_segments(scores: Sequence[Score]) -> list[EvalSegment]:
    """The rises, plateaus and falls of scores by ascending step; none if there are too few, or all are equal.

    1. Fit a line. A piece is a plateau unless it changes by more than three standard errors and a tenth of the range.
    2. Join neighboring pieces of one kind. Put each border where it fits best; its interval is where the line fits
       about as well, by a likelihood ratio of 95 %.
    """
    curve = _read_curve(scores)
    if curve is None:
        return []
    knots = find_knots(curve.smoothed.mean / curve.sd, _PENALTY * math.log(len(curve.values)))
    _, heights, errors = _line(curve.values, knots)
    least = np.maximum(_SIGNIFICANT * curve.sd * np.hypot(errors[1:], errors[:-1]), _SHARE * np.ptp(heights))
    kinds = np.sign(np.diff(heights)) * (np.abs(np.diff(heights)) > least)
    borders = [0, *(int(index) + 1 for index in np.flatnonzero(np.diff(kinds))), len(knots) - 1]
    ranges = {0: (0, 0)}
    for border in borders[1:-1]:
        between, misfits = _move_knot(curve.values, knots, border)
        likely = np.flatnonzero(misfits <= misfits.min() + _LIKELY * curve.sd**2)
        ranges[border] = between[likely[0]], between[likely[-1]]
        knots[border] = between[int(np.argmin(misfits))]
    _, heights, _ = _line(curve.values, knots)
    return [
        EvalSegment(
            _KINDS[float(kinds[first])],
            *(curve.steps[index] for index in (knots[first], knots[last], *ranges[first])),
            *(curve.origin + float(heights[knot]) for knot in (first, last)),
        )
        for first, last in pairwise(borders)
    ]


@dataclass(frozen=True)
class _Curve:
    """Finite scores, thinned: `values` beyond the first one, `origin`. `steps`: of each. `sd`: the noise of a value."""

    steps: list[int]
    values: Floats
    origin: float
    span: float
    smoothed: Smoothed
    sd: float


def _read_curve(scores: Sequence[Score]) -> _Curve | None:
    """The curve of scores measured like the last one; None without ruptures, if they are too few, or all equal."""
    finite = [score for score in select_version(scores) if math.isfinite(score.value)]
    if len(finite) < MIN_SCORES or not AVAILABLE:
        return None
    values = np.array([score.value for score in finite])
    origin = float(values[0])
    least = max(1e-12 * float(np.abs(values).max()), _TINY)
    with np.errstate(over="ignore", invalid="ignore"):
        values, places = _thinned(values - origin)
        span = float(np.ptp(values))
    if not least < span < 1 / _TINY:
        return None
    smoothed = smooth_scores(values)
    steps = [finite[int(place)].step for place in places]
    return _Curve(steps, values, origin, span, smoothed, max(smoothed.noise, 1e-6 * span))


def find_knots(values: Floats, penalty: float) -> Places:
    """The indices of the knots of a continuous line: of all lines through values, the first and the last among them,
    the one whose squared misfit plus `penalty` for each piece is least. A piece is at least three evals long.
    """
    from ruptures.detection import Dynp  # see create_job

    search = Dynp(model="clinear", min_size=3, jump=1).fit(values)
    best, least = [len(values)], math.inf
    for pieces in range(1, min(MAX_PIECES, len(values) // 3) + 1):
        if pieces * penalty >= least:
            break  # even without any misfit, no more pieces pay for themselves
        ends = search.predict(pieces - 1) if pieces > 1 else [len(values)]
        cost = search.cost.sum_of_costs(ends) + pieces * penalty
        if cost < least:
            best, least = ends, cost
    return np.array([0, *(end - 1 for end in best)])


def _thinned(values: Floats) -> tuple[Floats, Places]:
    """Means of blocks of equal length, at most `MAX_POINTS` of them, and the index of each block's middle."""
    n = len(values)
    length = -(-n // MAX_POINTS)
    starts = np.arange(0, n, length)
    counts = np.diff(np.append(starts, n))
    return np.add.reduceat(values, starts) / counts, starts + (counts - 1) // 2


def _place_turn(curve: _Curve) -> int | None:
    """The index of the turn; None if no fall counts."""
    values, sd = curve.values, curve.sd
    knots = find_knots(curve.smoothed.mean / sd, _PENALTY * math.log(len(values)))
    _, heights, errors = _line(values, knots)
    errors = sd * errors
    highest = heights.max()
    turn = int(np.flatnonzero(heights >= highest - errors)[-1])
    if turn == len(knots) - 1:
        return None
    if turn > 0:
        between, misfits = _move_knot(values, knots, turn)
        knots[turn] = between[int(np.argmin(misfits))]
    _, heights, errors = _line(values, knots)
    gain, drop = float(heights[turn] - heights[0]), float(heights[turn] - heights[-1])
    if drop <= _SIGNIFICANT * sd * math.hypot(errors[turn], errors[-1]) or drop <= _SHARE * gain:
        return None
    return int(knots[turn])


def _move_knot(values: Floats, knots: Places, index: int) -> tuple[range, Floats]:
    """The positions of a knot between its neighbors, and the squared misfit of the line at each."""
    between, misfits = range(knots[index - 1] + 1, knots[index + 1]), []
    for candidate in between:
        moved = knots.copy()
        moved[index] = candidate
        misfits.append(_line(values, moved)[0])
    return between, np.array(misfits)


def _around(at: int, smoothed: Smoothed, span: float) -> tuple[int, int]:
    """The range around the turn where the smoothed scores are as high, up to their errors."""
    mean = smoothed.mean
    lower = np.flatnonzero(mean < mean[at] - _NEAR * smoothed.stderr - 1e-6 * span)
    before, after = lower[lower < at], lower[lower > at]
    return int(before.max(initial=-1)) + 1, int(after.min(initial=len(mean))) - 1


def _line(values: Floats, knots: Places) -> tuple[float, Floats, Floats]:
    """The best continuous line through these knots: squared misfit, heights, and their errors per unit of noise."""
    places = np.arange(len(values))
    shares = np.array([np.interp(places, knots, row) for row in np.eye(len(knots))])
    covariance = np.linalg.inv(shares @ shares.T)
    heights = covariance @ (shares @ values)
    return float(np.sum((values - heights @ shares) ** 2)), heights, np.sqrt(np.diag(covariance))
