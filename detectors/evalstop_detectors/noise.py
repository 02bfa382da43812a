"""How noisy one signal of a run is, estimated while it trends: the scale of one value and its lag-1 autocorrelation.

Source      Medians of first and second absolute differences: differences forget a trend, medians forget jumps and
            outliers (Rice 1984 and Gasser, Sroka & Jennen-Steinmetz 1986 for the differences; Hampel 1974 for the
            median deviation). The autocorrelation comes from differences at lags 1 and 2.
Departs     Only the last 64 differences count, so that noise that grows or shrinks is followed. What is estimated is
            made larger while little was seen, and never falls below a small share of the range of the run: a series
            that repeats itself exactly is not known to be noiseless. A standard error that the trainer gives is a lower
            bound, because what samples cost is not all that makes evals differ.
State       The last 65 values counted from the first one, the range, and the mean square of the standard errors. O(1).
Not done    A random walk looks like a smooth curve to differences and its scale comes out too small. The
            autocorrelation is that of an AR(1); a steep trend passes for some of it, which makes tests slower, not
            wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from msgspec import Struct

# Beyond this values are cut off, so that differences, sums and squares stay finite.
LARGEST = 1e120

_WINDOW = 64
# The medians of |a - b| and |a - 2 b + c| of independent normal values, in standard deviations of one.
_MEDIAN_DIFFERENCE = 0.9539
_MEDIAN_SECOND_DIFFERENCE = 1.6522
# Second differences vary more, and of two estimates the smaller one is too small.
_SECOND_MARGIN = 1.15
_SUPPOSED_CORRELATION = 0.4
_STRONGEST_SUPPOSED = 0.8
_FEW = 8
_SHARE_OF_RANGE_WHILE_FEW = 0.05
_SHARE_OF_RANGE = 0.02
_STRONGEST_CORRELATION = 0.7


class NoiseState(Struct, frozen=True):
    """See the module's docstring; values are counted from the first one, which is 0."""

    seen: int = 0
    origin: float = 0.0
    recent: tuple[float, ...] = ()
    low: float = 0.0
    high: float = 0.0
    stderrs: int = 0
    mean_square: float = 0.0


class Noise(Struct, frozen=True):
    """`sd` of one value, 0 while nothing is known; `inflation` is how much larger than without autocorrelation the
    standard deviation of a long mean is, 1 or more."""

    sd: float
    inflation: float


def from_origin(state: NoiseState, value: float) -> float:
    """The value counted from the first one, cut off at `LARGEST`."""
    return clipped(clipped(value) - state.origin) if state.seen else 0.0


def advance(state: NoiseState, value: float, stderr: float | None = None) -> NoiseState:
    """Take in one finite value; a standard error that is no positive finite number is as good as none."""
    counted = from_origin(state, value)
    stderrs, mean_square = state.stderrs, state.mean_square
    if stderr is not None and 0 < stderr < math.inf:
        stderrs += 1
        known = min(stderr, LARGEST)
        # A product is rounded the same in every unit that is a power of two of another; a power is not.
        mean_square += (known * known - mean_square) / stderrs
    return NoiseState(
        seen=state.seen + 1,
        origin=state.origin if state.seen else clipped(value),
        recent=(*state.recent[-_WINDOW:], counted),
        low=min(state.low, counted),
        high=max(state.high, counted),
        stderrs=stderrs,
        mean_square=mean_square,
    )


def estimate(state: NoiseState) -> Noise:
    """The noise as far as it is known from the values taken in."""
    spread = state.high - state.low
    least = spread * (_SHARE_OF_RANGE_WHILE_FEW if state.seen <= _FEW else _SHARE_OF_RANGE)
    known = math.sqrt(state.mean_square)
    if state.seen < 2:
        return Noise(known, 1.0)
    values = state.recent
    first = _median(abs(b - a) for a, b in pairwise(values)) / _MEDIAN_DIFFERENCE
    found = first
    if state.seen >= 4:
        second = _median(abs(c - 2 * b + a) for a, b, c in zip(values, values[1:], values[2:], strict=False))
        found = min(first, _SECOND_MARGIN * second / _MEDIAN_SECOND_DIFFERENCE)
    correlation = 0.0
    if state.seen >= _FEW + 2 and first > least:
        ratio = _median(abs(b - a) for a, b in zip(values, values[2:], strict=False)) / _MEDIAN_DIFFERENCE / first
        pairs = state.seen - 2
        correlation = min(max(ratio * ratio - 1, 0.0), _STRONGEST_CORRELATION) * pairs / (pairs + 10)
    correlation = min(correlation + _SUPPOSED_CORRELATION * 10 / (state.seen + 10), _STRONGEST_SUPPOSED)
    return Noise(max(found * (1 + 2 / state.seen), least, known), math.sqrt((1 + correlation) / (1 - correlation)))


def _median(numbers: Iterable[float]) -> float:
    ordered = sorted(numbers)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def clipped(value: float) -> float:
    """The value, or the largest that is reckoned with."""
    return min(max(value, -LARGEST), LARGEST)
