"""Schedulers, which order jobs.

A scheduler is an order of jobs and two properties: whether it may pause running jobs, and whether a job that does not
fit blocks the jobs behind it. The engine does the rest.

Sources     LAS and 2D-LAS: Tiresias (Gu et al., NSDI 2019), two queues by GPU-time, first come first served in each.
            SLAQ (Zhang et al., SoCC 2017): GPUs are allocated to the jobs with the largest predicted loss reduction.
Departs     Every job is a gang of fixed size, and GPUs are allocated greedily in order; SLAQ allocates single cores.
            There is no placement and no network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from evalstop_lab.simulator.jobs import Job

GPU_HOURS_OF_SHORT_JOBS = 8.0
"""The threshold between the two queues of `2D-LAS`."""

QUANTUM_HOURS = 0.5


def _crosses_nothing(job: Job, ran: float) -> float | None:
    return None


@dataclass(frozen=True)
class Scheduler:
    """How jobs are ordered; see the module's docstring.

    `rank`: the rank of a job by its hours of running; the lowest goes first, ties by submission. `preemptive`: running
    jobs may be paused; all jobs are ordered again when a job arrives, ends or crosses a threshold, and every
    `quantum_hours` while a job waits (None: never). `strict`: no job overtakes one that does not fit. `crossing`: the
    hours of running at which the rank next jumps, by the current hours; None: never.
    """

    name: str
    rank: Callable[[Job, float], float]
    preemptive: bool = False
    strict: bool = False
    quantum_hours: float | None = None
    crossing: Callable[[Job, float], float | None] = _crosses_nothing


def _by_submission(job: Job, ran: float) -> float:
    return job.submitted


def _by_estimate(job: Job, ran: float) -> float:
    return job.estimate_hours


def _by_remaining(job: Job, ran: float) -> float:
    return job.hours - ran


def _by_estimated_remaining(job: Job, ran: float) -> float:
    """A job that has exceeded its estimate has the remaining time 0."""
    return max(job.estimate_hours - ran, 0.0)


def _by_attained(job: Job, ran: float) -> float:
    return ran


def _by_queue(job: Job, ran: float) -> float:
    return float(ran * job.gpus >= GPU_HOURS_OF_SHORT_JOBS * (1 - 1e-9))  # times have rounding errors


def _leaves_queue(job: Job, ran: float) -> float | None:
    at = GPU_HOURS_OF_SHORT_JOBS / job.gpus
    return at if at > ran else None


def _by_loss_reduction(job: Job, ran: float) -> float:
    return _rank_by_loss(job, job.evals_after(ran))


@lru_cache(maxsize=2**16)  # called at every event, but changes only with an eval
def _rank_by_loss(job: Job, eval_count: int) -> float:
    """Minus the last loss reduction per GPU-hour, as a share of the total reduction; jobs without one go first."""
    if eval_count < 2 or len(job.losses) < eval_count:
        return -float("inf")
    first, before, last = job.losses[0], job.losses[eval_count - 2], job.losses[eval_count - 1]
    whole = max(first - min(job.losses[:eval_count]), 1e-9)
    return -max(before - last, 0.0) / whole / (job.hours / job.evals * job.gpus)


FIFO = Scheduler("FIFO", _by_submission, strict=True)
FIFO_SKIPPING = Scheduler("FIFO-Skip", _by_submission)
SJF = Scheduler("SJF", _by_estimate)
SRTF = Scheduler("SRTF", _by_remaining, preemptive=True)
SRTF_EST = Scheduler("SRTF-Est", _by_estimated_remaining, preemptive=True)
LAS = Scheduler("LAS", _by_attained, preemptive=True, quantum_hours=QUANTUM_HOURS)
TIRESIAS = Scheduler("2D-LAS", _by_queue, preemptive=True, crossing=_leaves_queue)
SLAQ = Scheduler("SLAQ", _by_loss_reduction, preemptive=True, quantum_hours=QUANTUM_HOURS)

SCHEDULERS: dict[str, Scheduler] = {
    item.name: item for item in (FIFO, FIFO_SKIPPING, SJF, SRTF, SRTF_EST, LAS, TIRESIAS, SLAQ)
}
