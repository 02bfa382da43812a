"""Rollbacks to the best checkpoint: their cost and their gain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.engine import Cluster
from evalstop_lab.simulator.rollback import roll_back
from evalstop_lab.simulator.stopping import RULES, Stops, decide_stops

from tests.lab.simulator.conftest import SMALL, read_report


def test_rollback_repeats_the_evals_after_the_best() -> None:
    """A job that is rolled back from eval 7 to eval 4 of 10 runs 30 % of its plan twice, and a restore."""
    workload, _ = draw_jobs(replace(SMALL, jobs=2), 1)
    stops = Stops(np.array([7, 0]), np.array([4, 0]))
    ends = roll_back(workload, stops, Cluster(restore_hours=0.1))
    assert ends == pytest.approx([1.3 * workload.jobs[0].hours + 0.1, workload.jobs[1].hours])


def test_flag_at_the_last_eval_rolls_no_job_back() -> None:
    """A job that is flagged at its last eval ends at its planned end."""
    workload, _ = draw_jobs(SMALL, 1)
    stops = decide_stops(RULES["paper"], workload)
    late = stops.after == SMALL.evals
    assert late.any()
    assert np.array_equal(roll_back(workload, stops, Cluster())[late], workload.hours[late])


@pytest.mark.parametrize("gain", ["0", "0.2"])
def test_rollbacks_cost_gpu_hours(gain: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A stop saves GPU-hours and a rollback costs some; it changes the eval score only by `--frontier-gain`."""
    arguments = ("rollback", "--policies", "paper", "--seeds", "2", "--cluster-jobs", "150", "--frontier-gain", gain)
    stop, back = read_report(capsys, *arguments)["outcomes"]
    assert stop["gpu_hours"]["value"] < 0 < back["gpu_hours"]["value"]
    added = back["eval_kept"]["value"] - stop["eval_kept"]["value"]
    assert added == pytest.approx(0.0) if gain == "0" else 0.1 < added <= 0.2
