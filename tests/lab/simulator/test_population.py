"""Sweeps: a population keeps its members near the peak, and no member exceeds the frontier."""

from __future__ import annotations

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.simulator.population import Sweep, replace_worst, train_members
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.simulator.conftest import property_settings, read_report


@property_settings
@given(seed=st.integers(0, 10_000), population=st.booleans())
def test_no_member_is_above_the_frontier(seed: int, population: bool) -> None:
    """The true eval score never exceeds the maximum of the frontier, however members are cloned."""
    assert train_members(Sweep(), seed, population).eval_scores.max() <= 1 + 1e-9


def test_both_start_with_the_same_members() -> None:
    """Up to the first selection, members and noise of a seed are the same with and without cloning."""
    independent, population = (train_members(Sweep(), 3, population=value) for value in (False, True))
    assert np.array_equal(independent.eval_scores[:, 0], population.eval_scores[:, 0])
    assert np.array_equal(independent.measured[:, 0], population.measured[:, 0])


@property_settings
@given(scores=st.lists(st.floats(-1, 1), min_size=5, max_size=30, unique=True), seed=st.integers(0, 2**32 - 1))
def test_worst_fifth_copies_the_best(scores: list[float], seed: int) -> None:
    """A selection moves the worst fifth to places of the best fifth, changes their speeds by 20 %, and no others."""
    count, order = len(scores) // 5, np.argsort(scores)
    places, speeds = np.arange(float(len(scores))), np.ones(len(scores))
    replace_worst(np.array(scores), places, speeds, np.random.default_rng(seed))
    assert set(places[order[:count]]) <= set(order[-count:].astype(float))
    assert set(speeds[order[:count]]) <= {0.8, 1.2}
    assert np.array_equal(places[order[count:]], order[count:])
    assert (speeds[order[count:]] == 1).all()


def test_stopping_keeps_the_eval_score(capsys: pytest.CaptureFixture[str]) -> None:
    """In `cluster population` stops save GPU-hours without losing the best checkpoint of the sweep."""
    report = read_report(capsys, "population", "--policies", "paper", "--seeds", "6")
    outcomes = {outcome["strategy"]: outcome for outcome in report["outcomes"]}
    assert outcomes["population"]["gpu_hours"]["value"] == 1.0
    assert outcomes["stopped by paper"]["gpu_hours"]["value"] < 0.9
    assert outcomes["stopped by paper"]["kept"]["value"] > outcomes["no stops"]["kept"]["value"] - 0.02


@pytest.mark.parametrize(("option", "message"), [("--members", "at least 5"), ("--cluster-jobs", "give --members")])
def test_unusable_options_are_refused(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer than five members, or a number of jobs instead of members, is an error."""
    assert main(["cluster", "population", option, "3"]) == 2
    assert message in capsys.readouterr().err
