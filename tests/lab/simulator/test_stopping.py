"""Stopping: rules stop where they should, and figures add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from evalstop_lab.simulator.drawing import PAPER, Setting, draw_jobs, stop_at_peaks
from evalstop_lab.simulator.engine import Cluster, simulate_cluster
from evalstop_lab.simulator.metrics import count_flags, measure_schedule
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.stopping import decide_stops

from tests.lab.simulator.conftest import SMALL


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
    load = (workload.hours * workload.gpus).sum() / workload.submitted[-1] / setting.gpus
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
