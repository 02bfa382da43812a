"""Stopping and its studies: rules stop where they should, figures add up, and nothing depends on the workers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.simulator.drawing import PAPER, Setting, draw_jobs, stop_at_peaks
from evalstop_lab.simulator.engine import Cluster, simulate_cluster
from evalstop_lab.simulator.metrics import count_flags, measure_schedule
from evalstop_lab.simulator.reproduce import Seed, build_lines, count_worlds, estimate_saving, simulate_seed
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.stopping import RULES, compute_ends, decide_stops
from evalstop_lab.sweep import sweep
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.simulator.conftest import SMALL, property_settings


def test_paper_stops_at_the_third_decline() -> None:
    """Without noise every hacking job with three evals after its peak is stopped at the third decline, and no other."""
    workload, hidden = draw_jobs(replace(SMALL, noise_sd=0.0, evals=20), 1)
    stops = decide_stops("paper", workload)
    assert (stops[~hidden.hacking] == 0).all()
    for job in np.flatnonzero(hidden.hacking):
        falls = np.flatnonzero(np.diff(hidden.eval_scores[job]) < 0)
        assert stops[job] == falls[2] + 2


def test_oracle_leaves_no_waste() -> None:
    """The oracle stops all hacking jobs at their peaks, without waste, and no healthy job."""
    workload, hidden = draw_jobs(SMALL, 2)
    stops, ends = stop_at_peaks(workload, hidden)
    schedule = simulate_cluster(workload, SCHEDULERS["SRTF"], Cluster(), ends)
    figures = measure_schedule(workload, hidden, schedule)
    assert figures.wasted == pytest.approx(0.0, abs=1e-6)
    counts = count_flags(workload, hidden, stops)
    assert (counts.recall().value, counts.false_stops().value, counts.premature) == (1.0, 0.0, 0)


def test_gpu_hours_add_up() -> None:
    """Each job makes the progress that it needs; those after a peak are a part of the GPU-hours of hacking jobs."""
    workload, hidden = draw_jobs(SMALL, 4)
    schedule = simulate_cluster(workload, SCHEDULERS["SRTF-Est"], Cluster())
    figures = measure_schedule(workload, hidden, schedule)
    assert schedule.ran == pytest.approx(workload.hours)
    assert figures.false_stop == 0.0
    assert 0 < figures.post_peak < float((schedule.held * workload.gpus)[hidden.hacking].sum())


WORLDS = {
    "paper": PAPER,
    "noise 0.1": replace(PAPER, noise_sd=0.1, evals=50),
    "hard": replace(PAPER, peaks=(0.3, 0.8), evals=50, noise_sd=0.05),
}


@pytest.mark.parametrize("setting", WORLDS.values(), ids=WORLDS)
def test_world_has_its_declared_labels_and_load(setting: Setting) -> None:
    """Hacking jobs end below their peak, healthy ones within the tolerance, and the load is as declared."""
    workload, hidden = draw_jobs(replace(setting, jobs=3000), 5)
    peaks = hidden.eval_scores.max(axis=1)
    fallen = (peaks - hidden.eval_scores[:, -1]) / setting.gain
    assert (fallen[~hidden.hacking] < 0.1).all()
    assert (fallen[hidden.hacking] > 0.0).all()
    load = (workload.hours * workload.gpus).sum() / workload.submitted[-1] / setting.cluster.gpus
    assert load == pytest.approx(setting.load, rel=0.1)


def test_changed_parameter_leaves_other_draws_unchanged() -> None:
    """Worlds that differ in one parameter have the same jobs."""
    workload, hidden = draw_jobs(SMALL, 6)
    noisier, same = draw_jobs(replace(SMALL, noise_sd=0.1), 6)
    assert np.array_equal(workload.hours, noisier.hours)
    assert np.array_equal(hidden.hacking, same.hacking)
    more, _ = draw_jobs(replace(SMALL, hacking_share=0.8), 6)
    assert np.array_equal(workload.hours, more.hours)
    assert np.array_equal(workload.submitted, more.submitted)


EVERY_RULE = tuple(RULES)


@pytest.mark.slow
def test_figures_of_a_rule_do_not_depend_on_other_rules() -> None:
    """A rule's figures depend neither on the other rules nor on their order."""
    separate = simulate_seed(SMALL, ("paper",), ("SRTF-Est",), 1)
    together = simulate_seed(SMALL, EVERY_RULE, tuple(SCHEDULERS), 1)
    assert together == simulate_seed(SMALL, EVERY_RULE[::-1], tuple(SCHEDULERS)[::-1], 1)
    assert {key: together.figures[key] for key in separate.figures} == separate.figures
    assert {key: together.counts[key] for key in separate.counts} == separate.counts


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.real
def test_sweep_by_processes_equals_a_local_one() -> None:
    """Two processes give the same figures as one."""
    alone: list[Seed] = sweep(SIMULATE, range(3), "alone")
    assert sweep(SIMULATE, range(3), "processes", jobs=2) == alone


@pytest.mark.slow
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


@pytest.mark.slow
def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the figures beside the paper's."""
    assert main(["cluster", "--seeds", "2", "--cluster-jobs", "20", "--jobs", "1"]) == 0
    assert "within 2 points" in capsys.readouterr().out
