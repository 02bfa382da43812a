"""Sums of floats that are the same to the last bit on every Python."""

from __future__ import annotations

from collections.abc import Iterable


def add_up(values: Iterable[float]) -> float:
    """The sum of `values`, added one after the other in double precision.

    The builtin `sum` compensates for rounding from Python 3.12 on, so its last bits depend on the interpreter.
    """
    total = 0.0
    for value in values:
        total += value
    return total
