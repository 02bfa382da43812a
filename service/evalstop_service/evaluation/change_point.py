"""The change point in hindsight: where an ended run turned, by all of its eval scores.

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
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
from evalstop_detectors import Score, select_version
from evalstop_detectors.checkpoint.smoothing import Smoothed, smooth_scores
from numpy.typing import NDArray

from evalstop_service.background import PeriodicJob, Wait
from evalstop_service.domain.run import ChangePoint
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
_NEAR = 3.0  # standard errors; a smoothed score within them is as high as another: covers the peak nine times in ten

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


def create_job() -> PeriodicJob:
    """Imports ruptures, once: with all of scipy it takes a second, for which no transaction should wait."""

    def import_ruptures(wait: Wait) -> float:
        if not AVAILABLE:
            _log.warning("ruptures is not installed: no change point in hindsight; see docs/detectors/change_point.md")
        elif not wait(IMPORT_AFTER_SECONDS):
            importlib.import_module("ruptures")
        return threading.TIMEOUT_MAX

    return PeriodicJob("import-ruptures", import_ruptures)


def load_change_point(tx: Transaction, run: Run) -> ChangePoint | None:
    """The change point of a run; None where the eval shows no drop."""
    metric = watched_metrics.find_eval_metric(run)
    if metric is None:
        return None
    return find_change_point(watched_metrics.select_scores(run, observations.load_series(tx, run.id, [metric])))


def find_change_point(scores: Sequence[Score]) -> ChangePoint | None:
    """The change point among scores by ascending step, using only those measured like the last one."""
    return locate_change_point(select_version(scores)) if AVAILABLE else None


def locate_change_point(scores: Sequence[Score]) -> ChangePoint | None:
    """Where the scores (by ascending step, higher is better) turned; None if no fall exceeds the noise.

    A fall counts if it exceeds three standard errors and a tenth of the gain.
    """
    finite = [score for score in scores if math.isfinite(score.value)]
    if len(finite) < MIN_SCORES:
        return None
    values = np.array([score.value for score in finite])
    exponent = int(np.frexp(np.abs(values).max())[1])
    values = np.ldexp(values, -exponent)  # the squares below must neither overflow nor vanish
    values, places = _thinned(values - values[0])
    span = float(np.ptp(values))
    if span <= 1e-12:
        return None
    smoothed = smooth_scores(values)
    placed = _placed(values, smoothed.mean, max(smoothed.noise, 1e-6 * span))
    if placed is None:
        return None
    at, gain, drop = placed
    low, high = _around(at, smoothed, span)
    step, low_step, high_step = (finite[int(places[index])].step for index in (at, low, high))
    return ChangePoint(step, low_step, high_step, _outward(gain, exponent), _outward(drop, exponent))


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


def _outward(width: float, exponent: int) -> float:
    try:
        return math.ldexp(width, exponent)
    except OverflowError:
        return sys.float_info.max
