"""Which checkpoint is the best one, given noisy scores.

Source      Centered means; their width by an unbiased estimate of risk (Mallows 1973, Stein 1981), mixed rather than
            picked (Leung & Barron 2006); the noise from second differences (Gasser et al. 1986).
Departs     The weights of the mixture are flatter than the theory's (16 for 4), which matters little. Each mean is
            taken twice, which turns the hard edges of the window into a triangle. Values far from their neighbors are
            drawn in first, so that one outlier cannot win.
Cost        O(n) by cumulative sums, for each of the six windows: some 0.1 s for 10^4 scores.
Not done    Steps may be uneven: neighbors are counted in evals. Standard errors that differ within a run are used for
            the scale of the noise and for the standard error of the choice, not as weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Annotated, ClassVar, Protocol

from msgspec import Meta, Struct

# Half widths of the windows in units of sqrt(n): narrow enough for a collapse, wide enough for noise as large as the
# gain.
_WIDTHS = (0.0, 0.175, 0.35, 0.5, 0.7, 1.0)
_FLATNESS = 16.0
_NOISELESS = 1e-9  # of the range of the scores: what is left is rounding


class Score(Struct, frozen=True):
    """A gold score of the model at `step`, higher is better; `stderr` in its unit, None when unknown."""

    step: int
    value: float
    stderr: float | None = None


class Best(Struct, frozen=True):
    """The step of the chosen checkpoint, the raw score measured there, and the rule that chose it.

    `smoothed` is what the rule believes the score to be, with its standard error, both in the score's unit; None where
    a rule takes scores as they were measured. The error is that of the noise alone: smoothing flattens peaks, too.
    """

    step: int
    score: float
    chosen_by: str
    smoothed: float | None = None
    smoothed_stderr: float | None = None


class Chooser(Protocol):
    """A rule that picks one of the scored steps."""

    name: ClassVar[str]

    def choose(self, scores: Sequence[Score], existing: Collection[int]) -> Best | None:
        """The best of the finite `scores` (by ascending step) whose step is in `existing`; None when there is none."""


class RawMaximum:
    """The highest score as measured; of equals the earliest, which is nearest to the initial policy.

    The maximum of noisy scores is chosen in part for its noise: what it promises is more than what one gets.
    """

    name: ClassVar[str] = "raw_maximum"

    def choose(self, scores: Sequence[Score], existing: Collection[int]) -> Best | None:
        candidates = [score for score in scores if score.step in existing and math.isfinite(score.value)]
        if not candidates:
            return None
        best = max(candidates, key=lambda score: (score.value, -score.step))
        return Best(best.step, best.value, self.name)


class SmoothedMaximum(Struct, frozen=True):
    """The highest lower bound of the smoothed scores; of equals the earliest.

    Scores of steps without a checkpoint count as neighbors. Scores without noise are left as they are. `caution` is how
    many standard errors the bound lies below the smoothed score.
    """

    name: ClassVar[str] = "smoothed_maximum"

    caution: Annotated[float, Meta(ge=0, le=10)] = 0.5

    def choose(self, scores: Sequence[Score], existing: Collection[int]) -> Best | None:
        finite = [score for score in scores if math.isfinite(score.value)]
        candidates = [index for index, score in enumerate(finite) if score.step in existing]
        if not candidates:
            return None
        frame = _Frame.around([score.value for score in finite])
        smoothed = _Smooth.of([frame.inward(score.value) for score in finite], frame.noise(finite))
        best = max(candidates, key=lambda index: (smoothed.bound(index, self.caution), -index))
        return Best(
            finite[best].step,
            finite[best].value,
            self.name,
            frame.outward(smoothed.mean[best]),
            frame.width_outward(smoothed.stderr(best)),
        )


class Smoothed(Struct, frozen=True):
    """A curve without most of its noise, about what each of its values errs by, and the noise's standard deviation."""

    mean: list[float]
    stderr: list[float]
    noise: float


def smooth(values: Sequence[float]) -> Smoothed:
    """Take most of the noise from finite values, at least one."""
    frame = _Frame.around(values)
    inside = _Smooth.of([frame.inward(value) for value in values], 0.0)
    return Smoothed(
        [frame.outward(value) for value in inside.mean],
        [frame.width_outward(inside.sd * spread) for spread in inside.spread],
        frame.width_outward(inside.sd),
    )


