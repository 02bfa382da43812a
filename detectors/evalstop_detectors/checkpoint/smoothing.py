"""Smooths the noisy scores of a run, over the whole run at once.

Source      Centered means; their width by an unbiased estimate of risk (Mallows 1973, Stein 1981), mixed rather than
            picked (Leung & Barron 2006); the noise from second differences (Gasser et al. 1986).
Steps       1. Map the scores into a frame (`Frame`) where they fill about [-1, 1], because sums and squares of very
               large or tiny scores would overflow or vanish.
            2. Clip each value to within `reach` of the median of the five around it, because one outlier would win
               the maximum of any mean.
            3. Estimate the noise of one value from second differences, which a trend hardly affects; a standard error
               from the trainer is a lower bound. Without noise the values are not smoothed.
            4. Take centered means of six widths, from none to sqrt(n), because the right width depends on how fast
               the run rises and falls, which is not known. Each mean is taken twice: one pass has a hard edge, at
               which the curve jumps when a large value leaves the window; two have the edge of a triangle.
            5. Estimate the squared error of each width (`_risk`) and mix the curves by it (`_weights`): with a single
               selected curve, the result would jump when another one is estimated to be slightly better.
            6. Estimate the error of each mean (`Fit.spread`): near the ends the windows are cut off.
Departs     The weights of the mixture are flatter than the theory's (16 for 4), which matters little.
Growing     The fit (frame, reach, noise, widths, weights) is that of the first scores (`count_fitted`): it is renewed
            when the run has grown by a sixteenth to an eighth, or its range to another power of two. From 256 scores on
            the newest are held back until there are several, at most an eighth of sqrt(n) (`count_settled`). Both
            depend only on the scores and their order.
Cost        O(n). Sums that decide are exact (`math.fsum`) or added one after the other (`np.cumsum`), so that the last
            bits do not depend on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

# Half widths of the windows in units of sqrt(n): narrow enough for a collapse, wide enough for noise as large as the
# gain.
_WIDTHS = (0.0, 0.175, 0.35, 0.5, 0.7, 1.0)
_FLATNESS = 16.0
_NOISELESS = 1e-9  # of the range of the scores: below this, only rounding errors

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


def count_settled(count: int) -> int:
    """How many of `count` scores are used: whole blocks, of 2 from 256 scores on, of 4 from 1024 on, and so on."""
    block = 1 << max((count.bit_length() - 1) // 2 - 3, 0)
    return count // block * block


def count_fitted(values: Floats) -> int:
    """How many of these scores the fit uses: their number with its three highest bits, or as many as there were when
    the range last grew to another power of two."""
    count = len(values)
    low_bits = max(count.bit_length() - 3, 0)
    # Halved, because the difference of the largest floats overflows.
    half_ranges = np.abs(values / 2 - values[0] / 2)
    widest = float(half_ranges.max())
    grew_at = int(np.argmax(half_ranges >= math.ldexp(0.5, math.frexp(widest)[1]))) + 1 if widest else 0
    return max(count >> low_bits << low_bits, grew_at)


class Frame(Struct, frozen=True):
    """A unit and an origin in which the scores of any run fill about [-1, 1].

    Units are powers of two, so that scores that differ by such a unit are bitwise equal inside.
    """

    outer: int
    zero: float
    inner: int

    @staticmethod
    def around(values: Floats) -> Frame:
        outer = math.frexp(max(float(values.max()), -float(values.min())))[1]
        scaled = np.ldexp(values, -outer)
        zero = float(scaled[0])
        return Frame(outer, zero, math.frexp(max(float(scaled.max()) - zero, zero - float(scaled.min())))[1])

    def inward(self, values: Floats) -> Floats:
        return np.ldexp(np.ldexp(values, -self.outer) - self.zero, -self.inner)

    def outward(self, values: Floats, low: float, high: float) -> Floats:
        """In the scores' unit, clipped to `low` and `high`, which are scores."""
        inside = np.ldexp(values, self.inner) + self.zero
        inside = np.clip(inside, math.ldexp(low, -self.outer), math.ldexp(high, -self.outer))
        # Clipped again, because the smallest numbers lose bits on the way.
        return np.clip(np.ldexp(inside, self.outer), low, high)

    def width_outward(self, width: float) -> float:
        return math.ldexp(min(math.ldexp(width, self.inner), 0.5), self.outer)

    def noise(self, stderrs: Floats) -> float:
        """The root mean square of the scores' standard errors, at most the range; 0 when there are none."""
        given = [stderr for stderr in stderrs.tolist() if 0 < stderr < math.inf]
        try:
            inside = [min(math.ldexp(stderr, -self.outer - self.inner), 1.0) for stderr in given]
        except OverflowError:
            return 1.0
        return math.sqrt(math.fsum([stderr * stderr for stderr in inside]) / len(inside)) if inside else 0.0


