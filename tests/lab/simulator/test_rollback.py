"""Going on from the best checkpoint: what it costs, and what it buys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.simulator.drawing import draw
from evalstop_lab.simulator.engine import Cluster
from evalstop_lab.simulator.rollback import rolled_back
from evalstop_lab.simulator.stopping import RULES, Stops, decide

from tests.lab.simulator.conftest import SMALL


def test_a_rollback_runs_again_what_came_after_the_best() -> None:
    """Taken back from eval 7 to eval 4 of 10, a job runs three tenths of its plan twice, and a restore."""
    workload, _ = draw(replace(SMALL, jobs=2), 1)
    stops = Stops(np.array([7, 0]), np.array([4, 0]))
    ends = rolled_back(workload, stops, Cluster(restore_hours=0.1))
    assert ends == pytest.approx([1.3 * workload.jobs[0].hours + 0.1, workload.jobs[1].hours])


def test_a_flag_at_the_end_takes_nobody_back() -> None:
    """A job that is flagged with its last eval is over."""
    workload, _ = draw(SMALL, 1)
    stops = decide(RULES["paper"], workload)
    late = stops.after == SMALL.evals
    assert late.any()
    assert np.array_equal(rolled_back(workload, stops, Cluster())[late], workload.hours[late])


@pytest.mark.parametrize("gain", ["0", "0.2"])
def test_going_on_costs_what_stopping_saves(gain: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A stop brings GPU-hours back and a rollback takes more; it buys as much the eval score as it is said to, and no
    other."""
    words = ["cluster", "rollback", "--policies", "paper", "--seeds", "2", "--cluster-jobs", "150", "--jobs", "1"]
    assert main([*words, "--frontier-gain", gain, "--json", "--plots", str(tmp_path)]) == 0
    assert (tmp_path / "rollback.png").stat().st_size > 10_000
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    stop, back = report["outcomes"]
    assert stop["gpu_hours"]["value"] < 0 < back["gpu_hours"]["value"]
    added = back["eval_kept"]["value"] - stop["eval_kept"]["value"]
    assert added == pytest.approx(0.0) if gain == "0" else 0.1 < added <= 0.2
