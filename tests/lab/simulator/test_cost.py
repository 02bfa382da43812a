"""Costs: nodes are rented whole, owned GPUs give no money back, and a mechanism saves what it can and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.simulator.cost import Prices, billed_gpu_hours, dollars_a_month
from evalstop_lab.simulator.engine import Cluster, simulate
from evalstop_lab.simulator.execution import PUBLISHED, Iteration, mechanism
from evalstop_lab.simulator.jobs import Workload, plain
from evalstop_lab.simulator.schedulers import FIFO
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.simulator.conftest import patiently, workloads


def test_nodes_are_rented_whole() -> None:
    """One GPU for an hour is a node for an hour; two jobs that fit one node at once share it."""
    workload = plain(np.array([0.0, 0.0, 2.0]), np.array([1, 3, 5]), np.array([1.0, 1.0, 1.0]))
    schedule = simulate(workload, FIFO, Cluster(8))
    assert billed_gpu_hours(workload, schedule, 8) == 16.0
    assert billed_gpu_hours(workload, schedule, 4) == 4.0 + 8.0
    assert billed_gpu_hours(workload, schedule, 1) == 9.0


@patiently
@given(workload=workloads(8), node_gpus=st.sampled_from([1, 2, 4, 8]))
def test_nodes_cost_at_least_their_gpus(workload: Workload, node_gpus: int) -> None:
    """Billed GPU-hours are those in use, or more where nodes are larger than one GPU; never more than all nodes."""
    schedule = simulate(workload, FIFO, Cluster(8))
    used = float((schedule.held * workload.gpus).sum())
    billed = billed_gpu_hours(workload, schedule, node_gpus)
    assert used - 1e-9 <= billed <= 8 * (schedule.ended.max() - workload.submitted[0]) + 1e-9
    assert node_gpus > 1 or billed == pytest.approx(used)


def test_what_is_owned_gives_no_money_back() -> None:
    """By the hour hours count; of reserved GPUs whole nodes that can be given up; of owned ones nothing."""
    dollars = dollars_a_month(Prices(4.0, 2.0, 3.0, node_gpus=8), 1000.0, given_up_gpus=11)
    assert dollars == {"on demand": 4000.0, "spot": 2000.0, "reserved": 8 * 730 * 3.0, "owned": 0.0}


def test_mechanisms_save_something_and_less_time_than_is_published() -> None:
    """Fusing shortens an iteration and scaling makes it cheaper; neither comes to the time of its paper."""
    found = mechanism(Iteration())
    assert (found["serial"].time, found["serial"].gpu_time) == (1.0, 1.0)
    assert PUBLISHED["fused"].time < found["fused"].time < 1
    assert found["serverless"].gpu_time < 1
    assert found["serverless"].time > PUBLISHED["serverless"].time


def test_without_a_tail_and_bubbles_there_is_nothing_to_fuse() -> None:
    """When all responses are equally long and no pipeline stands still, fused is serial."""
    found = mechanism(Iteration(length_sd=0.0, bubble=0.0))
    assert found["fused"].time == pytest.approx(1.0, abs=0.02)


def test_what_comes_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`cluster cost` says hours, GPUs and dollars, twice the price is twice the dollars, and owned GPUs give none."""
    words = ["cluster", "cost", "--policies", "paper", "--seeds", "2", "--cluster-jobs", "150", "--jobs", "1", "--json"]
    reports: list[dict[str, Any]] = []
    for price in ("2", "4"):
        assert main([*words, "--on-demand", price, "--plots", str(tmp_path)]) == 0
        reports.append(json.loads(capsys.readouterr().out)["policies"]["paper"])
    cheap, dear = reports
    assert 0.02 < cheap["gpu_hours"]["value"] < 0.1
    assert cheap["time"]["value"] < cheap["time_at_equal_load"]["value"]
    assert dear["dollars_a_month"]["on demand"] == pytest.approx(2 * cheap["dollars_a_month"]["on demand"])
    assert cheap["dollars_a_month"]["owned"] == 0.0
    assert cheap["given_up"]["value"] >= 0
    assert (tmp_path / "cost.png").stat().st_size > 10_000
    assert main([*words, "--length-growth", "1"]) == 0
    grown = json.loads(capsys.readouterr().out)["policies"]["paper"]
    assert grown["gpu_hours"]["value"] > cheap["gpu_hours"]["value"]


def test_a_negative_price_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A price below nothing is a mistake."""
    assert main(["cluster", "cost", "--spot", "-1"]) == 2
    assert main(["cluster", "cost", "--length-growth", "-1"]) == 2
    assert "non-negative" in capsys.readouterr().err
