"""Smooths noisy scores, over a whole run or over one that grows.

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
Growing     The fit (frame, reach, noise, widths, weights) is renewed when the run has grown by a sixteenth
            to an eighth, or its range to another power of two; `Curve.grow` keeps it until then, and a new score
            changes only the means near the end. From 256 scores on the newest are held back until there are several,
            at most an eighth of sqrt(n). `count_settled` and `count_fitted` say which scores are used for what. They
            depend only on the scores and their order, so that a curve grown score by score is bitwise equal to the
            curve of all scores at once.
Cost        O(n) for a run; amortized constant for each score of a growing run.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice

from msgspec import Struct

from evalstop_detectors.summation import find_median

# Half widths of the windows in units of sqrt(n): narrow enough for a collapse, wide enough for noise as large as the
# gain.
_WIDTHS = (0.0, 0.175, 0.35, 0.5, 0.7, 1.0)
_FLATNESS = 16.0
_NOISELESS = 1e-9  # of the range of the scores: below this, only rounding errors


class Smoothed(Struct, frozen=True):
    """A smoothed curve, the approximate error of each of its values, and the noise's standard deviation."""

    mean: list[float]
    stderr: list[float]
    noise: float


def smooth_scores(values: Sequence[float]) -> Smoothed:
    """Smooth finite values, at least one."""
    curve, low, high = Curve(values), min(values), max(values)
    frame, sd = curve.fit.frame, curve.fit.sd
    return Smoothed(
        [frame.outward(value, low, high) for value in curve.mean],
        [frame.width_outward(sd * curve.fit.spread(index, len(values))) for index in range(len(values))],
        frame.width_outward(sd),
    )


