"""Sweeps: a population keeps its members near the peak and lifts nobody above the frontier."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.simulator.population import Sweep, live
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.simulator.conftest import patiently


@patiently
@given(seed=st.integers(0, 10_000), population=st.booleans(), curvature=st.sampled_from([0.0, 0.5, 2.0]))
def test_nobody_is_above_the_frontier(seed: int, population: bool, curvature: float) -> None:
    """True gold never exceeds the top of the frontier, however members are cloned."""
    assert live(Sweep(curvature=curvature), seed, population).gold.max() <= 1 + 1e-9


def test_both_begin_alike() -> None:
    """Up to the first selection, members and noise of a seed are the same with and without cloning."""
    alone, together = (live(Sweep(), 3, population) for population in (False, True))
    assert np.array_equal(alone.gold[:, 0], together.gold[:, 0])
    assert np.array_equal(alone.seen[:, 0], together.seen[:, 0])


def test_clones_stand_where_their_models_do() -> None:
    """After a selection without noise as many places are shared as members were in the worst fifth."""
    sweep = replace(Sweep(), noise_sd=0.0, evals=2, members=20)
    alone, together = (live(sweep, 5, population) for population in (False, True))
    moved = alone.gold[:, 1] != together.gold[:, 1]
    assert moved.sum() == 4
    assert alone.gold[moved, 0].max() <= np.sort(alone.gold[:, 0])[3]


def test_stopping_keeps_the_gold(capsys: pytest.CaptureFixture[str]) -> None:
    """`cluster population` shows that stops bring GPU-hours back without losing the best checkpoint of the sweep."""
    words = ["cluster", "population", "--policies", "paper", "--seeds", "6", "--jobs", "1", "--json"]
    assert main(words) == 0
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
