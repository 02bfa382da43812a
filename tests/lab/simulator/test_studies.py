"""The studies: results depend neither on the other rules nor on the number of workers, and figures are correct."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from dataclasses import replace

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.engine import Cluster, simulate_cluster
from evalstop_lab.simulator.metrics import compare_paired, correct_p_values, count_flags, measure_schedule
from evalstop_lab.simulator.reproduce import Cell, Row, run_cell
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.stopping import RULES, compute_ends, decide_stops
from evalstop_lab.sweep import DASK, RAY, sweep
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.simulator.conftest import SMALL, property_settings, read_report

pytestmark = pytest.mark.slow

EVERY_RULE = tuple(RULES)


def run_rules(cell: Cell) -> dict[tuple[str, str], Row]:
    return {(row.rule, row.scheduler): row for row in run_cell(cell)}


def test_figures_of_a_rule_do_not_depend_on_other_rules() -> None:
    """A rule's figures depend neither on the other rules nor on their order."""
    separate = run_rules(Cell("w", SMALL, 1, ("paper",), ("SRTF-Est",)))
    together = run_rules(Cell("w", SMALL, 1, EVERY_RULE, tuple(SCHEDULERS)))
    reverse = run_rules(Cell("w", SMALL, 1, EVERY_RULE[::-1], tuple(SCHEDULERS)[::-1]))
    assert together == reverse
    assert {key: together[key] for key in separate} == separate


@property_settings
@given(seed=st.integers(0, 2**32 - 1), rule=st.sampled_from(sorted(RULES)))
def test_only_metrics_depend_on_the_truth(seed: int, rule: str) -> None:
    """A permutation of the truth changes neither a decision nor a time."""
    setting = replace(SMALL, jobs=40, evals=20)
    workload, hidden = draw_jobs(setting, seed % 100)
    order = np.random.default_rng(seed).permutation(setting.jobs)
    columns = ("hacking", "peaks", "eval_scores")
    permuted = replace(hidden, **{name: getattr(hidden, name)[order] for name in columns})
    stops = decide_stops(rule, workload)
    schedule = simulate_cluster(workload, SCHEDULERS["LAS"], Cluster(), compute_ends(workload, stops))
    right, wrong = (measure_schedule(workload, truth, schedule) for truth in (hidden, permuted))
    assert (right.jct, right.jct_p95) == (wrong.jct, wrong.jct_p95)
    flags = [count_flags(workload, truth, stops) for truth in (hidden, permuted)]
    stopped = [item.right + item.premature + item.wrong + item.late_hacking + item.late_healthy for item in flags]
    assert stopped[0] == stopped[1] == np.count_nonzero(stops)


SWEPT_CELLS = [Cell("small", SMALL, seed, ("paper",), ("FIFO", "LAS")) for seed in range(3)]


@pytest.fixture(scope="module")
def local_rows() -> list[list[Row]]:
    """The rows of a sweep in this process."""
    return sweep(run_cell, SWEPT_CELLS, "alone", chunk=1)


@pytest.mark.real
def test_sweep_by_processes_equals_a_local_one(local_rows: list[list[Row]]) -> None:
    """Two processes give the same rows as one."""
    assert sweep(run_cell, SWEPT_CELLS, "processes", jobs=2, chunk=1) == local_rows


@pytest.mark.real
@pytest.mark.parametrize("backend", [DASK, RAY])
def test_distributed_sweep_equals_a_local_one(backend: str, local_rows: list[list[Row]]) -> None:
    """Two workers of a local Dask or Ray cluster give the same rows as one process.

    A service may listen on its default port meanwhile.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # one does
            stack.enter_context(socket.create_server(("127.0.0.1", 8787)))
        assert sweep(run_cell, SWEPT_CELLS, backend, jobs=2, chunk=1, backend=backend) == local_rows


def test_reproduce_compares_eleven_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """`cluster reproduce` compares eleven figures with the paper's; precision and recall match on two small seeds."""
    report = read_report(capsys, "reproduce", "--seeds", "2", "--cluster-jobs", "200")
    lines = {line["what"]: line for line in report["lines"]}
    assert len(lines) == 11
    assert lines["precision"]["matches"]
    assert lines["recall"]["matches"]
    assert set(report["changes"]) == set(SCHEDULERS)
    assert 0 < report["saved"]["paper"]["value"] < report["saved"]["oracle"]["value"] == 1


def test_reproduce_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` lists the options."""
    with pytest.raises(SystemExit) as end:
        main(["cluster", "reproduce", "--help"])
    assert end.value.code == 0
    assert "--seeds" in capsys.readouterr().out


def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json the command prints tables."""
    assert main(["cluster", "reproduce", "--seeds", "2", "--cluster-jobs", "20", "--jobs", "1"]) == 0
    assert "within 2 points" in capsys.readouterr().out


def test_changes_are_paired() -> None:
    """If all seeds have the same relative change, its interval has no width."""
    change = compare_paired([1.0, 10.0, 100.0], [0.9, 9.0, 90.0])
    assert (change.change.value, change.change.low, change.change.high) == pytest.approx((-0.1, -0.1, -0.1))
    assert compare_paired([1.0, 2.0], [1.0, 2.0]).p_value == 1.0


def test_p_values_are_corrected_by_holms_method() -> None:
    """Each p-value is multiplied by the number of p-values that are at least as large, and the order is kept."""
    assert correct_p_values([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
