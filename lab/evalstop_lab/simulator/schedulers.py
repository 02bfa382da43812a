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


@dataclass(frozen=True)
class Scheduler:
    """How jobs are ordered; see the module's docstring.

    `rank`: the rank of a job by its hours of running; the lowest goes first, ties by submission. `preemptive`: running
    jobs may be paused; all jobs are ordered again when a job arrives, ends or crosses a threshold, and every
    `quantum_hours` while a job waits (None: never). `strict`: a job that does not fit blocks those behind it.
    `crossing`: the
    hours of running at which the rank next jumps, by the current hours; None: never.
    """

    name: str
    rank: Callable[[Job, float], float]
    preemptive: bool = False
    strict: bool = False
    quantum_hours: float | None = None
    crossing: Callable[[Job, float], float | None] = lambda job, ran: None


def _by_queue(job: Job, ran: float) -> float:
    return float(ran * job.gpus >= GPU_HOURS_OF_SHORT_JOBS * (1 - 1e-9))  # times have rounding errors


def _leaves_queue(job: Job, ran: float) -> float | None:
    at = GPU_HOURS_OF_SHORT_JOBS / job.gpus
    return at if at > ran else None


@lru_cache(maxsize=2**16)  # called at every event, but changes only with an eval
def _rank_by_loss(job: Job, eval_count: int) -> float:
    """Minus the last loss reduction per GPU-hour, as a share of the total reduction; jobs without one go first."""
    if eval_count < 2 or len(job.losses) < eval_count:
        return -float("inf")
    first, before, last = job.losses[0], job.losses[eval_count - 2], job.losses[eval_count - 1]
    whole = max(first - min(job.losses[:eval_count]), 1e-9)
    return -max(before - last, 0.0) / whole / (job.hours / job.evals * job.gpus)


FIFO = Scheduler("FIFO", lambda job, ran: job.submitted, strict=True)
FIFO_SKIPPING = Scheduler("FIFO-Skip", lambda job, ran: job.submitted)
SJF = Scheduler("SJF", lambda job, ran: job.estimate_hours)
SRTF = Scheduler("SRTF", lambda job, ran: job.hours - ran, preemptive=True)
# A job that has exceeded its estimate has the remaining time 0.
SRTF_EST = Scheduler("SRTF-Est", lambda job, ran: max(job.estimate_hours - ran, 0.0), preemptive=True)
LAS = Scheduler("LAS", lambda job, ran: ran, preemptive=True, quantum_hours=QUANTUM_HOURS)
TIRESIAS = Scheduler("2D-LAS", _by_queue, preemptive=True, crossing=_leaves_queue)
SLAQ = Scheduler(
    "SLAQ", lambda job, ran: _rank_by_loss(job, job.evals_after(ran)), preemptive=True, quantum_hours=QUANTUM_HOURS
)

SCHEDULERS: dict[str, Scheduler] = {
    item.name: item for item in (FIFO, FIFO_SKIPPING, SJF, SRTF, SRTF_EST, LAS, TIRESIAS, SLAQ)
}
