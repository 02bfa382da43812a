"""Which checkpoint is the best one, given noisy scores.

A rule chooses from a whole run. `BestSoFar` follows a run, and answers after every score at a cost that does not grow
with the run; its answer is that of `SmoothedMaximum`. It depends on the order of the scores and on which checkpoints
exist, not on when it was asked for. `smoothing` describes how scores are smoothed.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import ClassVar

from msgspec import Struct

from evalstop_detectors.checkpoint.smoothing import Curve, count_fitted, count_settled

_CAUTION = 0.5


class Score(Struct, frozen=True):
    """An eval score of the model at `step`, higher is better; `stderr` in its unit, None when unknown.

    `eval_version`: scores of different versions were measured differently, and cannot be compared.
    """

    step: int
    value: float
    stderr: float | None = None
    eval_version: int = 0


def select_version(scores: Sequence[Score], step: int | None = None) -> list[Score]:
    """The scores (by ascending step) comparable with the last one up to this step; None: with the last of all."""
    versions = [score.eval_version for score in scores if step is None or score.step <= step]
    return [score for score in scores if not versions or score.eval_version == versions[-1]]


class BestCheckpoint(Struct, frozen=True):
    """The step of the chosen checkpoint, the raw score measured there, and the rule that chose it.

    `smoothed` is the rule's estimate of the score, with its standard error, both in the score's unit; None for
    a rule that uses raw scores. The error covers only the noise; smoothing also flattens peaks.
    """

    step: int
    score: float
    chosen_by: str
    smoothed: float | None = None
    smoothed_stderr: float | None = None


class BestSoFar:
    """The best checkpoint of a run in progress, by `SmoothedMaximum`, and its highest score.

    Both are chosen among the scores of the newest version; while none of these has a checkpoint, the best one remains
    that of the previous version. A mutable in-memory cache, rebuilt from scores by ascending step and from the
    checkpoints, interleaved in any order. A late score requires rebuilding it.
    """

    def __init__(self) -> None:
        self._followers = [_HighestBound()]  # one for each version, newest last
        self._eval_version = 0
        self._saved: list[int] = []
        self._raw: Score | None = None

    def add(self, score: Score) -> None:
        """Add a score at a step after all previous ones; raises ValueError if it is late."""
        if score.eval_version != self._eval_version:
            self._followers.append(_HighestBound())
            for step in self._saved:
                self._followers[-1].saved(step)
            self._eval_version, self._raw = score.eval_version, None
        self._followers[-1].add(score)
        if math.isfinite(score.value) and (self._raw is None or score.value > self._raw.value):
            self._raw = score

    def saved(self, step: int) -> None:
        """Add the checkpoint of this step, before or after its score."""
        self._saved.append(step)
        for follower in self._followers:
            follower.saved(step)

    def best(self) -> BestCheckpoint | None:
        """The best of the existing checkpoints."""
        chosen = (follower.best() for follower in reversed(self._followers))
        return next((best for best in chosen if best is not None), None)

    def raw(self) -> BestCheckpoint | None:
        """The highest score, the earliest of equals, with or without a checkpoint."""
        return None if self._raw is None else BestCheckpoint(self._raw.step, self._raw.value, RawMaximum.name)


class RawMaximum:
    """The highest raw score; the earliest of equals, which is nearest to the initial policy.

    The maximum of noisy scores is biased upwards: it is chosen in part for its noise.
    """

    name: ClassVar[str] = "raw_maximum"

    def choose(self, scores: Sequence[Score], existing: Collection[int]) -> BestCheckpoint | None:
        """The best of the finite `scores` (by ascending step) whose step is in `existing`; None if there is none."""
        candidates = [score for score in scores if score.step in existing and math.isfinite(score.value)]
        if not candidates:
            return None
        best = max(candidates, key=lambda score: (score.value, -score.step))
        return BestCheckpoint(best.step, best.value, self.name)


class SmoothedMaximum:
    """The highest lower bound of the smoothed scores; the earliest of equals.

    Scores of steps without a checkpoint count as neighbors. Noiseless scores are not smoothed. The bound lies half a
    standard error below the smoothed score. In long runs the newest scores are held back until there are
    several (see `smoothing`); if only such scores have checkpoints, the one with the highest raw score is chosen.

    One lucky score at step 2 is not the best checkpoint:

    >>> values = [1, 2, 9, 3, 2, 4, 5, 4, 6, 5, 7, 6, 5, 6, 4, 5, 3, 4, 2]
    >>> scores, existing = [Score(step, float(value)) for step, value in enumerate(values)], range(19)
    >>> RawMaximum().choose(scores, existing).step, SmoothedMaximum().choose(scores, existing).step
    (2, 10)
    """

    name: ClassVar[str] = "smoothed_maximum"

    def choose(self, scores: Sequence[Score], existing: Collection[int]) -> BestCheckpoint | None:
        follower = _HighestBound()
        for step in existing:
            follower.saved(step)
        for score in scores:
            follower.add(score)
        return follower.best()


Chooser = RawMaximum | SmoothedMaximum
"""A rule that picks one of the scored steps."""


class _Scores:
    """The finite scores of a run and which of them have a checkpoint. Mutable."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values = array("d")
        self.stderrs = array("d")
        self.exists = bytearray()
        self.any_exists = False
        self._unscored: set[int] = set()
        self._last: int | None = None

    def add(self, score: Score) -> int | None:
        """Add a score; returns its index, None if it is not finite."""
        if self._last is not None and score.step <= self._last:
            raise ValueError(f"the score of step {score.step} is late; the last score was at step {self._last}")
        self._last = score.step
        if not math.isfinite(score.value):
            return None
        self.steps.append(score.step)
        self.values.append(score.value)
        self.stderrs.append(math.nan if score.stderr is None else score.stderr)
        self.exists.append(score.step in self._unscored)
        self.any_exists |= score.step in self._unscored
        self._unscored.discard(score.step)
        return len(self.steps) - 1

    def saved(self, step: int) -> int | None:
        """Add a checkpoint; returns the index of its score if that was added before."""
        index = bisect_left(self.steps, step)
        if index < len(self.steps) and self.steps[index] == step:
            self.exists[index] = self.any_exists = True
            return index
        self._unscored.add(step)
        return None


