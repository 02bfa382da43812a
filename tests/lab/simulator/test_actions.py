"""Preempted jobs: they delay no other job, lose no work, and the returned GPU-hours are counted correctly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from evalstop_detectors.policy.calibration import find_threshold
from evalstop_lab.simulator.actions import POSTERIOR, RULES, Rule, decide_actions
from evalstop_lab.simulator.drawing import Hidden
from evalstop_lab.simulator.engine import Cluster, simulate_cluster
from evalstop_lab.simulator.jobs import Workload
from evalstop_lab.simulator.metrics import measure_contended_waste
from evalstop_lab.simulator.schedulers import FIFO, SCHEDULERS, Scheduler
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.simulator.conftest import assert_no_gpu_is_allocated_twice, property_settings, read_report, workloads
from tests.lab.simulator.plain_workload import build_plain_workload

GPUS = 8
PARK = {0: ((1, True),)}
schedulers = st.sampled_from(list(SCHEDULERS.values()))


def add_evals(workload: Workload, evals: int) -> Workload:
    """The same jobs with this number of evals each, so that they can be preempted while they run."""
    shape = (len(workload.jobs), evals)
    jobs = tuple(replace(job, evals=evals, losses=(0.5,) * evals) for job in workload.jobs)
    return Workload(jobs, np.zeros(shape), np.zeros(shape))


@st.composite
def changes(draw: st.DrawFn) -> tuple[tuple[int, bool], ...]:
    """When a job with four evals is parked and returns."""
    evals = draw(st.lists(st.integers(1, 4), unique=True, max_size=3).map(sorted))
    return tuple((at, draw(st.booleans())) for at in evals)


@property_settings
@given(workload=workloads(GPUS), scheduler=schedulers, drawn=st.data())
def test_preemption_loses_no_work(workload: Workload, scheduler: Scheduler, drawn: st.DataObject) -> None:
    """However jobs are preempted and return, each runs all of its hours, and no GPU is allocated twice."""
    workload = add_evals(workload, 4)
    parked = {job.number: drawn.draw(changes()) for job in workload.jobs}
    schedule = simulate_cluster(workload, scheduler, Cluster(GPUS, 0.25), parked=parked)
    assert schedule.ran == pytest.approx(workload.hours)
    assert_no_gpu_is_allocated_twice(workload, schedule, GPUS)


@property_settings
@given(workload=workloads(GPUS), scheduler=schedulers)
def test_parked_job_yields_to_waiting_jobs(workload: Workload, scheduler: Scheduler) -> None:
    """A job that is parked from its first eval on runs only while no other job that fits waits."""
    workload = add_evals(workload, 4)
    schedule = simulate_cluster(workload, scheduler, Cluster(GPUS, 0.0), parked=PARK)
    ran, spells = 0.0, [spell[1:] for spell in schedule.spells if spell[0] == 0]
    for since, until in spells:
        parked_from = since + workload.jobs[0].eval_at(1) - ran
        ran += until - since
        if parked_from <= until:
            break
    gpus = workload.jobs[0].gpus
    for since, until in spells:
        if max(since, parked_from) < until:
            at = (max(since, parked_from) + until) / 2
            running = [job for job, since, until in schedule.spells if since <= at < until]
            free = GPUS - sum(workload.jobs[job].gpus for job in running) + gpus
            waiting = [
                j for j in workload.jobs if j.submitted <= at < schedule.ended[j.number] and j.number not in running
            ]
            if scheduler.strict:
                waiting = waiting[:1]
            assert all(job.gpus > free for job in waiting)


def test_parked_job_resumes_on_idle_gpus() -> None:
    """It is paused for a waiting job, pays for its restore, and runs to its end."""
    workload = add_evals(build_plain_workload(np.array([0.0, 1.0]), np.array([8, 8]), np.array([4.0, 2.0])), 4)
    untouched = simulate_cluster(workload, FIFO, Cluster(8, 0.5))
    schedule = simulate_cluster(workload, FIFO, Cluster(8, 0.5), parked=PARK)
    assert untouched.ended.tolist() == [4.0, 6.0]
    assert untouched.contended == [(1.0, 4.0)]
    assert schedule.ended.tolist() == [6.5, 3.0]
    assert schedule.contended == []
    assert schedule.pauses.tolist() == [1, 0]


def test_contended_waste_counts_hours_with_a_waiting_job() -> None:
    """A job past its peak wastes only the hours during which another job waits."""
    workload = add_evals(build_plain_workload(np.array([0.0, 1.0]), np.array([8, 8]), np.array([4.0, 2.0])), 4)
    truth = np.array([True, False]), np.array([0.5, 1.0])
    hidden = Hidden(*truth, np.zeros((2, 4)), np.ones(2), 1.0)
    cluster = Cluster(8, 0.5)
    assert measure_contended_waste(workload, hidden, simulate_cluster(workload, FIFO, cluster), 0.5) == 8 * 2.0
    parked = simulate_cluster(workload, FIFO, cluster, parked=PARK)
    assert measure_contended_waste(workload, hidden, parked, 0.5) == 0.0
    stopped = simulate_cluster(workload, FIFO, cluster, np.array([1.5, 2.0]))
    assert measure_contended_waste(workload, hidden, stopped, 0.5) == 8 * 0.5, (
        "a job stopped before its peak wastes all that it held"
    )


def test_actions_follow_the_evidence() -> None:
    """A parked job stays so until its evidence falls below `RETURN_BELOW`; a stopped job ends."""
    level = find_threshold(POSTERIOR, 0.05, ())
    row = [0.0, level, 0.5, 0.1, level - 0.01, level]
    workload = add_evals(build_plain_workload(np.array([0.0]), np.array([1]), np.array([6.0])), 6)
    parked = decide_actions(Rule("park", 0.05), workload, np.array([row]))
    assert parked.parked == {0: [(2, True), (4, False), (6, True)]}
    assert parked.ends.tolist() == [6.0]
    stopped = decide_actions(Rule("stop", 0.05), workload, np.array([row]))
    assert (stopped.ends.tolist(), stopped.parked) == ([2.0], {})
    untouched = decide_actions(Rule("stop", 0.05), workload, np.array([[0.0] * 6]))
    assert (untouched.ends.tolist(), untouched.parked) == ([6.0], {})


def test_only_stops_lose_healthy_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    """`cluster actions` reports the GPU-hours that each rule returns; only a stop loses a healthy job."""
    arguments = ["actions", "--seeds", "1", "--cluster-jobs", "60", "--schedulers", "FIFO"]
    outcomes = {item["rule"]: item for item in read_report(capsys, *arguments)["outcomes"]}
    assert set(outcomes) == {rule.name for rule in RULES}
    assert all(item["lost"]["value"] == 0 for name, item in outcomes.items() if "stop" not in name)
    assert outcomes["stop at 20 %"]["returned"]["value"] > 0