class Fit(Struct, frozen=True):
    """What is fitted to a run, all in the unit of `frame`: how far a value may lie from the median of its neighbors,
    the noise of a value, the half widths of the windows and their weights, and the approximate standard deviation of a
    mean at each distance from an end of the run, in multiples of the noise."""

    frame: Frame
    reach: float
    sd: float
    halves: list[int]
    weights: list[float]
    spreads: Floats

    def smooth(self, values: Floats) -> Floats:
        """The means at all values, which begin with those that were fitted."""
        tame = _clip_outliers(self.frame.inward(values), self.reach)
        return _mix([_take_means(tame, half) for half in self.halves], self.weights)

    def spread(self, places: Places, count: int) -> Floats:
        """The approximate standard deviation of the means at these places of `count`, in multiples of the noise."""
        widest = self.halves[-1]
        if count <= 2 * widest:  # so short that a window is cut off at both ends
            return _spread(self.halves, self.weights, places, count)
        return self.spreads[np.minimum(np.minimum(places, count - 1 - places), widest)]

    def stderr(self, place: int, count: int) -> float:
        """The standard error of the mean at one place of `count`, from the weight of every value in it."""
        first = max(place - 2 * self.halves[-1], 0)
        changes = np.zeros(min(place + 2 * self.halves[-1] + 1, count) - first + 1)
        for half, weight in zip(self.halves, self.weights, strict=True):
            centers = np.arange(max(place - half, 0), min(place + half + 1, count))
            lows, highs = np.maximum(centers - half, 0), np.minimum(centers + half + 1, count)
            shares = weight / (len(centers) * (highs - lows))
            np.subtract.at(changes, highs - first, shares)
            np.add.at(changes, lows - first, shares)
        shares = np.cumsum(changes)
        return self.sd * math.sqrt(math.fsum((shares * shares).tolist()))


def fit_scores(values: Floats, stderrs: Floats) -> Fit:
    """Fit finite values, at least one; their standard errors, NaN where unknown, are a lower bound of the noise."""
    frame = Frame.around(values)
    inside = frame.inward(values)
    reach = _find_reach(inside)
    tame = _clip_outliers(inside, reach)
    sd = max(frame.noise(stderrs), _estimate_noise(tame))
    if sd <= _NOISELESS:
        return Fit(frame, math.inf, 0.0, [0], [1.0], np.ones(1))
    halves = sorted({round(width * math.sqrt(len(values))) for width in _WIDTHS})
    weights = _weights([_risk(tame, _take_means(tame, half), half, sd) for half in halves])
    spreads = _spread(halves, weights, np.arange(halves[-1] + 1), 2 * halves[-1] + 1)
    return Fit(frame, reach, sd, halves, weights, spreads)


class Smoothed(Struct, frozen=True):
    """A smoothed curve, the approximate error of each of its values, and the noise's standard deviation."""

    mean: Floats
    stderr: Floats
    noise: float


def smooth_scores(values: Floats) -> Smoothed:
    """Smooth finite values, at least one."""
    fit = fit_scores(values, np.empty(0))
    spread = fit.sd * fit.spread(np.arange(len(values)), len(values))
    return Smoothed(
        fit.frame.outward(fit.smooth(values), float(values.min()), float(values.max())),
        np.array([fit.frame.width_outward(width) for width in spread.tolist()]),
        fit.frame.width_outward(fit.sd),
    )