class _Frame(Struct, frozen=True):
    """A unit and a zero in which every run of scores fills about [-1, 1], whatever is large or tiny outside.

    Units are powers of two, so that scores in another such unit are, to the last bit, the same inside.
    """

    outer: int
    zero: float
    inner: int
    low: float
    high: float

    @staticmethod
    def around(values: Sequence[float]) -> _Frame:
        outer = math.frexp(max(abs(value) for value in values))[1]
        scaled = [math.ldexp(value, -outer) for value in values]
        inner = math.frexp(max(abs(value - scaled[0]) for value in scaled))[1]
        return _Frame(outer, scaled[0], inner, min(scaled), max(scaled))

    def inward(self, value: float) -> float:
        return math.ldexp(math.ldexp(value, -self.outer) - self.zero, -self.inner)

    def outward(self, value: float) -> float:
        within = min(max(math.ldexp(value, self.inner) + self.zero, self.low), self.high)
        return math.ldexp(within, self.outer)

    def width_outward(self, width: float) -> float:
        return math.ldexp(min(math.ldexp(width, self.inner), 0.5), self.outer)

    def noise(self, scores: Sequence[Score]) -> float:
        """The root mean square of the standard errors that came with scores, at most the range; 0 when none did."""
        told = [score.stderr for score in scores if score.stderr is not None and 0 < score.stderr < math.inf]
        try:
            inside = [min(math.ldexp(stderr, -self.outer - self.inner), 1.0) for stderr in told]
        except OverflowError:
            return 1.0
        return math.sqrt(math.fsum(stderr * stderr for stderr in inside) / len(inside)) if inside else 0.0


class _Smooth(Struct, frozen=True):
    """The mixture of smoothed curves: half widths of the windows, their weights, the means, the noise of a value."""

    halves: list[int]
    weights: list[float]
    mean: list[float]
    spread: list[float]
    sd: float

    @staticmethod
    def of(values: list[float], told_sd: float) -> _Smooth:
        """Smooth values of a range of about 1; `told_sd` is a lower bound of their noise's standard deviation."""
        n = len(values)
        tame = _drawn_in(values)
        sd = max(told_sd, _noise(tame))
        if sd <= _NOISELESS:
            return _Smooth([0], [1.0], values, [0.0] * n, 0.0)
        halves = sorted({round(width * math.sqrt(n)) for width in _WIDTHS})
        curves = [_centered(_centered(tame, half), half) for half in halves]
        risks = [_risk(tame, curve, half, sd) for curve, half in zip(curves, halves, strict=True)]
        least = min(risks)
        raw = [math.exp((least - risk) / _FLATNESS) for risk in risks]
        weights = [weight / math.fsum(raw) for weight in raw]
        return _Smooth(halves, weights, _mixed(curves, weights), _mixed([_spread(n, h) for h in halves], weights), sd)

    def bound(self, index: int, caution: float) -> float:
        return self.mean[index] - caution * self.sd * self.spread[index]

    def stderr(self, index: int) -> float:
        """The standard error of the mean at `index`, from the share that every value has in it."""
        n, shares = len(self.mean), dict[int, float]()
        for half, weight in zip(self.halves, self.weights, strict=True):
            inner = range(max(index - half, 0), min(index + half + 1, n))
            for center in inner:
                low, high = max(center - half, 0), min(center + half + 1, n)
                for other in range(low, high):
                    shares[other] = shares.get(other, 0.0) + weight / (len(inner) * (high - low))
        return self.sd * math.sqrt(math.fsum(share * share for share in shares.values()))


def _drawn_in(values: list[float]) -> list[float]:
    """Values at most three typical distances away from the median of the five around them."""
    if len(values) < 5:
        return values
    padded = [values[0]] * 2 + values + [values[-1]] * 2
    medians = [sorted(padded[index : index + 5])[2] for index in range(len(values))]
    typical = 1.2 / 0.6745 * _median([abs(value - median) for value, median in zip(values, medians, strict=True)])
    reach = 3 * max(typical, _noise(values))  # coarse scores often are their neighbors' median
    if reach <= 0:
        return values
    return [min(max(value, median - reach), median + reach) for value, median in zip(values, medians, strict=True)]


def _noise(values: list[float]) -> float:
    """The standard deviation of white noise on a smooth curve, robustly, from second differences."""
    if len(values) < 3:
        return 0.0
    bends = [abs(c - 2 * b + a) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return _median(bends) / (0.6745 * math.sqrt(6))


def _centered(values: list[float], half: int) -> list[float]:
    """Means over up to `half` neighbors on either side; the window is cut off at the ends."""
    if half == 0:
        return values
    n, sums = len(values), [0.0, *accumulate(values)]
    edges = ((max(index - half, 0), min(index + half + 1, n)) for index in range(n))
    return [(sums[high] - sums[low]) / (high - low) for low, high in edges]


def _risk(values: list[float], curve: list[float], half: int, sd: float) -> float:
    """An estimate of the squared error of a curve, in units of the noise's variance."""
    n = len(values)
    residual = math.fsum((value - mean) ** 2 for value, mean in zip(values, curve, strict=True))
    own = math.fsum(1 / (min(index + half + 1, n) - max(index - half, 0)) for index in range(n))
    return residual / (sd * sd) + 2 * own


def _spread(n: int, half: int) -> list[float]:
    """About how many noise standard deviations each mean of means varies: that of a triangle of weights."""
    windows = (min(index + half + 1, n) - max(index - half, 0) for index in range(n))
    return [math.sqrt((2 * window * window + 1) / (3.0 * window**3)) for window in windows]


def _mixed(curves: list[list[float]], weights: list[float]) -> list[float]:
    mixed = [0.0] * len(curves[0])
    for curve, weight in zip(curves, weights, strict=True):
        mixed = [sofar + weight * value for sofar, value in zip(mixed, curve, strict=True)]
    return mixed


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
