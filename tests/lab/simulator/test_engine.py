"""The discrete-event engine: work and GPUs are conserved, and queues agree with queueing theory."""

from __future__ import annotations

import math
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import simpy
from evalstop_lab.simulator.engine import Cluster, Schedule, simulate_cluster
from evalstop_lab.simulator.jobs import Workload
from evalstop_lab.simulator.schedulers import (
    FIFO,
    FIFO_SKIPPING,
    GPU_HOURS_OF_SHORT_JOBS,
    SCHEDULERS,
    SJF,
    SRTF,
    Scheduler,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.simulator.conftest import (
    assert_no_gpu_is_allocated_twice,
    build_plain_workload,
    property_settings,
    workloads,
)

GPUS = 8
schedulers = st.sampled_from(list(SCHEDULERS.values()))
clusters = st.sampled_from([Cluster(GPUS, 0.0), Cluster(GPUS, 0.25), Cluster(GPUS, 0.1)])


@property_settings
@given(workload=workloads(GPUS), scheduler=schedulers, cluster=clusters)
def test_no_gpu_is_allocated_twice(workload: Workload, scheduler: Scheduler, cluster: Cluster) -> None:
    """Running gangs never hold more GPUs than the cluster has, and no job runs twice at the same time."""
    schedule = simulate_cluster(workload, scheduler, cluster)
    assert_no_gpu_is_allocated_twice(workload, schedule, cluster.gpus)
    for job in range(len(workload.jobs)):
        own_spells = [spell for spell in schedule.spells if spell[0] == job]
        assert all(before[2] <= after[1] for before, after in pairwise(own_spells))


@property_settings
@given(workload=workloads(GPUS), scheduler=schedulers, cluster=clusters)
def test_work_is_conserved(workload: Workload, scheduler: Scheduler, cluster: Cluster) -> None:
    """Every job runs all of its hours, and holds GPUs for at most one restore per pause longer."""
    schedule = simulate_cluster(workload, scheduler, cluster)
    assert schedule.ran == pytest.approx(workload.hours)
    assert (schedule.started >= workload.submitted).all()
    assert (schedule.ended >= schedule.started + workload.hours - 1e-9).all()
    beyond = schedule.held - schedule.ran
    assert (beyond >= -1e-9).all()
    assert (beyond <= schedule.pauses * cluster.restore_hours + 1e-9).all()
    assert scheduler.preemptive or not schedule.pauses.any()


@property_settings
@given(workload=workloads(GPUS), scheduler=schedulers)
def test_no_gpu_idles_while_a_job_that_fits_waits(workload: Workload, scheduler: Scheduler) -> None:
    """After any job has ended, every waiting gang needs more GPUs than are free."""
    if scheduler.strict:
        return
    schedule = simulate_cluster(workload, scheduler, Cluster(GPUS, 0.0))
    for time in {until for _, _, until in schedule.spells}:
        running = {job for job, since, until in schedule.spells if since <= time < until}
        free = GPUS - sum(workload.jobs[job].gpus for job in running)
        waiting = [
            job.gpus
            for job in workload.jobs
            if job.submitted <= time < schedule.ended[job.number] and job.number not in running
        ]
        assert all(gpus > free for gpus in waiting)


def draw_poisson_workload(jobs: int, rate: float, seed: int) -> Workload:
    """Jobs with one GPU, exponential durations with a mean of one hour, and this submission rate."""
    rng = np.random.default_rng(seed)
    submitted = np.cumsum(rng.exponential(1 / rate, jobs))
    return build_plain_workload(submitted, np.ones(jobs, dtype=np.int64), rng.exponential(1.0, jobs))


@pytest.mark.parametrize("servers", [1, 4])
def test_erlang_c(servers: int) -> None:
    """Jobs of an M/M/c queue have the mean waiting time of Erlang's formula, within 5 %."""
    load = 0.7
    rate = load * servers
    tail = rate**servers / math.factorial(servers) / (1 - load)
    delayed = tail / (sum(rate**k / math.factorial(k) for k in range(servers)) + tail)
    waits = []
    for seed in range(4):
        workload = draw_poisson_workload(30_000, rate, seed)
        waits.append(np.mean(simulate_cluster(workload, FIFO, Cluster(servers)).started - workload.submitted))
    assert np.mean(waits) == pytest.approx(delayed / (servers - rate), rel=0.05)


def test_shortest_remaining_first_has_the_lowest_mean_time() -> None:
    """On one GPU without restores no scheduler has a lower mean time than SRTF, and SJF is between SRTF and FIFO."""
    workload = draw_poisson_workload(2_000, 0.8, 7)

    def mean(scheduler: Scheduler) -> float:
        schedule = simulate_cluster(workload, scheduler, Cluster(1, 0.0))
        return float(np.mean(schedule.ended - workload.submitted))

    assert mean(SRTF) < mean(SJF) < mean(FIFO)
    assert all(mean(SRTF) <= mean(item) + 1e-9 for item in SCHEDULERS.values())


def simulate_with_simpy(workload: Workload, gpus: int) -> np.ndarray:
    """The ends of the jobs under strict FIFO, simulated with SimPy."""
    environment = simpy.Environment()
    free = simpy.Container(environment, gpus, gpus)
    ended = np.zeros(len(workload.jobs))

    def run_job(job: Any) -> Generator[simpy.Event]:
        yield environment.timeout(job.submitted)
        yield free.get(job.gpus)
        yield environment.timeout(job.hours)
        ended[job.number] = environment.now
        yield free.put(job.gpus)

    for job in workload.jobs:
        environment.process(run_job(job))
    environment.run()
    return ended


@property_settings
@given(workload=workloads(GPUS))
def test_fifo_agrees_with_simpy(workload: Workload) -> None:
    """Under FIFO SimPy gives the same ends, up to rounding."""
    assert simulate_cluster(workload, FIFO, Cluster(GPUS)).ended == pytest.approx(simulate_with_simpy(workload, GPUS))


def test_job_that_does_not_fit_is_refused() -> None:
    """A gang that is larger than the cluster is an error that states both sizes."""
    workload = build_plain_workload(np.array([0.0]), np.array([9]), np.array([1.0]))
    with pytest.raises(ValueError, match="needs 9 GPUs, but the cluster has 8"):
        simulate_cluster(workload, FIFO, Cluster(8))


def test_skipping_starts_small_jobs_first() -> None:
    """FIFO-Skip starts a small job that waits behind a large one under FIFO."""
    workload = build_plain_workload(np.array([0.0, 1.0, 2.0]), np.array([6, 8, 2]), np.array([10.0, 1.0, 1.0]))
    assert simulate_cluster(workload, FIFO, Cluster(8)).started.tolist() == [0.0, 10.0, 11.0]
    assert simulate_cluster(workload, FIFO_SKIPPING, Cluster(8)).started.tolist() == [0.0, 10.0, 2.0]


def test_long_job_moves_to_the_second_queue() -> None:
    """A job moves to the second queue when its GPU-hours reach the threshold, and is paused at that time."""
    workload = build_plain_workload(np.array([0.0, 1.0]), np.array([2, 2]), np.array([10.0, 1.0]))
    assert GPU_HOURS_OF_SHORT_JOBS == 8.0
    assert simulate_cluster(workload, SCHEDULERS["2D-LAS"], Cluster(2, 0.0)).started.tolist() == [0.0, 4.0]


def test_jobs_take_turns_by_the_quantum() -> None:
    """Under LAS two long jobs on one GPU take turns by the quantum."""
    workload = build_plain_workload(np.array([0.0, 0.0]), np.array([1, 1]), np.array([2.0, 2.0]))
    schedule: Schedule = simulate_cluster(
        workload, Scheduler("turns", lambda job, ran: ran, True, quantum_hours=0.5), Cluster(1, 0.0)
    )
    assert abs(schedule.ended[0] - schedule.ended[1]) <= 0.5
