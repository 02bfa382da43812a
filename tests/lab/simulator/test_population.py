"""Sweeps: a population keeps its members near the peak and lifts nobody above the frontier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.simulator.population import Sweep, select, train
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.simulator.conftest import patiently


@patiently
@given(seed=st.integers(0, 10_000), population=st.booleans(), curvature=st.sampled_from([0.0, 0.5, 2.0]))
def test_nobody_is_above_the_frontier(seed: int, population: bool, curvature: float) -> None:
    """True the eval score never exceeds the top of the frontier, however members are cloned."""
    assert train(Sweep(curvature=curvature), seed, population).eval_scores.max() <= 1 + 1e-9


def test_both_begin_alike() -> None:
    """Up to the first selection, members and noise of a seed are the same with and without cloning."""
    alone, together = (train(Sweep(), 3, population) for population in (False, True))
    assert np.array_equal(alone.eval_scores[:, 0], together.eval_scores[:, 0])
    assert np.array_equal(alone.seen[:, 0], together.seen[:, 0])


@patiently
@given(seen=st.lists(st.floats(-1, 1), min_size=5, max_size=30, unique=True), seed=st.integers(0, 2**32 - 1))
def test_the_worst_fifth_stands_where_the_best_does(seen: list[float], seed: int) -> None:
    """A selection moves the worst fifth to places of the best, changes their speeds by a fifth, and nobody else's."""
    count, order = len(seen) // 5, np.argsort(seen)
    places, speeds = np.arange(float(len(seen))), np.ones(len(seen))
    select(np.array(seen), places, speeds, np.random.default_rng(seed))
    assert set(places[order[:count]]) <= set(order[-count:].astype(float))
    assert set(speeds[order[:count]]) <= {0.8, 1.2}
    assert np.array_equal(places[order[count:]], order[count:])
    assert (speeds[order[count:]] == 1).all()


def test_stopping_keeps_the_eval_score(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`cluster population` shows that stops bring GPU-hours back without losing the best checkpoint of the sweep."""
    words = ["cluster", "population", "--policies", "paper", "--seeds", "6", "--jobs", "1", "--json"]
    assert main([*words, "--plots", str(tmp_path)]) == 0
    assert (tmp_path / "population.png").stat().st_size > 10_000
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    ways = {outcome["way"]: outcome for outcome in report["outcomes"]}
    assert ways["population"]["gpu_hours"]["value"] == 1.0
    assert ways["stopped by paper"]["gpu_hours"]["value"] < 0.9
    assert ways["stopped by paper"]["kept"]["value"] > ways["left alone"]["kept"]["value"] - 0.02


@pytest.mark.parametrize(("option", "words"), [("--members", "at least 5"), ("--cluster-jobs", "give --members")])
def test_a_sweep_that_is_none_is_refused(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Too few members for a fifth, or jobs where members are meant, are mistakes."""
    assert main(["cluster", "population", option, "3"]) == 2
    assert words in capsys.readouterr().err
