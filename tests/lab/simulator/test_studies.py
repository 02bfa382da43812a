"""The studies: results depend neither on the other rules nor on the number of workers, and figures are correct."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.simulator.drawing import PAPER, draw_jobs
from evalstop_lab.simulator.engine import Cluster, simulate_cluster
from evalstop_lab.simulator.metrics import count_flags, measure_schedule
from evalstop_lab.simulator.reproduce import Seed, build_lines, count_worlds, estimate_saving, simulate_seed
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.stopping import RULES, compute_ends, decide_stops
from evalstop_lab.sweep import sweep
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.simulator.conftest import SMALL, property_settings

pytestmark = pytest.mark.slow

EVERY_RULE = tuple(RULES)


def test_figures_of_a_rule_do_not_depend_on_other_rules() -> None:
    """A rule's figures depend neither on the other rules nor on their order."""
    separate = simulate_seed(SMALL, ("paper",), ("SRTF-Est",), 1)
    together = simulate_seed(SMALL, EVERY_RULE, tuple(SCHEDULERS), 1)
    assert together == simulate_seed(SMALL, EVERY_RULE[::-1], tuple(SCHEDULERS)[::-1], 1)
    assert {key: together.figures[key] for key in separate.figures} == separate.figures
    assert {key: together.counts[key] for key in separate.counts} == separate.counts


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


SIMULATE = partial(simulate_seed, SMALL, ("paper",), ("FIFO", "LAS"))


@pytest.mark.real
def test_sweep_by_processes_equals_a_local_one() -> None:
    """Two processes give the same figures as one."""
    alone: list[Seed] = sweep(SIMULATE, range(3), "alone")
    assert sweep(SIMULATE, range(3), "processes", jobs=2) == alone


def test_reproduce_compares_eleven_figures() -> None:
    """Eleven figures are compared with the paper's; precision and recall match on two small seeds."""
    setting, numbers = replace(PAPER, jobs=200), range(30_000, 30_002)
    rules = ("paper", "fixed-progress", "loss-plateau")
    seeds = [simulate_seed(setting, rules, tuple(SCHEDULERS), number) for number in numbers]
    lines = {line.what: line for line in build_lines(seeds, count_worlds(setting, numbers))}
    assert len(lines) == 11
    assert lines["precision"].matches
    assert lines["recall"].matches
    assert 0 < estimate_saving(seeds, "paper").value < estimate_saving(seeds, "oracle").value == 1


def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the figures beside the paper's."""
    assert main(["cluster", "--seeds", "2", "--cluster-jobs", "20", "--jobs", "1"]) == 0
    assert "within 2 points" in capsys.readouterr().out
