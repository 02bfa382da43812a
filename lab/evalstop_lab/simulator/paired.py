"""Compares two rules on the same seeds: the mean change, its interval, and its significance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from evalstop_lab.simulator.jobs import Floats
from evalstop_lab.worlds.scoring import Figure, estimate_mean


@dataclass(frozen=True)
class Change:
    """`change`: the mean of the seeds' relative changes. `p_value`: of the two-sided Wilcoxon signed-rank test of no
    change."""

    change: Figure
    p_value: float


def compare_paired(before: Sequence[float], after: Sequence[float]) -> Change:
    """Compare seed by seed, before and after."""
    old, new = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    return Change(estimate_mean(new / old - 1), _compute_p_value(new - old))


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for multiple comparisons by Holm's method."""
    order = np.argsort(p_values)
    corrected = np.empty(len(p_values))
    highest = 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = highest
    return [float(value) for value in corrected]


def _compute_p_value(differences: Floats) -> float:
    return float(stats.wilcoxon(differences).pvalue) if np.any(differences) else 1.0
