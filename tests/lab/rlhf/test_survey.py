"""The survey: where a policy would have stopped runs that were left to run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from evalstop_detectors import POLICIES
from evalstop_lab.cli import main
from evalstop_lab.rlhf import PRESETS, Eval
from evalstop_lab.rlhf.survey import judge

CONFIG = replace(PRESETS["overoptimizes"], steps=90, eval_every=10)


def a_log(golds: list[float]) -> list[Eval]:
    return [Eval(10 * index, 1.0, 0.1, gold, 0.1, 1.0, 1.0) for index, gold in enumerate(golds)]


def test_the_peak_and_the_stop_are_found_in_the_log() -> None:
    """Gold that rises and falls has its peak in the middle, and three declines stop it."""
    outcome = judge("overoptimizes", CONFIG, a_log([0, 1, 2, 3, 4, 3, 2, 1, 0, -1]), POLICIES["paper"], 1.0)
    assert (outcome.peak_step, outcome.stop_step) == (40, 70)
    assert outcome.peak_gold == pytest.approx(14 / 5)
    assert outcome.final_gold == pytest.approx(1.0)


def test_a_run_that_only_rises_is_left_alone() -> None:
    """Without a decline there is no stop."""
    assert judge("healthy", CONFIG, a_log([0, 1, 2, 3, 4, 5]), POLICIES["paper"], 1.0).stop_step is None


def test_the_survey_prints_an_outcome_for_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json there is one object a seed."""
    assert main(["survey", "--seeds", "2", "--first-seed", "7", "--hasten", "100", "--json"]) == 0
    assert [json.loads(line)["seed"] for line in capsys.readouterr().out.splitlines()] == [7, 8]
