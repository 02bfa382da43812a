"""The detection benchmark: its report, tables and contenders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evalstop_lab.benchmarks.detection import step_cost
from evalstop_lab.benchmarks.detection.command import main
from evalstop_lab.benchmarks.detection.contenders import list_contenders, list_detectors, run_oracle
from evalstop_lab.worlds import NoiseKind, draw_world

pytestmark = pytest.mark.slow

RECORDED = str(Path(__file__).parents[2] / "data" / "rlhf_runs_public.jsonl")


def test_quick_run_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report has the figures of each contender at each point, with the known recall of the paper's rule."""
    names = ["k_decline", "policy paper", "oracle"]
    arguments = ["--quick", "--jobs", "1", "--folder", str(tmp_path), "--recorded", RECORDED]
    assert main([*arguments, "--json", "--only", *names]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "report.json").read_text())
    rules = report["suites"]["reporting"]
    assert {"k_decline, 1 %", "k_decline, 5 %", "policy paper, as shipped", "oracle, 1 %"} <= set(rules)
    paper = rules["policy paper, as shipped"]
    assert report["suites"]["recorded"]["policy paper, as shipped"]["recall"]["hits"] == 47
    assert paper["recall"] == rules["k_decline k=3, as shipped"]["recall"]
    assert rules["oracle, 1 %"]["false_stops"]["hits"] == 0


def test_tables_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tables are printed without recorded runs, too."""
    arguments = ["--quick", "--jobs", "1", "--folder", str(tmp_path), "--recorded", str(tmp_path / "none")]
    assert main([*arguments, "--only", "k_decline"]) == 0
    printed = capsys.readouterr().out
    assert "second suite: 60 runs" in printed
    assert "k_decline k=5" in printed
    assert "smoothed_maximum" in printed


def test_step_costs_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every detector in the benchmark has its row."""
    assert step_cost.main(["--evals", "14", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    for name in list_detectors():
        assert name in printed


def test_every_contender_runs_on_a_world() -> None:
    """No contender fails on a run, or stops at its last eval."""
    world = draw_world("late", 5, length=40, noise=NoiseKind.MISSING, level=0.05)
    for item in list_contenders():
        assert all(step < world.steps[-1] for step in item.run(world).steps)


def test_oracles_error_is_as_stated() -> None:
    """It stops 1 to 5 % of the runs that stay at their peak, and more than 90 % of those that turn."""
    stopped = detected = 0
    for seed in range(400):
        world = draw_world("mild", seed, length=200, noise=NoiseKind.GAUSSIAN, level=0.1)
        without_fall = np.where(
            np.arange(200) > world.truth.peak, world.truth.eval_scores.max(), world.truth.eval_scores
        )
        flat = replace(world, eval_scores=world.eval_scores - world.truth.eval_scores + without_fall)
        stopped += run_oracle(flat).first_at(np.log(20)) is not None
        detected += run_oracle(world).first_at(np.log(20)) is not None
    assert 0.01 * 400 < stopped <= 0.05 * 400 + 3 * np.sqrt(0.05 * 400)
    assert detected > 0.9 * 400
