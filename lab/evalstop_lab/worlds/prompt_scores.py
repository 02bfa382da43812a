"""The scores of a run's checkpoints on the same prompts, with which recorded runs answer requests to evaluate now."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from evalstop_lab.worlds.truth import Floats


@dataclass(frozen=True, eq=False)
class PromptScores:
    """The mean score by eval and prompt, [evals, prompts], and the standard deviation of an eval's single texts.

    Each of the `texts` of an eval has its own score; every prompt has as many of them.
    """

    means: Floats
    sds: Floats
    texts: int

    def compare(self, eval_index: int, other: int) -> tuple[float, float]:
        """The mean score of an eval less that of another, and the standard error by the differences of single texts."""
        difference = float(self.means[eval_index].mean() - self.means[other].mean())
        variance = self.sds[eval_index] ** 2 + self.sds[other] ** 2 - 2 * self._compute_covariance(eval_index, other)
        return difference, math.sqrt(max(float(variance), 0.0) / self.texts)

    def correlate(self, eval_index: int, other: int) -> float:
        """The correlation of the errors of two evals on the same prompts; NaN where all scores are alike."""
        sds = float(self.sds[eval_index] * self.sds[other])
        return self._compute_covariance(eval_index, other) / sds if sds else math.nan

    def _compute_covariance(self, eval_index: int, other: int) -> float:
        # Texts of one prompt are independent: their scores have in common only what the prompt's means have.
        return float(np.cov(self.means[eval_index], self.means[other])[0, 1])
