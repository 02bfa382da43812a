"""Rules of other libraries stop where their documentation says, and rules from files are loaded or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.stopbench.libraries import LIBRARIES
from evalstop_lab.stopbench.rules import BUILT_IN, load_rule
from ruptures.detection import KernelCPD, Pelt

RISING_THEN_FALLING = (0.0, 1.0, 2.0, 3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4)
UP_AND_DOWN_BELOW_BEST = (0.0, 1.0, 3.0, 2.0, 2.5, 2.0, 2.5, 2.0, 2.5)


def find_stop_step(name: str, scores: tuple[float, ...]) -> int | None:
    rule = load_rule(name)(None)
    return next((step for step, score in enumerate(scores) if rule.stop(step, score, None, None, None)), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "falling", "below_best"),
    [
        ("transformers EarlyStoppingCallback", 6, 5),
        ("Optuna PatientPruner", 7, 6),
        ("EvalStop paper", 6, None),
        ("z-score of 20", None, None),
    ],
)
def test_patience_counts_evals_below_the_best_and_declines_count_in_a_row(
    name: str, falling: int | None, below_best: int | None
) -> None:
    """Callbacks with a patience stop after three evals without a new best; the paper's rule needs three declines."""
    assert find_stop_step(name, RISING_THEN_FALLING) == falling
    assert find_stop_step(name, UP_AND_DOWN_BELOW_BEST) == below_best


@pytest.mark.slow
def test_ray_stops_on_a_plateau() -> None:
    """Four results with a standard deviation below 0.01 stop the run."""
    assert find_stop_step("Ray TrialPlateauStopper", (0.0, 1.0, 2.0, 2.0, 2.0, 2.0)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_detectors_of_other_libraries_stop_runs_that_fall(name: str) -> None:
    """They stop a run that falls again and again after a plateau, and none that stays on it."""
    plateau = np.repeat([0.0, 10.0], [20, 580]) + 0.5 * np.random.default_rng(1).standard_normal(600)
    falling = plateau - 10 * (np.maximum(np.arange(600) - 10, 0) // 150)
    assert find_stop_step(name, tuple(plateau)) is None
    stopped = find_stop_step(name, tuple(falling))
    assert stopped is not None
    assert stopped >= 160


@pytest.mark.slow
def test_segments_are_those_of_ruptures_pelt() -> None:
    """The segmentation by `KernelCPD` that stands for `Pelt` is the one that `Pelt` finds."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        values = np.repeat(3 * rng.standard_normal(4), 15) + rng.standard_normal(60)
        borders = Pelt(model="l2", min_size=5, jump=1).fit(values).predict(pen=8.0)
        assert KernelCPD(kernel="linear", min_size=5).fit(values).predict(pen=8.0) == borders


@pytest.mark.parametrize("name", BUILT_IN)
def test_missing_eval_stops_no_run(name: str) -> None:
    """A rule does not stop at an eval without a score."""
    assert not load_rule(name)(100.0).stop(0, None, None, 1.0, None)


def test_unusable_rule_file_is_refused(tmp_path: Path) -> None:
    """An unusable rule is refused with its problem before any run is judged."""
    path = tmp_path / "rule.py"
    path.write_text("class Other:\n    pass\n")
    with pytest.raises(UnusableArguments, match="no class 'Mine' with a method `stop`"):
        load_rule(f"{path}:Mine")
    with pytest.raises(UnusableArguments, match=r"give path\.py:Name"):
        load_rule("nowhere.py:Mine")
    path.write_text("import nothing_of_this_name\n")
    with pytest.raises(UnusableArguments, match="cannot be imported"):
        load_rule(f"{path}:Mine2")