def _spread(halves: Sequence[int], weights: Sequence[float], places: Places, count: int) -> Floats:
    """The standard deviation of means of means, approximately, in units of the noise's: of triangular weights."""
    mixed = np.zeros(len(places))
    for half, weight in zip(halves, weights, strict=True):
        windows = np.minimum(places + half + 1, count) - np.maximum(places - half, 0)
        mixed += weight * np.sqrt((2 * windows * windows + 1) / (3.0 * windows**3))
    return mixed


def _take_means(values: Floats, half: int) -> Floats:
    """Means of means over up to `half` neighbors on either side; the windows are cut off at the ends."""
    return _means(_means(values, half), half) if half else values


def _means(values: Floats, half: int) -> Floats:
    count, width = len(values), 2 * half + 1
    sums = np.empty(count + 1)
    sums[0] = 0.0
    np.cumsum(values, out=sums[1:])
    means: Floats = np.empty(count)
    if count < width:
        places = np.arange(count)
        lows, highs = np.maximum(places - half, 0), np.minimum(places + half + 1, count)
        means[:] = (sums[highs] - sums[lows]) / (highs - lows)
        return means
    means[:half] = sums[half + 1 : width] / np.arange(half + 1, width)
    means[half : count - half] = (sums[width:] - sums[: count + 1 - width]) / width
    means[count - half :] = (sums[count] - sums[count - 2 * half : count - half]) / np.arange(width - 1, half, -1)
    return means


def _mix(curves: Sequence[Floats], weights: Sequence[float]) -> Floats:
    mixed: Floats = weights[0] * curves[0]
    for curve, weight in zip(curves[1:], weights[1:], strict=True):
        mixed += weight * curve
    return mixed


def _clip_outliers(values: Floats, reach: float) -> Floats:
    """Values clipped to within `reach` of the median of the five around them."""
    if reach == math.inf:
        return values
    medians = _medians_of_five(values)
    return np.minimum(np.maximum(values, medians - reach), medians + reach)


def _medians_of_five(values: Floats) -> Floats:
    padded = np.concatenate([values[:1], values[:1], values, values[-1:], values[-1:]])
    a, b, c, d, e = (padded[index : index + len(values)] for index in range(5))
    # Of the two lower ones of two pairs the higher, and of the two higher ones the lower: the median is between them.
    low, high = np.maximum(np.minimum(a, b), np.minimum(c, d)), np.minimum(np.maximum(a, b), np.maximum(c, d))
    medians: Floats = np.maximum(np.minimum(low, high), np.minimum(np.maximum(low, high), e))
    return medians


def _find_reach(values: Floats) -> float:
    """Three typical distances from the median of five; infinite if that cannot be estimated."""
    if len(values) < 5:
        return math.inf
    typical = 1.2 / 0.6745 * float(np.median(np.abs(values - _medians_of_five(values))))
    return 3 * max(typical, _estimate_noise(values)) or math.inf  # coarse scores often equal their neighbors' median


def _estimate_noise(values: Floats) -> float:
    """The standard deviation of white noise on a smooth curve, robustly, from second differences."""
    if len(values) < 3:
        return 0.0
    return float(np.median(np.abs(values[2:] - 2 * values[1:-1] + values[:-2]))) / (0.6745 * math.sqrt(6))


def _risk(values: Floats, curve: Floats, half: int, sd: float) -> float:
    """An estimate of the squared error of a curve, in units of the noise's variance."""
    n, residuals = len(values), values - curve
    residual = math.fsum((residuals * residuals).tolist())
    cut = (*range(half), *range(n - half, n)) if n > 2 * half else range(n)
    own_weight = math.fsum([1 / (min(index + half + 1, n) - max(index - half, 0)) for index in cut])
    own_weight += (n - len(cut)) / (2 * half + 1)
    return residual / (sd * sd) + 2 * own_weight


def _weights(risks: list[float]) -> list[float]:
    least = min(risks)
    raw = [math.exp((least - risk) / _FLATNESS) for risk in risks]
    total = math.fsum(raw)
    return [weight / total for weight in raw]
