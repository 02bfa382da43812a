"""The studies: results depend neither on the other rules nor on the number of workers, and figures are correct."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.simulator.drawing import PAPER, draw_jobs
from evalstop_lab.simulator.engine import Cluster, simulate_cluster
from evalstop_lab.simulator.metrics import count_flags, measure_schedule
from evalstop_lab.simulator.reproduce import Cell, Row, Rows, build_cells, build_lines, estimate_saving, run_cell
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.stopping import RULES, compute_ends, decide_stops
from evalstop_lab.sweep import sweep
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.simulator.conftest import SMALL, property_settings

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
    assert right.jct == wrong.jct
    flags = [count_flags(workload, truth, stops) for truth in (hidden, permuted)]
    stopped = [item.right + item.premature + item.wrong + item.late_hacking + item.late_healthy for item in flags]
    assert stopped[0] == stopped[1] == np.count_nonzero(stops)


SWEPT_CELLS = [Cell("small", SMALL, seed, ("paper",), ("FIFO", "LAS")) for seed in range(3)]


@pytest.fixture(scope="module")
def local_rows() -> list[list[Row]]:
    """The rows of a sweep in this process."""
    return sweep(run_cell, SWEPT_CELLS, "alone")


@pytest.mark.real
def test_sweep_by_processes_equals_a_local_one(local_rows: list[list[Row]]) -> None:
    """Two processes give the same rows as one."""
    assert sweep(run_cell, SWEPT_CELLS, "processes", jobs=2) == local_rows


def test_reproduce_compares_eleven_figures() -> None:
    """Eleven figures are compared with the paper's; precision and recall match on two small seeds."""
    rows = Rows(chain.from_iterable(map(run_cell, build_cells(replace(PAPER, jobs=200), range(30_000, 30_002)))))
    lines = {line.what: line for line in build_lines(rows)}
    assert len(lines) == 11
    assert lines["precision"].matches
    assert lines["recall"].matches
    assert 0 < estimate_saving(rows, "paper").value < estimate_saving(rows, "oracle").value == 1


def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the figures beside the paper's."""
    assert main(["cluster", "--seeds", "2", "--cluster-jobs", "20", "--jobs", "1"]) == 0
    assert "within 2 points" in capsys.readouterr().out
