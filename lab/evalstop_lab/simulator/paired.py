"""Compares two rules on the same seeds: the mean change, its interval, and its significance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from evalstop_lab.worlds.scoring import Figure, estimate_mean


@dataclass(frozen=True)
class Change:
    """`change`: the mean of the seeds' relative changes. `p_value`: of the two-sided Wilcoxon signed-rank test of no
    change."""

    change: Figure
    p_value: float


def compare_paired(before: Sequence[float], after: Sequence[float]) -> Change:
    old, new = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    p_value = float(stats.wilcoxon(new - old).pvalue) if np.any(new != old) else 1.0
    return Change(estimate_mean(new / old - 1), p_value)


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for multiple comparisons by Holm's method."""
    order, count = np.argsort(p_values), len(p_values)
    corrected = np.empty(count)
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(count, 0, -1) * np.asarray(p_values)[order]))
    return corrected.tolist()
