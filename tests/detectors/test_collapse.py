"""The collapse detector: sudden falls that stay, and what looks like them for a while."""

from __future__ import annotations

import numpy as np
import pytest
from evalstop_detectors.detectors.collapse import Collapse
from numpy.typing import NDArray

from tests.detectors.evidence import collect_evidence
from tests.detectors.strategies import eval_series

EVALS, AT = 120, 50


def draw_rise(rng: np.random.Generator, noise: float) -> NDArray[np.float64]:
    """A rise to 1 at eval `AT` that flattens out, with noise."""
    rise = 1 - np.exp(-np.arange(EVALS) / (AT / 2))
    scores: NDArray[np.float64] = rise / rise[AT - 1] + noise * rng.standard_normal(EVALS)
    return scores


def find_stop(scores: NDArray[np.float64]) -> tuple[int, int | None] | None:
    """The eval at which the detector stops the run, and the turn that it names."""
    evidence = collect_evidence(Collapse(), eval_series(scores.tolist()))
    return next(((index, item.turn_step) for index, item in enumerate(evidence) if item.value >= 1), None)


@pytest.mark.parametrize(("depth", "noise_after"), [(1.0, 0.02), (1.5, 0.08)], ids=["dead", "below the start"])
def test_sudden_fall_that_stays_is_stopped_at_the_sixth_eval(depth: float, noise_after: float) -> None:
    """A model that dies is certain within six evals, and its turn is the eval before."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        scores = draw_rise(rng, 0.08)
        scores[AT:] = 1 - depth + noise_after * rng.standard_normal(EVALS - AT)
        assert find_stop(scores) == (AT + 5, AT - 1)


def test_fall_in_two_evals_is_sudden() -> None:
    """One eval may lie in between."""
    scores = np.concatenate([np.linspace(0, 1, 40), [0.55], np.zeros(10)])
    stop = find_stop(scores)
    assert stop is not None
    assert stop[1] == 39


@pytest.mark.parametrize(
    "scores",
    [
        np.concatenate([np.linspace(0, 1, 40), np.zeros(5), np.ones(20)]),
        np.concatenate([np.linspace(0, 1, 40), np.linspace(0, 1, 12), np.ones(20)]),
        np.concatenate([np.linspace(0, 1, 40), np.linspace(1, 0, 40)]),
        np.concatenate([np.linspace(0, 1, 40), np.full(30, 0.7)]),
        np.concatenate([np.ones(5), np.zeros(40)]),
        np.zeros(60),
    ],
    ids=["five evals", "it heals", "a slow decline", "a shallow step", "no rise", "constant"],
)
def test_what_is_no_collapse_is_left_alone(scores: NDArray[np.float64]) -> None:
    assert find_stop(scores) is None


def test_noise_alone_stops_no_run() -> None:
    """Of 100 plateaus with heavy-tailed noise, none is stopped."""
    rng = np.random.default_rng(1)
    assert all(find_stop(draw_rise(rng, 0) + 0.05 * rng.standard_t(3, EVALS)) is None for _ in range(100))
