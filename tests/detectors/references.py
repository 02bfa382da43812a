"""Slow and simple references of detectors: value and turn step computed from the whole history."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from evalstop_detectors import Observation
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_detectors.detectors.non_finite import NonFinite

Reference = tuple[float, int | None]


def drop_non_finite(history: Sequence[Observation]) -> list[Observation]:
    """The observations with a finite value."""
    return [item for item in history if not (math.isnan(item.value) or math.isinf(item.value))]


def k_decline(detector: KDecline, history: Sequence[Observation]) -> Reference:
    evals = drop_non_finite(history)
    falls = [index > 0 and item.value < evals[index - 1].value - detector.min_delta for index, item in enumerate(evals)]
    length = count_trailing(falls)
    return (length, evals[-length - 1].step) if length else (0, None)


def non_finite(detector: NonFinite, history: Sequence[Observation]) -> Reference:
    length = count_trailing([not math.isfinite(item.value) for item in history])
    before = history[: len(history) - length]
    return length, before[-1].step if length and before else None


def count_trailing(flags: Sequence[bool]) -> int:
    """How many flags at the end are true in a row."""
    length = 0
    while length < len(flags) and flags[len(flags) - 1 - length]:
        length += 1
    return length


REFERENCES: dict[str, Callable[[Any, Sequence[Observation]], Reference]] = {
    "k_decline": k_decline,
    "non_finite": non_finite,
}
