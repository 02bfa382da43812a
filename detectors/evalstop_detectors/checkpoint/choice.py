"""Which checkpoint is the best one, given all noisy scores of a run. `smoothing` describes how they are smoothed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from evalstop_detectors.checkpoint.smoothing import Fit, Floats, Places, count_fitted, count_settled, fit_scores

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


class Scores(Struct, frozen=True, eq=False):
    """The finite scores of a run by ascending step, as arrays, and its checkpoints.

    `stderrs`: NaN where unknown. `saved`: the steps of the checkpoints, ascending; `addresses`: where they are. `fits`,
    `choices`: the last one, by the counts of what it depends on: it stays valid when scores are added behind those.
    """

    steps: Places = np.empty(0, np.int64)
    values: Floats = np.empty(0)
    stderrs: Floats = np.empty(0)
    versions: Places = np.empty(0, np.int64)
    saved: Places = np.empty(0, np.int64)
    addresses: dict[int, str] = {}
    fits: dict[tuple[int, int], Fit] = {}
    choices: dict[tuple[int, int, int], BestCheckpoint] = {}

    def add_scores(self, scores: Iterable[Score]) -> Scores:
        """With these scores, in any order; those that are not finite are left out."""
        finite = [score for score in scores if math.isfinite(score.value)]
        if not finite:
            return self
        steps = np.concatenate([self.steps, np.array([score.step for score in finite], np.int64)])
        values = np.concatenate([self.values, [score.value for score in finite]])
        stderrs = [math.nan if score.stderr is None else score.stderr for score in finite]
        versions = np.array([score.eval_version for score in finite], np.int64)
        added = replace(
            self,
            steps=steps,
            values=values,
            stderrs=np.concatenate([self.stderrs, stderrs]),
            versions=np.concatenate([self.versions, versions]),
            fits=self.fits.copy(),
            choices=self.choices.copy(),
        )
        is_in_order = bool(np.all(np.diff(steps[max(len(self.steps) - 1, 0) :]) > 0))
        return added if is_in_order else added._take(np.argsort(steps))

    def add_checkpoints(self, addresses: Mapping[int, str]) -> Scores:
        """With the checkpoints of these steps, at these addresses."""
        saved = np.union1d(self.saved, np.array(list(addresses), np.int64))
        return replace(
            self,
            saved=saved,
            addresses={**self.addresses, **addresses},
            fits=self.fits.copy(),
            choices=self.choices.copy(),
        )

    def before(self, step: int) -> Scores:
        """Without the scores from this step on."""
        return self._take(np.flatnonzero(self.steps < step))

    def list_scores(self) -> list[Score]:
        """The scores by ascending step."""
        rows = zip(*(column.tolist() for column in (self.steps, self.values, self.stderrs, self.versions)), strict=True)
        return [Score(step, value, None if error != error else error, version) for step, value, error, version in rows]

    def _take(self, places: Places) -> Scores:
        columns = (self.steps[places], self.values[places], self.stderrs[places], self.versions[places])
        return Scores(*columns, self.saved, self.addresses)


def choose_best(scores: Scores) -> BestCheckpoint | None:
    """The checkpoint with the highest lower bound of the smoothed scores; the earliest of equals.

    Scores of steps without a checkpoint count as neighbors. Noiseless scores are not smoothed. The bound lies half a
    standard error below the smoothed score. In long runs the newest scores are held back until there are several (see
    `smoothing`); if only such scores have checkpoints, the one with the highest raw score is chosen.

    It is chosen among the scores of the newest version; while none of these has a checkpoint, the best one remains that
    of the previous version.

    One lucky score at step 2 is not the best checkpoint:

    >>> values = [1, 2, 9, 3, 2, 4, 5, 4, 6, 5, 7, 6, 5, 6, 4, 5, 3, 4, 2]
    >>> scores = Scores().add_scores(Score(step, float(value)) for step, value in enumerate(values))
    >>> scores = scores.add_checkpoints({step: f"file:///{step}" for step in range(19)})
    >>> find_highest(scores).step, choose_best(scores).step
    (2, 10)
    """
    if not len(scores.steps):
        return None
    places = np.searchsorted(scores.steps, scores.saved)
    places = places[scores.steps.take(places, mode="clip") == scores.saved]
    if not len(places):
        return None
    # Versions ascend with the steps, so that of the last place is the newest that has a checkpoint.
    version = int(scores.versions[places[-1]])
    first, end = np.searchsorted(scores.versions, [version, version + 1]).tolist()
    steps, values, places = scores.steps[first:end], scores.values[first:end], places[places >= first] - first
    count = count_settled(len(values))
    settled = places[places < count]
    if not len(settled):
        place = int(places[np.argmax(values[places])])
        return BestCheckpoint(int(steps[place]), float(values[place]), "smoothed_maximum")
    best = scores.choices.get(key := (first, count, len(settled)))
    if best is None:
        scores.choices.clear()
        best = scores.choices[key] = _choose_smoothed(scores, first, count, settled)
    return best


def _choose_smoothed(scores: Scores, first: int, count: int, settled: Places) -> BestCheckpoint:
    """The best of the checkpoints at the `settled` places of these scores."""
    steps, values = scores.steps[first : first + count], scores.values[first : first + count]
    fit = _find_fit(scores, first, first + count_fitted(values))
    means = fit.smooth(values)
    bounds = means[settled] - _CAUTION * fit.sd * fit.spread(settled, count)
    place = int(settled[np.argmax(bounds)])
    low, high = float(values.min()), float(values.max())
    return BestCheckpoint(
        int(steps[place]),
        float(values[place]),
        "smoothed_maximum",
        float(fit.frame.outward(means[place], low, high)),
        fit.frame.width_outward(fit.stderr(place, count)),
    )


def _find_fit(scores: Scores, first: int, end: int) -> Fit:
    fit = scores.fits.get((first, end))
    if fit is None:
        fit = fit_scores(scores.values[first:end], scores.stderrs[first:end])
        scores.fits.clear()
        scores.fits[first, end] = fit
    return fit


def find_highest(scores: Scores) -> BestCheckpoint | None:
    """The highest raw score of the newest version, the earliest of equals, with or without a checkpoint.

    The maximum of noisy scores is biased upwards: it is chosen in part for its noise.
    """
    if not len(scores.steps):
        return None
    first = int(np.searchsorted(scores.versions, scores.versions[-1]))
    place = first + int(np.argmax(scores.values[first:]))
    return BestCheckpoint(int(scores.steps[place]), float(scores.values[place]), "raw_maximum")
