"""How noisy one signal of a run is, estimated while it trends: the scale of one value and its lag-1 autocorrelation.

Source      Medians of |y[t] - y[t-1]| and |y[t] - y[t-2]|: differences forget a slow trend, medians forget jumps and
            outliers (Rice 1984 for differences; Hampel 1974 for the median deviation).
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
from collections.abc import Sequence
from itertools import islice

from msgspec import Struct

# Beyond this values are cut off, so that differences, sums and squares stay finite.
LARGEST = 1e120

_WINDOW = 64
# The median of |a - b| of two independent normal values, in standard deviations of one.
_MEDIAN_DIFFERENCE = 0.9539
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
        mean_square += (min(stderr, LARGEST) ** 2 - mean_square) / stderrs
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
    first = _median_difference(state.recent, 1)
    sd = max(first * (1 + 2 / state.seen), least, known)
    correlation = 0.0
    if state.seen >= _FEW + 2 and first > least:
        ratio = _median_difference(state.recent, 2) / first
        pairs = state.seen - 2
        correlation = min(max(ratio * ratio - 1, 0.0), _STRONGEST_CORRELATION) * pairs / (pairs + 10)
    return Noise(sd, math.sqrt((1 + correlation) / (1 - correlation)))


def _median_difference(values: Sequence[float], lag: int) -> float:
    """The standard deviation of one value, by the median of the differences at this lag."""
    differences = sorted([abs(b - a) for a, b in zip(values, islice(values, lag, None), strict=False)])
    count = len(differences)
    return (differences[(count - 1) // 2] + differences[count // 2]) / 2 / _MEDIAN_DIFFERENCE


def clipped(value: float) -> float:
    """The value, or the largest that is reckoned with."""
    return min(max(value, -LARGEST), LARGEST)
