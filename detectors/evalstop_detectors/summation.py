"""Sums and medians of floats that are bitwise equal on every Python version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LARGEST = 1e120


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
