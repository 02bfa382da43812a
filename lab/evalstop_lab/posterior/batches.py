"""Converts runs of the prior to training data: features, targets and weights of each eval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from evalstop_detectors.posterior.arithmetic import MANY
from evalstop_detectors.posterior.features import FEATURES, LIMIT, FeatureState, Given, advance
from numpy.typing import NDArray

from evalstop_lab.posterior.prior import DrawnRun, draw_run

RESOLUTION = 256.0  # features are rounded to multiples of 1/256


class Batch(NamedTuple):
    """Arrays of (evals, runs), features of (evals, runs, FEATURES); `weight` is 0 after a run's last eval."""

    features: NDArray[np.float32]
    turned_for_good: NDArray[np.float32]
    will_turn: NDArray[np.float32]
    to_come: NDArray[np.float32]
    weight: NDArray[np.float32]


def draw_batches(rng: np.random.Generator, runs: int, size: int, without: Sequence[str] = ()) -> list[Batch]:
    """Draw runs and group those of similar length, in random order."""
    drawn = [draw_run(rng, without=tuple(without)) for _ in range(runs)]
    drawn.sort(key=lambda run: len(run.scores))
    groups = [drawn[begin : begin + size] for begin in range(0, runs, size)]
    return [to_batch(groups[index]) for index in rng.permutation(len(groups))]


def to_batch(runs: Sequence[DrawnRun]) -> Batch:
    """Compute features and targets of runs; the last eval of a run has weight 0, because stopping there saves
    nothing."""
    longest, count = max(len(run.scores) for run in runs), len(runs)
    turned, will, to_come, weight = (np.zeros((longest, count), np.float32) for _ in range(4))
    for index, run in enumerate(runs):
        n = len(run.scores)
        turned[run.peak + 1 : n, index] = run.turned
        will[:n, index] = run.turned
        best = np.maximum.accumulate(run.truth)
        later = np.maximum.accumulate(run.truth[::-1])[::-1]
        to_come[:n, index] = np.maximum(later - best, 0)
        weight[: n - 1, index] = n**-0.6
    features = np.zeros((longest, count, FEATURES), np.float32)
    state = FeatureState()
    for at, inputs in enumerate(list_inputs(runs)):
        state, run_features = advance(MANY, state, inputs)
        for number, feature in enumerate(run_features):
            features[at, :, number] = feature
        unit = state.best - state.low + np.abs(state.first)
        to_come[at] /= np.where(unit > 0, unit, 1)
    features = np.floor(np.clip(features, -LIMIT, LIMIT) * RESOLUTION + 0.5) / RESOLUTION
    return Batch(features.astype(np.float32), turned, will, np.clip(to_come, 0, 4), weight)


def list_inputs(runs: Sequence[DrawnRun]) -> list[Given]:
    """The measurements of all runs, by eval; after its last eval a run keeps its last values, without their flags."""
    longest, count = max(len(run.scores) for run in runs), len(runs)
    columns = []
    for name in ("scores", "stderrs", "proxy", "kl", "progress"):
        values, is_given = np.zeros((longest, count)), np.zeros((longest, count))
        for index, run in enumerate(runs):
            measured = getattr(run, name)
            values[: len(measured), index] = np.nan_to_num(measured)
            values[len(measured) :, index] = values[len(measured) - 1, index]
            is_given[: len(measured), index] = np.isfinite(measured)
        columns += [values] if name == "scores" else [values, is_given]
    return [Given(*row) for row in zip(*columns, strict=True)]