class _HighestBound:
    """Follows the highest lower bound of the smoothed scores. Mutable.

    The first `_final` means do not change until the next fit, and neither does the best of them, `_best_final`.
    """

    def __init__(self) -> None:
        self._scores = _Scores()
        self._half_range = 0.0
        self._grew_at: list[int] = []
        self._curve: Curve | None = None
        self._fitted_on = 0
        self._final = 0
        self._best_final: tuple[float, int] | None = None
        self._low, self._high = math.inf, -math.inf
        self._settled = 0
        self._answer: BestCheckpoint | None = None
        self._stale = False

    def add(self, score: Score) -> None:
        index = self._scores.add(score)
        if index is None:
            return
        # Halved, because the difference of the largest floats overflows.
        half_range = abs(score.value / 2 - self._scores.values[0] / 2)
        if half_range > self._half_range:
            if math.frexp(half_range)[1] > math.frexp(self._half_range)[1] or not self._half_range:
                self._grew_at.append(index + 1)
            self._half_range = half_range
        if self._is_waiting() or count_settled(index + 1) == index + 1:
            self._stale = True

    def saved(self, step: int) -> None:
        index = self._scores.saved(step)
        if index is None:
            return
        if self._curve is not None and index < self._final:
            self._consider(self._curve, index, index + 1)
        if self._is_waiting() or index < count_settled(len(self._scores.steps)):
            self._stale = True

    def best(self) -> BestCheckpoint | None:
        if self._stale and self._scores.any_exists:  # a run without checkpoints needs no fit
            self._answer, self._stale = self._chosen(), False
        return self._answer

    def _is_waiting(self) -> bool:
        """Whether the last choice, if any, was made only because no score counted yet."""
        return self._answer is None or self._answer.smoothed is None

    def _chosen(self) -> BestCheckpoint | None:
        scores, count = self._scores, count_settled(len(self._scores.steps))
        curve = self._settle(count)
        best = self._highest(curve, self._final, count, self._best_final)
        if best is None:
            return self._raw_from(count)
        index, frame = -best[1], curve.fit.frame
        return BestCheckpoint(
            scores.steps[index],
            scores.values[index],
            SmoothedMaximum.name,
            frame.outward(curve.mean[index], self._low, self._high),
            frame.width_outward(curve.stderr(index)),
        )

    def _settle(self, count: int) -> Curve:
        """The curve of the first `count` scores, with the final part updated."""
        values, curve = self._scores.values, self._curve
        on = count_fitted(count, self._grew_at)
        if curve is None or on != self._fitted_on:
            curve = self._curve = Curve(values[:on], self._scores.stderrs[:on])
            self._fitted_on, self._final, self._best_final = on, 0, None
        if count > len(curve.mean):
            begin = curve.grow(values, count)
            if begin > self._final:
                self._consider(curve, self._final, begin)
                self._final = begin
        if count > self._settled:
            fresh = values[self._settled : count]
            self._low, self._high = min(min(fresh), self._low), max(max(fresh), self._high)
            self._settled = count
        return curve

    def _consider(self, curve: Curve, begin: int, end: int) -> None:
        self._best_final = self._highest(curve, begin, end, self._best_final)

    def _highest(self, curve: Curve, begin: int, end: int, best: tuple[float, int] | None) -> tuple[float, int] | None:
        """The better of `best` and of those in the range that have a checkpoint: bound, and the negative index."""
        candidates = [
            (bound, -index)
            for index, bound in enumerate(curve.bounds(begin, end, _CAUTION), begin)
            if self._scores.exists[index]
        ]
        return max(candidates if best is None else [best, *candidates], default=None)

    def _raw_from(self, begin: int) -> BestCheckpoint | None:
        scores = self._scores
        candidates = [
            (scores.values[index], -index) for index in range(begin, len(scores.steps)) if scores.exists[index]
        ]
        if not candidates:
            return None
        value, index = max(candidates)
        return BestCheckpoint(scores.steps[-index], value, SmoothedMaximum.name)
