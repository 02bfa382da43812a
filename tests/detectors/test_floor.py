"""The floor detector: runs that fall below their start, and runs that do not."""

from __future__ import annotations

import numpy as np
import pytest
from evalstop_detectors.detectors.floor import Floor

from tests.detectors.evidence import collect_evidence, collect_values
from tests.detectors.strategies import eval_series


def test_run_that_falls_from_the_start_is_stopped() -> None:
    """A run that falls from its first eval reaches the threshold by the 13th eval, although it never rose."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        scores = -0.1 * np.arange(20) + 0.05 * rng.standard_normal(20)
        values = collect_values(Floor(), eval_series(scores.tolist()))
        alarm_indices = [index for index, value in enumerate(values) if value >= 1]
        assert alarm_indices
        assert alarm_indices[0] <= 12


def test_flat_and_rising_runs_are_not_stopped() -> None:
    """Of 200 flat or rising runs of 100 evals, at most 4 reach the threshold."""
    rng = np.random.default_rng(1)
    stopped = 0
    for index in range(200):
        scores = (index % 2) * np.linspace(0, 3, 100) + rng.standard_normal(100)
        stopped += any(value >= 1 for value in collect_values(Floor(), eval_series(scores.tolist())))
    assert stopped <= 4


def test_decline_above_the_start_is_ignored() -> None:
    """A decline that stays above the first evals gives a value of 0; other detectors cover it."""
    assert all(item.value == 0 for item in collect_evidence(Floor(), eval_series([*range(10), *range(10, 2, -1)])))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_one_eval_above_the_start_resets_the_value(k: int) -> None:
    """The value is above 0 only if all of the last k evals are below the start."""
    evidence = collect_evidence(Floor(k=k), eval_series([0, 0.1, -0.1, 0, 0.1, 0, -5, -5, -5, -5, -5, -5, 1]))
    assert evidence[-2].value > 1
    assert evidence[-2].turn_step == 0
    assert evidence[-1].value == 0


def test_note_explains_a_missing_value() -> None:
    """The note distinguishes too few evals from evals that never changed."""
    notes = [item.note for item in collect_evidence(Floor(), eval_series([1.0] * 7))]
    assert notes[0] == "needs 5 more evals"
    assert notes[-1] == "the eval score has not moved yet"
