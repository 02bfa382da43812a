"""The studies: whoever takes part and however many compute, nobody's numbers change; figures are counted rightly."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.simulator.drawing import draw
from evalstop_lab.simulator.engine import Cluster, simulate
from evalstop_lab.simulator.metrics import count, measure
from evalstop_lab.simulator.paired import holm, interval, relative_change
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.stopping import RULES, decide
from evalstop_lab.simulator.study import Cell, Row, cells, run_cell
from evalstop_lab.sweep import DASK, RAY, sweep
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.simulator.conftest import SMALL, patiently

POLICIES = tuple(RULES.values())


def rows_of(cell: Cell) -> dict[tuple[str, str], Row]:
    return {(row.rule, row.scheduler): row for row in run_cell(cell)}


def test_one_more_rule_changes_no_other_rules_numbers() -> None:
    """A rule's figures are the same whoever takes part beside it, and in whatever order."""
    alone = rows_of(Cell("w", SMALL, 1, (RULES["paper"],), ("SRTF-Est",)))
    together = rows_of(Cell("w", SMALL, 1, POLICIES, tuple(SCHEDULERS)))
    reverse = rows_of(Cell("w", SMALL, 1, POLICIES[::-1], tuple(SCHEDULERS)[::-1]))
    assert together == reverse
    assert {key: together[key] for key in alone} == alone


@patiently
@given(seed=st.integers(0, 2**32 - 1), rule=st.sampled_from(sorted(RULES)))
def test_labels_are_for_metrics_alone(seed: int, rule: str) -> None:
    """Permuting what is hidden changes who was right and what was wasted, and neither a decision nor a time."""
    setting = replace(SMALL, jobs=40, evals=20)
    workload, hidden = draw(setting, seed % 100)
    order = np.random.default_rng(seed).permutation(setting.jobs)
    columns = ("hacking", "peaks", "peak_hours", "eval_scores", "best")
    permuted = replace(hidden, **{name: getattr(hidden, name)[order] for name in columns})
    stops = decide(RULES[rule], workload)
    schedule = simulate(workload, SCHEDULERS["LAS"], Cluster(), stops.ends(workload, Cluster()), evals=False)
    told, mistold = (measure(workload, truth, stops, schedule) for truth in (hidden, permuted))
    assert (told.jct, told.jct_p95, told.gpu_hours) == (mistold.jct, mistold.jct_p95, mistold.gpu_hours)
    flags = [count(workload, truth, stops) for truth in (hidden, permuted)]
    stopped = [item.right + item.premature + item.wrong + item.late_hacking + item.late_healthy for item in flags]
    assert stopped[0] == stopped[1] == np.count_nonzero(stops.after)


@pytest.mark.real
@pytest.mark.parametrize("backend", [DASK, RAY])
def test_a_cluster_of_computers_computes_the_same(backend: str) -> None:
    """Two workers of a real local Dask or Ray cluster, and two processes, come to the rows of one."""
    work = cells({"small": SMALL}, range(3), (RULES["paper"],), ("FIFO", "LAS"))
    alone = sweep(run_cell, work, "alone", chunk=1)
    assert sweep(run_cell, work, "processes", jobs=2, chunk=1) == alone
    assert sweep(run_cell, work, backend, jobs=2, chunk=1, backend=backend) == alone


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["cluster", *arguments, "--jobs", "1", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_papers_table(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """`cluster reproduce` puts eleven figures beside the paper's; those of flags match on two small seeds, too."""
    report = told(capsys, "reproduce", "--seeds", "2", "--cluster-jobs", "400", "--plots", str(tmp_path))
    lines = {line["what"]: line for line in report["lines"]}
    assert len(lines) == 11
    assert lines["precision"]["matches"]
    assert lines["recall"]["matches"]
    assert set(report["changes"]["paper"]) == set(SCHEDULERS)
    assert report["gpu_hours"]["oracle"]["post_peak"] == pytest.approx(0.0, abs=1e-6)
    assert (tmp_path / "reproduce.png").stat().st_size > 10_000


def test_the_frontier(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """`cluster frontier` gives each rule its share of the oracle's saving, and tuned rules their thresholds."""
    words = ("frontier", "--worlds", "paper", "--seeds", "2", "--cluster-jobs", "120", "--plots", str(tmp_path))
    points = {point["rule"]: point for point in told(capsys, *words)["points"]}
    assert 0 < points["paper"]["saved"]["value"] < 1
    assert points["k_decline at 2 %"]["threshold"] >= 3
    assert (tmp_path / "frontier.png").stat().st_size > 10_000


def test_the_cadence(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """`cluster cadence` charges each eval to every job: what comes back falls by the evals' cost and no more."""
    words = (
        "--policies",
        "paper",
        "--evals",
        "10",
        "20",
        "--costs",
        "0",
        "0.005",
        "0.02",
        "--seeds",
        "2",
        "--cluster-jobs",
    )
    report = told(capsys, "cadence", *words, "100", "--plots", str(tmp_path))
    saved = {(net["evals"], net["eval_share"]): net["saved"]["value"] for net in report["nets"]}
    assert 0.02 < saved[10, 0.0] < 0.1
    assert saved[10, 0.0] - 0.051 < saved[10, 0.005] < saved[10, 0.0] - 0.03
    times = {(net["evals"], net["eval_share"]): net["time"]["value"] for net in report["nets"]}
    assert times[10, 0.0] < 0
    assert times[10, 0.02] is None, "evals fill the cluster"
    assert saved[20, 0.0] - saved[20, 0.005] > saved[10, 0.0] - saved[10, 0.005]
    assert (tmp_path / "cadence.png").stat().st_size > 10_000


def test_a_cost_that_is_no_share_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """An eval that costs more than its job is a mistake, and the command says what to give."""
    assert main(["cluster", "cadence", "--costs", "5"]) == 2
    assert "such as 0.002" in capsys.readouterr().err


@pytest.mark.parametrize("question", ["reproduce", "frontier", "cadence", "cost", "rollback", "population", "trace"])
def test_every_question_explains_itself(question: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` of each command says what it asks."""
    with pytest.raises(SystemExit) as end:
        main(["cluster", question, "--help"])
    assert end.value.code == 0
    assert "--seeds" in capsys.readouterr().out


def test_the_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json there are tables for people."""
    assert main(["cluster", "reproduce", "--seeds", "2", "--cluster-jobs", "60", "--jobs", "1"]) == 0
    assert "within 2 points" in capsys.readouterr().out


def test_changes_are_paired() -> None:
    """A change that every seed shows alike has no spread, however different the seeds are."""
    change = relative_change([1.0, 10.0, 100.0], [0.9, 9.0, 90.0])
    assert (change.change.value, change.change.low, change.change.high) == pytest.approx((-0.1, -0.1, -0.1))
    assert relative_change([1.0, 2.0], [1.0, 2.0]).p_value == 1.0


def test_holm() -> None:
    """Each p-value is multiplied by how many are at least as large, and never falls below a smaller one's."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


@patiently
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_the_interval_holds_the_mean(numbers: list[float]) -> None:
    """The bootstrap's interval lies within the numbers, and has the mean within it or at its edge."""
    found = asdict(interval(numbers))
    assert min(numbers) - 1e-9 <= found["low"] <= found["high"] <= max(numbers) + 1e-9
