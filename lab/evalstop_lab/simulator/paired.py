"""Compares two rules on the same seeds: the mean change, its interval, and its significance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from evalstop_lab.simulator.jobs import Floats
from evalstop_lab.worlds.scoring import Figure, mean

RESAMPLES = 2000


@dataclass(frozen=True)
class Change:
    """`change` is the mean over seeds of each seed's relative change; `p_value` is Wilcoxon's signed-rank test of no
    change, two-sided."""

    change: Figure
    p_value: float


def relative_change(before: Sequence[float], after: Sequence[float], chance_seed: int = 0) -> Change:
    """Compare seed by seed, before and after."""
    old, new = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    return Change(interval(new / old - 1, chance_seed), _wilcoxon(new - old))


def interval(numbers: Sequence[float] | Floats, chance_seed: int = 0) -> Figure:
    """The mean of one number a seed, with a percentile interval of the bootstrap over seeds."""
    return mean(numbers, chance_seed, resamples=RESAMPLES)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for multiple comparisons by Holm's method."""
    order = np.argsort(p_values)
    corrected = np.empty(len(p_values))
    highest = 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = highest
    return [float(value) for value in corrected]


def _wilcoxon(differences: Floats) -> float:
    return float(stats.wilcoxon(differences).pvalue) if np.any(differences) else 1.0