def count_settled(count: int) -> int:
    """How many of `count` scores are used: whole blocks, of 2 from 256 scores on, of 4 from 1024 on, and so on."""
    block = 1 << max((count.bit_length() - 1) // 2 - 3, 0)
    return count // block * block


def count_fitted(count: int, grew_at: Iterable[int]) -> int:
    """How many of the first `count` scores the fit uses, if the range grew at the scores numbered `grew_at`."""
    low_bits = max(count.bit_length() - 3, 0)
    return max(count >> low_bits << low_bits, *(number for number in grew_at if number <= count), 0)


class Frame(Struct, frozen=True):
    """A unit and an origin in which the scores of any run fill about [-1, 1].

    Units are powers of two, so that scores that differ by such a unit are bitwise equal inside.
    """

    outer: int
    zero: float
    inner: int

    @staticmethod
    def around(values: Sequence[float]) -> Frame:
        outer = math.frexp(max(max(values), -min(values)))[1]
        scaled = [math.ldexp(value, -outer) for value in values]
        zero = scaled[0]
        return Frame(outer, zero, math.frexp(max(max(scaled) - zero, zero - min(scaled)))[1])

    def inward(self, value: float) -> float:
        return math.ldexp(math.ldexp(value, -self.outer) - self.zero, -self.inner)

    def outward(self, value: float, low: float, high: float) -> float:
        """In the scores' unit, clipped to `low` and `high`, which are scores."""
        within = math.ldexp(value, self.inner) + self.zero
        within = min(max(within, math.ldexp(low, -self.outer)), math.ldexp(high, -self.outer))
        # Clipped again, because the smallest numbers lose bits on the way.
        return min(max(math.ldexp(within, self.outer), low), high)

    def width_outward(self, width: float) -> float:
        return math.ldexp(min(math.ldexp(width, self.inner), 0.5), self.outer)

    def noise(self, stderrs: Iterable[float]) -> float:
        """The root mean square of the scores' standard errors, at most the range; 0 when there are none."""
        finite_stderrs = [stderr for stderr in stderrs if 0 < stderr < math.inf]
        try:
            inside = [min(math.ldexp(stderr, -self.outer - self.inner), 1.0) for stderr in finite_stderrs]
        except OverflowError:
            return 1.0
        return math.sqrt(math.fsum(stderr * stderr for stderr in inside) / len(inside)) if inside else 0.0


class Fit(Struct, frozen=True):
    """What is fitted to a run, all in the unit of `frame`: how far a value may lie from the median of its neighbors,
    the noise of a value, the half widths of the windows and their weights, and the approximate standard deviation of a
    mean at each distance from an end of the run, in multiples of the noise."""

    frame: Frame
    reach: float
    sd: float
    halves: tuple[int, ...]
    weights: tuple[float, ...]
    spreads: tuple[float, ...]

    def spread(self, index: int, count: int) -> float:
        """The approximate standard deviation of the mean at `index` of `count`, in multiples of the noise."""
        near, far, widest = index, count - 1 - index, self.halves[-1]
        if near >= widest or far >= widest:
            return self.spreads[min(near, far, widest)]
        windows = [min(index + half + 1, count) - max(index - half, 0) for half in self.halves]
        return _mixed_spread(windows, self.weights)


class Curve:
    """The smoothed scores of a growing run, with a fixed fit. Mutable: `grow` continues where the last call ended.

    From the index `_base` on it keeps the values and sums that later means still need.
    """

    def __init__(self, values: Sequence[float], stderrs: Iterable[float] = ()) -> None:
        """Fit finite values, at least one; the standard errors are a lower bound of the noise."""
        n, frame = len(values), Frame.around(values)
        inside = [frame.inward(value) for value in values]
        reach = _reach(inside)
        tame = _drawn_in(inside, 0, reach)
        sd = max(frame.noise(stderrs), _noise(tame))
        halves = sorted({round(width * math.sqrt(n)) for width in _WIDTHS}) if sd > _NOISELESS else [0]
        if sd <= _NOISELESS:
            tame, reach, sd = inside, math.inf, 0.0
        self._base = 0
        self._stderrs: dict[int, float] = {}
        self._tame, self._sums = array("d", tame), array("d", [0.0])
        _extend(self._sums, tame)
        self._inner = [array("d", [0.0]) for _ in halves]
        curves = [self._means_of_means(half, inner, 0, 0, n) for half, inner in zip(halves, self._inner, strict=True)]
        weights = _weights([_risk(tame, curve, half, sd) for curve, half in zip(curves, halves, strict=True)])
        distances = range(halves[-1] + 1)
        spreads = [_mixed_spread([half + 1 + min(half, far) for half in halves], weights) for far in distances]
        self.fit = Fit(frame, reach, sd, tuple(halves), tuple(weights), tuple(spreads))
        self.mean = array("d", _mixed(curves, weights))
        self._forget(n - 3 * halves[-1] - 4)

    def grow(self, values: Sequence[float], count: int) -> int:
        """Extend to the first `count` of these finite values, some of them known; returns the first index that
        changed."""
        fit, base, before = self.fit, self._base, len(self.mean)
        # The last two values lacked neighbors for their median of five.
        changed = max(before - 2, 0)
        del self._tame[changed - base :], self._sums[changed - base + 1 :]
        fresh = max(changed - 2, 0)
        inside = [fit.frame.inward(value) for value in values[fresh:count]]
        self._tame.extend(_drawn_in(inside, changed - fresh, fit.reach))
        _extend(self._sums, self._tame[changed - base :])
        begin = max(changed - 2 * fit.halves[-1], 0)
        curves = [
            self._means_of_means(half, inner, changed, begin, count)
            for half, inner in zip(fit.halves, self._inner, strict=True)
        ]
        del self.mean[begin:]
        self.mean.extend(_mixed(curves, fit.weights))
        return begin

    def _means_of_means(self, half: int, inner: array[float], changed: int, begin: int, count: int) -> Sequence[float]:
        """From `begin` on; `inner` holds the sums of the means, whose values changed from `changed` on."""
        if not half:
            return self._tame[begin - self._base :]
        first = max(changed - half, 0)
        del inner[first - self._base + 1 :]
        _extend(inner, _means(self._sums, self._base, half, first, count))
        return _means(inner, self._base, half, begin, count)

    def _forget(self, index: int) -> None:
        if index > self._base:
            for values in (self._tame, self._sums, *self._inner):
                del values[: index - self._base]
            self._base = index

    def bounds(self, begin: int, end: int, caution: float) -> list[float]:
        """The lower bound, `caution` approximate standard errors below each mean, from `begin` to before `end`."""
        count, sd, spreads = len(self.mean), caution * self.fit.sd, self.fit.spreads
        widest = len(spreads) - 1
        if begin >= widest and end <= count - widest:
            least = sd * spreads[widest]
            return [mean - least for mean in self.mean[begin:end]]
        if begin >= widest:
            return [
                mean - sd * spreads[far if far < widest else widest]
                for mean, far in zip(self.mean[begin:end], range(count - 1 - begin, -1, -1), strict=False)
            ]
        return [self.mean[index] - sd * self.fit.spread(index, count) for index in range(begin, end)]

    def stderr(self, index: int) -> float:
        """The standard error of the mean at `index`, from the weight of every value in it."""
        count, twice = len(self.mean), 2 * self.fit.halves[-1]
        if index < twice:
            return self._stderr(index)
        # Far from the start it depends only on the distance from the end, and far from both on nothing.
        distance = min(count - 1 - index, twice)
        if distance not in self._stderrs:
            self._stderrs[distance] = self._stderr(index)
        return self._stderrs[distance]

    def _stderr(self, index: int) -> float:
        count, offset = len(self.mean), index - 2 * self.fit.halves[-1]
        steps = [0.0] * (2 * (index - offset) + 2)
        for half, weight in zip(self.fit.halves, self.fit.weights, strict=True):
            inner = range(max(index - half, 0), min(index + half + 1, count))
            for center in inner:
                low, high = max(center - half, 0), min(center + half + 1, count)
                share = weight / (len(inner) * (high - low))
                steps[low - offset] += share
                steps[high - offset] -= share
        return self.fit.sd * math.sqrt(math.fsum([share * share for share in accumulate(steps)]))


def _extend(sums: array[float], values: Iterable[float]) -> None:
    sums.extend(islice(accumulate(values, initial=sums[-1]), 1, None))


def _means(sums: Sequence[float], base: int, half: int, begin: int, count: int) -> list[float]:
    """Means over up to `half` neighbors on either side, from `begin` on; the window is cut off at the ends.

    `sums` starts with the sum of all values before `base`.
    """
    width, means = 2 * half + 1, list[float]()
    if begin < half or count < width:
        cut = range(begin, min(half, count) if count >= width else count)
        edges = [(max(index - half, 0), min(index + half + 1, count)) for index in cut]
        means = [(sums[high - base] - sums[low - base]) / (high - low) for low, high in edges]
        begin += len(cut)
    end, shift = max(count - half, begin), begin - half - base
    lows, highs = sums[shift : shift + end - begin], sums[shift + width : shift + width + end - begin]
    means += [(high - low) / width for low, high in zip(lows, highs, strict=True)]
    if end < count:
        total = sums[count - base]
        lows = sums[end - half - base : count - half - base]
        means += [(total - low) / size for low, size in zip(lows, range(count - end + half, half, -1), strict=True)]
    return means


def _drawn_in(values: Sequence[float], begin: int, reach: float) -> list[float]:
    """Values from `begin` on, clipped to within `reach` of the median of the five around them."""
    if reach == math.inf:
        return list(values[begin:])
    medians = _medians(values, begin)
    return [
        min(max(value, median - reach), median + reach) for value, median in zip(values[begin:], medians, strict=True)
    ]


def _reach(values: Sequence[float]) -> float:
    """Three typical distances from the median of five; infinite if that cannot be estimated."""
    if len(values) < 5:
        return math.inf
    medians = _medians(values, 0)
    typical = 1.2 / 0.6745 * find_median([abs(value - median) for value, median in zip(values, medians, strict=True)])
    return 3 * max(typical, _noise(values)) or math.inf  # coarse scores often equal their neighbors' median


def _medians(values: Sequence[float], begin: int) -> list[float]:
    padded = [values[0], values[0], *values, values[-1], values[-1]]
    return [sorted(padded[index : index + 5])[2] for index in range(begin, len(values))]


def _noise(values: Sequence[float]) -> float:
    """The standard deviation of white noise on a smooth curve, robustly, from second differences."""
    if len(values) < 3:
        return 0.0
    bends = [abs(c - 2 * b + a) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return find_median(bends) / (0.6745 * math.sqrt(6))


def _risk(values: Sequence[float], curve: Sequence[float], half: int, sd: float) -> float:
    """An estimate of the squared error of a curve, in units of the noise's variance."""
    n = len(values)
    residuals = [value - mean for value, mean in zip(values, curve, strict=True)]
    if sd == 0:
        return 0.0
    residual = math.fsum([x * x for x in residuals])
    cut = (*range(half), *range(n - half, n)) if n > 2 * half else range(n)
    own_weight = math.fsum([1 / (min(index + half + 1, n) - max(index - half, 0)) for index in cut])
    own_weight += (n - len(cut)) / (2 * half + 1)
    return residual / (sd * sd) + 2 * own_weight


def _weights(risks: list[float]) -> list[float]:
    least = min(risks)
    raw = [math.exp((least - risk) / _FLATNESS) for risk in risks]
    total = math.fsum(raw)
    return [weight / total for weight in raw]


def _mixed(curves: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    mixed = [weights[0] * value for value in curves[0]]
    for curve, weight in zip(curves[1:], weights[1:], strict=True):
        mixed = [total + weight * value for total, value in zip(mixed, curve, strict=True)]
    return mixed


def _mixed_spread(windows: Iterable[int], weights: Iterable[float]) -> float:
    """The standard deviation of each mean of means, approximately, in units of the noise's: of triangular weights."""
    mixed = 0.0
    for window, weight in zip(windows, weights, strict=True):
        mixed += weight * math.sqrt((2 * window * window + 1) / (3.0 * window**3))
    return mixed
