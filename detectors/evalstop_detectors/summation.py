"""Sums, medians and slopes of floats that are bitwise equal on every Python version."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul

LARGEST = 1e120
FAR = 1e100
"""Values up to this far from zero can be added up without clipping."""


def add_up(values: Iterable[float]) -> float:
    """The sum of `values`, added one after the other in double precision.

    The builtin `sum` compensates for rounding from Python 3.12 on, so its last bits depend on the interpreter.
    """
    total = 0.0
    for value in values:
        total += value
    return total


def find_median(values: Sequence[float]) -> float:
    """The median of at least one value; for an even number, the mean of the two in the middle."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


_SPANS = (3, 4, 5, 6, 8, 12, 16, 24, 32)
_SIGMAS = 2.0


def slopes_up(values: Sequence[float], sd: float) -> bool:
    """Whether the least-squares slope over any of several spans of last values is significant.

    `sd`: the standard deviation of one value.

    >>> slopes_up([0.0, 1.0, 2.0], 0.5), slopes_up([2.0, 1.0, 2.0], 0.5)
    (True, False)
    """
    bound = _SIGMAS * sd
    for span, weights in _WEIGHTS:
        if span > len(values):
            break
        if add_up(map(mul, weights, values[-span:])) >= bound:
            return True
    return False


def _unit_slope(span: int) -> tuple[float, ...]:
    """Weights whose product with values is their least-squares slope in standard deviations, for unit noise."""
    centered = [index - (span - 1) / 2 for index in range(span)]
    norm = math.sqrt(add_up(x * x for x in centered))
    return tuple(x / norm for x in centered)


_WEIGHTS = tuple((span, _unit_slope(span)) for span in _SPANS)
