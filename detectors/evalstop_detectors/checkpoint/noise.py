"""The noise of one role of a run, estimated despite its trend: the scale of one value and its lag-1 autocorrelation.

Source      Medians of first and second absolute differences: differences remove a trend, medians are robust to jumps
            and outliers (Rice 1984 and Gasser, Sroka & Jennen-Steinmetz 1986 for the differences; Hampel 1974 for the
            median deviation). The autocorrelation is estimated from differences at lags 1 and 2.
Departs     Only the last 64 differences count, so that changing noise is followed. Estimates from few values are
            enlarged, and no estimate falls below a small share of the range of the run: a series that repeats itself
            exactly is not known to be noiseless. A standard error from the trainer is a lower bound, because sampling
            is not the only source of noise in evals.
State       The last 65 values relative to the first one, the range, and the mean square of the standard errors. O(1).
            Beside the state, invisible to equality and to the codec, its differences are kept sorted once an estimate
            was requested, so that the next estimate need not sort all of them again.
Not done    To differences, a random walk looks like a smooth curve, and its scale comes out too small. The
            autocorrelation is that of an AR(1); a steep trend is partly mistaken for it, which makes tests slower, not
            wrong.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from functools import lru_cache
from itertools import pairwise

from msgspec import Struct

from evalstop_detectors.summation import LARGEST

# Values beyond this are clipped, so that differences, sums and squares stay finite.

WINDOW = 64
_WORTH_MOVING = 4  # values; beyond this, sorting again is as fast
# The medians of |a - b| and |a - 2 b + c| of independent normal values, in standard deviations of one.
MEDIAN_DIFFERENCE = 0.9539
MEDIAN_SECOND_DIFFERENCE = 1.6522
# Second differences vary more, and the smaller of two estimates is biased downwards.
SECOND_MARGIN = 1.15
SUPPOSED_CORRELATION = 0.4
STRONGEST_SUPPOSED = 0.8
FEW = 8
SHARE_OF_RANGE_WHILE_FEW = 0.05
SHARE_OF_RANGE = 0.02
STRONGEST_CORRELATION = 0.7


class NoiseState(Struct, frozen=True, dict=True):
    """See the module's docstring; values are relative to the first one."""

    seen: int = 0
    origin: float = 0.0
    recent: tuple[float, ...] = ()
    low: float = 0.0
    high: float = 0.0
    stderrs: int = 0
    mean_square: float = 0.0

    def __hash__(self) -> int:
        return self.seen  # all values would take as long as adding one


class Noise(Struct, frozen=True):
    """`sd` of one value, 0 while unknown; `inflation`: the factor, 1 or more, by which autocorrelation increases the
    standard deviation of a long mean."""

    sd: float
    inflation: float


def add_value(state: NoiseState, value: float, stderr: float | None = None) -> NoiseState:
    """Add one finite value; a standard error that is not a positive finite number is ignored."""
    value = clipped(value)
    seen, recent, low, high = state.seen, state.recent, state.low, state.high
    origin = state.origin if seen else value
    counted = clipped(value - origin) if seen else 0.0
    stderrs, mean_square = state.stderrs, state.mean_square
    if stderr is not None and 0 < stderr < math.inf:
        clipped_stderr = min(stderr, LARGEST)
        stderrs += 1
        # A product rounds the same in all units that differ by a power of two; a power does not.
        mean_square += (clipped_stderr * clipped_stderr - mean_square) / stderrs
    after = NoiseState(
        seen + 1,
        origin,
        (*recent[-WINDOW:], counted),
        counted if counted < low else low,
        counted if counted > high else high,
        stderrs,
        mean_square,
    )
    if (ordered := state.__dict__.get("ordered")) is not None and seen - ordered[0] < _WORTH_MOVING:
        after.__dict__["ordered"] = ordered
    return after


advance = lru_cache(maxsize=16)(add_value)
"""`add_value` for a value that several detectors of a run add: the work of the first one serves the others."""


def estimate(state: NoiseState) -> Noise:
    """The noise as estimated from the values so far; faster if called before `advance`."""
    if "noise" not in state.__dict__:  # it serves the detectors that share the state, too
        state.__dict__["noise"] = _estimate(state)
    noise: Noise = state.__dict__["noise"]
    return noise


def _estimate(state: NoiseState) -> Noise:
    seen = state.seen
    spread = state.high - state.low
    least = spread * (SHARE_OF_RANGE_WHILE_FEW if seen <= FEW else SHARE_OF_RANGE)
    stderr_sd = math.sqrt(state.mean_square)
    if seen < 2:
        return Noise(stderr_sd, 1.0)
    _, _, firsts, seconds, skipping = _sort_differences(state)
    # The median is the mean of the two in the middle, from each end; of an odd number they are one.
    middle = (len(firsts) - 1) // 2
    sd = first = (firsts[middle] + firsts[~middle]) / 2 / MEDIAN_DIFFERENCE
    middle = (len(seconds) - 1) // 2
    if seen >= 4:
        second = (seconds[middle] + seconds[~middle]) / 2
        sd = min(first, SECOND_MARGIN * second / MEDIAN_SECOND_DIFFERENCE)
    correlation = 0.0
    if seen >= FEW + 2 and first > least:
        ratio = (skipping[middle] + skipping[~middle]) / 2 / MEDIAN_DIFFERENCE / first
        pairs = seen - 2
        correlation = min(max(ratio * ratio - 1, 0.0), STRONGEST_CORRELATION) * pairs / (pairs + 10)
    correlation = min(correlation + SUPPOSED_CORRELATION * 10 / (seen + 10), STRONGEST_SUPPOSED)
    return Noise(max(sd * (1 + 2 / seen), least, stderr_sd), math.sqrt((1 + correlation) / (1 - correlation)))


_Ordered = tuple[int, tuple[float, ...], "array[float]", "array[float]", "array[float]"]
"""For the `recent` values when so many were seen, in ascending order: |b - a| and |a - 2 b + c| of neighbors, and
|c - a| of neighbors but one."""


def _sort_differences(state: NoiseState) -> _Ordered:
    """The differences of the recent values, updated from those of a recent state if it has them."""
    ordered: _Ordered | None = state.__dict__.get("ordered")
    if ordered is not None and ordered[0] == state.seen:
        return ordered
    if ordered is None:
        values = state.recent
        threes = list(zip(values, values[1:], values[2:], strict=False))
        firsts = array("d", sorted([abs(b - a) for a, b in pairwise(values)]))
        seconds = array("d", sorted([abs(c - 2 * b + a) for a, b, c in threes]))
        skipping = array("d", sorted([abs(c - a) for a, _, c in threes]))
    else:
        before, values, firsts, seconds, skipping = ordered
        firsts, seconds, skipping = firsts[:], seconds[:], skipping[:]
        for value in state.recent[before - state.seen :]:
            if len(values) > WINDOW:  # the first value leaves
                a, b, c = values[:3]
                del firsts[bisect_left(firsts, abs(b - a))]
                del seconds[bisect_left(seconds, abs(c - 2 * b + a))]
                del skipping[bisect_left(skipping, abs(c - a))]
            b = values[-1]
            insort(firsts, abs(value - b))
            if len(values) > 1:
                a = values[-2]
                insort(seconds, abs(value - 2 * b + a))
                insort(skipping, abs(value - a))
            values = (*values[-WINDOW:], value)
    state.__dict__["ordered"] = ordered = (state.seen, state.recent, firsts, seconds, skipping)
    return ordered


def clipped(value: float) -> float:
    return value if abs(value) <= LARGEST else min(max(value, -LARGEST), LARGEST)
