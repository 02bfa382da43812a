"""The slow reference of the noise, equal bit by bit: everything is computed again after each value."""

from __future__ import annotations

import math
from collections.abc import Sequence

LARGEST_VALUE = 1e120


def clip(value: float) -> float:
    return min(max(value, -LARGEST_VALUE), LARGEST_VALUE)


def median(numbers: list[float]) -> float:
    ordered = sorted(numbers)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def estimate_noise(values: Sequence[float], stderrs: Sequence[float | None] = ()) -> tuple[float, float]:
    """The noise scale and inflation of these values, which are relative to the first one."""
    count, mean_square = 0, 0.0
    for stderr in stderrs:
        if stderr is not None and 0 < stderr < math.inf:
            count += 1
            mean_square += (min(stderr, LARGEST_VALUE) * min(stderr, LARGEST_VALUE) - mean_square) / count
    n, known, recent = len(values), math.sqrt(mean_square), values[-65:]
    if n < 2:
        return known, 1.0
    least = (max(values) - min(values)) * (0.05 if n <= 8 else 0.02)
    first = median([abs(recent[i + 1] - recent[i]) for i in range(len(recent) - 1)]) / 0.9539
    sd, correlation = first, 0.0
    if n >= 4:
        bends = [abs(recent[i + 2] - 2 * recent[i + 1] + recent[i]) for i in range(len(recent) - 2)]
        sd = min(first, 1.15 * median(bends) / 1.6522)
    if n >= 10 and first > least:
        ratio = median([abs(recent[i + 2] - recent[i]) for i in range(len(recent) - 2)]) / 0.9539 / first
        correlation = min(max(ratio * ratio - 1, 0.0), 0.7) * (n - 2) / (n + 8)
    correlation = min(correlation + 0.4 * 10 / (n + 10), 0.8)
    return max(sd * (1 + 2 / n), least, known), math.sqrt((1 + correlation) / (1 - correlation))
