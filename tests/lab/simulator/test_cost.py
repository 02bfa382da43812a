"""Costs: nodes are billed whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from evalstop_detectors import POLICIES
from evalstop_lab.cli import main
from evalstop_lab.simulator.cost import HOURS_A_MONTH, count_billed_hours
from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.engine import Cluster, simulate_cluster
from evalstop_lab.simulator.jobs import Workload
from evalstop_lab.simulator.schedulers import FIFO, SRTF_EST
from evalstop_lab.simulator.setting import PAPER
from evalstop_lab.simulator.stopping import decide_stops
from evalstop_lab.simulator.study import REPORTING_SEED
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.simulator.conftest import property_settings, read_report, workloads
from tests.lab.simulator.plain_workload import build_plain_workload


def test_nodes_are_billed_whole() -> None:
    """A single GPU is billed as a node; two concurrent jobs that fit on one node share it."""
    workload = build_plain_workload(np.array([0.0, 0.0, 2.0]), np.array([1, 3, 5]), np.array([1.0, 1.0, 1.0]))
    schedule = simulate_cluster(workload, FIFO, Cluster(8))
    assert count_billed_hours(workload, schedule, 8) == 16.0
    assert count_billed_hours(workload, schedule, 4) == 4.0 + 8.0
    assert count_billed_hours(workload, schedule, 1) == 9.0


@property_settings
@given(workload=workloads(8), node_gpus=st.sampled_from([1, 2, 4, 8]))
def test_nodes_cost_at_least_their_gpus(workload: Workload, node_gpus: int) -> None:
    """Billed GPU-hours are between those in use and those of all nodes; for nodes of one GPU they are those in use."""
    schedule = simulate_cluster(workload, FIFO, Cluster(8))
    used = float((schedule.held * workload.gpus).sum())
    billed = count_billed_hours(workload, schedule, node_gpus)
    assert used - 1e-9 <= billed <= 8 * (schedule.ended.max() - workload.submitted[0]) + 1e-9
    assert node_gpus > 1 or billed == pytest.approx(used)


@pytest.mark.slow
def test_cost_reports_hours_and_dollars(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the price saves twice the dollars."""
    arguments = ("cost", "--policies", "paper", "--seeds", "2", "--cluster-jobs", "150", "--on-demand")
    cheap, dear = (read_report(capsys, *arguments, price)["policies"]["paper"] for price in ("2", "4"))
    assert 0.02 < cheap["gpu_hours"]["value"] < 0.1
    assert cheap["time"]["value"] < 0
    assert dear["dollars_a_month"]["on demand"] == pytest.approx(2 * cheap["dollars_a_month"]["on demand"])


def test_dollars_are_those_of_the_nodes_that_are_no_longer_billed(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the whole cluster is one node, its hours without any job are what a stop saves."""
    setting = replace(PAPER, jobs=60)
    workload, _ = draw_jobs(setting, REPORTING_SEED)
    cluster, ends = Cluster(), decide_stops(POLICIES["default"], workload).ends(workload)
    schedules = [simulate_cluster(workload, SRTF_EST, cluster, item) for item in (workload.hours, ends)]
    before, after = (count_billed_hours(workload, item, setting.gpus) for item in schedules)
    arguments = ("--policies", "default", "--seeds", "1", "--cluster-jobs", "60")
    report = read_report(capsys, "cost", *arguments, "--node-gpus", "64", "--on-demand", "2")
    figures = report["policies"]["default"]
    a_month = setting.load * setting.gpus * HOURS_A_MONTH / float((schedules[0].held * workload.gpus).sum())
    assert before > after > 0
    assert figures["dollars_a_month"]["on demand"] == pytest.approx(2 * (before - after) * a_month)


def test_negative_price_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2 and the message states the valid range."""
    assert main(["cluster", "cost", "--spot", "-1"]) == 2
    assert "Prices must be 0 or more" in capsys.readouterr().err
