"""The floor: runs that sink below where they started, and runs that do not."""

from __future__ import annotations

import numpy as np
import pytest
from evalstop_detectors import Evidence
from evalstop_detectors.detectors.floor import Floor

from tests.detectors.strategies import eval_series


def fold(scores: list[float], detector: Floor | None = None) -> list[Evidence]:
    detector = detector or Floor()
    state, evidence = detector.start(), []
    for observation in eval_series(scores):
        state, item = detector.step(state, observation)
        evidence.append(item)
    return evidence


def test_a_run_that_falls_from_its_first_eval_is_stopped() -> None:
    """A collapse that never rose reaches the threshold within ten evals, though there was no best to fall from."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        scores = -0.1 * np.arange(20) + 0.05 * rng.standard_normal(20)
        alarmed = [index for index, item in enumerate(fold(scores.tolist())) if item.value >= 1]
        assert alarmed
        assert alarmed[0] <= 12


def test_a_flat_or_rising_run_is_left_alone() -> None:
    """Of 200 runs of 100 evals that start flat or rise, hardly any reaches the threshold."""
    rng = np.random.default_rng(1)
    stopped = 0
    for index in range(200):
        scores = (index % 2) * np.linspace(0, 3, 100) + rng.standard_normal(100)
        stopped += any(item.value >= 1 for item in fold(scores.tolist()))
    assert stopped <= 4


def test_a_fall_that_keeps_above_the_start_is_none() -> None:
    """What is lost of a gain is another detector's business."""
    assert all(item.value == 0 for item in fold([*range(10), *range(10, 2, -1)]))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_one_eval_above_the_start_takes_all_back(k: int) -> None:
    """All of the last k evals must lie below the start."""
    evidence = fold([0, 0.1, -0.1, 0, 0.1, 0, -5, -5, -5, -5, -5, -5, 1], Floor(k=k))
    assert evidence[-2].value > 1
    assert evidence[-2].turn_step == 0
    assert evidence[-1].value == 0


def test_the_note_says_what_is_missing() -> None:
    """Too few evals and evals that never moved are told apart."""
    notes = [item.note for item in fold([1.0] * 7)]
    assert notes[0] == "needs 5 more evals"
    assert notes[-1] == "the eval score has not moved yet"
