"""Which checkpoint is the best one, given noisy scores."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import ClassVar, Protocol

from msgspec import Struct


class Score(Struct, frozen=True):
    """A gold score of the model at `step`, higher is better; `stderr` in its unit, None when unknown."""

    step: int
    value: float
    stderr: float | None = None


class Best(Struct, frozen=True):
    """The step of the chosen checkpoint, the raw score measured there, and the rule that chose it."""

    step: int
    score: float
    chosen_by: str


class Chooser(Protocol):
    """A rule that picks one of the scored steps."""

    name: ClassVar[str]

    def choose(self, scores: Sequence[Score], existing: Collection[int]) -> Best | None:
        """The best of the finite `scores` (by ascending step) whose step is in `existing`; None when there is none."""


class RawMaximum:
    """The highest score as measured; of equals the earliest, which is nearest to the initial policy.

    The maximum of noisy scores is chosen in part for its noise: what it promises is more than what one gets.
    """

    name: ClassVar[str] = "raw_maximum"

    def choose(self, scores: Sequence[Score], existing: Collection[int]) -> Best | None:
        candidates = [score for score in scores if score.step in existing and math.isfinite(score.value)]
        if not candidates:
            return None
        best = max(candidates, key=lambda score: (score.value, -score.step))
        return Best(best.step, best.value, self.name)
