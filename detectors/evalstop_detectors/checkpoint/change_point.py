"""Where the eval score turned, in hindsight over a whole run.

Source      Optimal partitioning (Jackson et al. 2005) into the straight pieces of a continuous line, with a penalty for
            each piece.
Departs     The line joins the values at its knots, including their noise, so it is drawn through smoothed scores. It is
            then refitted by least squares, and the knot of the turn placed where it fits best. Among knots about as
            high as the highest, the last one is the turn: a plateau turns where it ends.
Cost        Some 5 ms a run: more than `MOST` scores are first reduced to block means.
Not done    The interval is where smoothed scores are as high as at the turn, up to three standard errors. It is not a
            confidence interval by construction; how often it holds the peak was measured. Autocorrelated noise makes it
            too narrow.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from evalstop_detectors.checkpoint.choice import Score
from evalstop_detectors.checkpoint.smoothing import Smoothed, smooth_scores

MOST = 200
"""The most points that are partitioned."""

FEWEST = 6
_PENALTY = 3.0  # times ln n, per knot, in units of the noise's variance
_SIGNIFICANT = 3.0  # standard errors; the least fall of the eval score
_SHARE = 0.1  # of the gain; the least fall
_NEAR = 3.0  # standard errors; a smoothed score within them is as high as another: covers the peak nine times in ten

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


class ChangePoint(Struct, frozen=True):
    """The step of the last eval before the lasting fall of the eval score, and the steps between which the peak lies.

    `gain` is the rise from the first eval to the turn, `drop` the fall from there to the last, both in the unit of the
    scores and on the fitted line.
    """

    step: int
    low_step: int
    high_step: int
    gain: float
    drop: float


def locate_change_point(scores: Sequence[Score]) -> ChangePoint | None:
    """Where the scores (by ascending step, higher is better) turned; None if no fall exceeds the noise.

    A fall counts if it exceeds three standard errors and a tenth of the gain.
    """
    finite = [score for score in scores if math.isfinite(score.value)]
    if len(finite) < FEWEST:
        return None
    values = np.array([score.value for score in finite])
    exponent = int(np.frexp(np.abs(values).max())[1])
    values = np.ldexp(values, -exponent)  # the squares below must neither overflow nor vanish
    values, places = _thinned(values - values[0])
    span = float(np.ptp(values))
    if span <= 1e-12:
        return None
    smoothed = smooth_scores(values.tolist())
    placed = _placed(values, np.asarray(smoothed.mean), max(smoothed.noise, 1e-6 * span))
    if placed is None:
        return None
    at, gain, drop = placed
    low, high = _around(at, smoothed, span)
    step, low_step, high_step = (finite[int(places[index])].step for index in (at, low, high))
    return ChangePoint(step, low_step, high_step, _outward(gain, exponent), _outward(drop, exponent))


def find_knots(values: Floats, penalty: float) -> Places:
    """The indices of the knots of a continuous line: of all lines through values, the first and the last among them,
    the one whose squared misfit plus `penalty` for each piece is least.

    A piece is at least three evals long, the first one two.
    """
    # 1. The squared misfit of the piece from each value, one in a row, to each later one.
    rises, runs = (np.triu(axis - axis[:, None]) for axis in (values, np.arange(len(values), dtype=np.float64)))
    slopes = np.divide(rises, runs, out=np.zeros_like(rises), where=runs > 0)
    products, squares = np.cumsum(rises * runs, axis=1), np.cumsum(runs * runs, axis=1)
    misfits = np.cumsum(rises * rises, axis=1) - slopes * (2 * products - slopes * squares)
    # 2. The least cost up to each value, and the knot before it.
    costs = np.full(len(values), math.inf)
    costs[0] = 0.0
    before = np.zeros(len(values), dtype=np.int64)
    for end in range(2, len(values)):
        candidates = costs[: max(end - 2, 1)] + misfits[: max(end - 2, 1), end]
        before[end] = candidates.argmin()
        costs[end] = candidates[before[end]] + penalty
    # 3. Back from the last value.
    knots = [len(values) - 1]
    while knots[-1]:
        knots.append(int(before[knots[-1]]))
    return np.array(knots[::-1])


def _thinned(values: Floats) -> tuple[Floats, Places]:
    """Means of blocks of equal length, at most `MOST` of them, and the index of each block's middle."""
    n = len(values)
    length = -(-n // MOST)
    starts = np.arange(0, n, length)
    counts = np.diff(np.append(starts, n))
    return np.add.reduceat(values, starts) / counts, starts + (counts - 1) // 2


def _placed(values: Floats, mean: Floats, sd: float) -> tuple[int, float, float] | None:
    """The index of the turn, the gain and the drop; None if no fall counts."""
    knots = find_knots(mean / sd, _PENALTY * math.log(len(values)))
    _, heights, errors = _line(values, knots)
    errors = sd * errors
    highest = heights.max()
    turn = int(np.flatnonzero(heights >= highest - errors)[-1])
    if turn == len(knots) - 1:
        return None
    if turn > 0:
        knots[turn] = _refined(values, knots, turn)
    _, heights, errors = _line(values, knots)
    gain, drop = float(heights[turn] - heights[0]), float(heights[turn] - heights[-1])
    if drop <= _SIGNIFICANT * sd * math.hypot(errors[turn], errors[-1]) or drop <= _SHARE * gain:
        return None
    return int(knots[turn]), gain, drop


def _refined(values: Floats, knots: Places, turn: int) -> int:
    """The position between its neighbors where the knot of the turn fits best."""
    between, misfits = range(knots[turn - 1] + 1, knots[turn + 1]), []
    for candidate in between:
        moved = knots.copy()
        moved[turn] = candidate
        misfits.append(_line(values, moved)[0])
    return between[int(np.argmin(misfits))]


def _around(at: int, smoothed: Smoothed, span: float) -> tuple[int, int]:
    """The range around the turn in which the smoothed scores are as high, up to their errors."""
    mean = np.asarray(smoothed.mean)
    lower = np.flatnonzero(mean < mean[at] - _NEAR * np.asarray(smoothed.stderr) - 1e-6 * span)
    before, after = lower[lower < at], lower[lower > at]
    return int(before.max(initial=-1)) + 1, int(after.min(initial=len(mean))) - 1


def _line(values: Floats, knots: Places) -> tuple[float, Floats, Floats]:
    """The best continuous line through these knots: squared misfit, heights, and their errors per unit of noise."""
    places = np.arange(len(values))
    shares = np.array([np.interp(places, knots, row) for row in np.eye(len(knots))])
    covariance = np.linalg.inv(shares @ shares.T)
    heights = covariance @ (shares @ values)
    return float(np.sum((values - heights @ shares) ** 2)), heights, np.sqrt(np.diag(covariance))


def _outward(width: float, exponent: int) -> float:
    try:
        return math.ldexp(width, exponent)
    except OverflowError:
        return sys.float_info.max
