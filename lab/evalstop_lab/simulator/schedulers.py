"""Who runs next: the schedulers that were there before anybody thought of stopping.

A scheduler is an order of jobs and two habits: whether it may pause what runs, and whether a job that does not fit
keeps those behind it waiting. The engine does the rest.

Sources     LAS and 2D-LAS: Tiresias (Gu et al., NSDI 2019), two queues by GPU-time, first come first served in each.
            SLAQ (Zhang et al., SoCC 2017): GPUs go where the loss is predicted to fall most.
Departs     Every job is a gang of fixed size and the order is taken greedily, as far as there are GPUs: SLAQ moves
            single cores. Nothing knows where GPUs stand: there is no placement and no network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from evalstop_lab.simulator.jobs import Job

GPU_HOURS_OF_SHORT_JOBS = 8.0
"""The threshold between the two queues of `2D-LAS`."""

QUANTUM_HOURS = 0.5


class Scheduler(Protocol):
    """How jobs are ordered; see the module's docstring.

    Of `preemptive` schedulers the order is taken anew, with those that run, when a job comes, ends, or crosses a
    threshold, and every `quantum_hours` while somebody waits (None: not by the clock).
    """

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def preemptive(self) -> bool:
        """Whether running jobs may be paused."""

    @property
    def strict(self) -> bool:
        """Whether nobody overtakes a job that does not fit."""

    @property
    def quantum_hours(self) -> float | None:
        """How often the order is looked at again."""

    def rank(self, job: Job, ran: float) -> float:
        """The place of a job that has run for so many hours: lower goes first, of equals the one submitted first."""

    def crossing(self, job: Job, ran: float) -> float | None:
        """The hours of running at which the rank of this job next jumps; None when it never does."""

    def stops(self, job: Job, evals: int) -> bool:
        """Whether the job is stopped now that so many of its evals are known."""


@dataclass(frozen=True)
class Ordered:
    """A scheduler that goes by an order and stops nobody."""

    name: str
    rank: Callable[[Job, float], float]
    preemptive: bool = False
    strict: bool = False
    quantum_hours: float | None = None

    def crossing(self, job: Job, ran: float) -> float | None:
        return None

    def stops(self, job: Job, evals: int) -> bool:
        return False


@dataclass(frozen=True)
class TwoQueues(Ordered):
    """Tiresias: who has had less than a threshold of GPU-hours goes before all others; in a queue, first come."""

    def crossing(self, job: Job, ran: float) -> float | None:
        at = GPU_HOURS_OF_SHORT_JOBS / job.gpus
        return at if at > ran else None


def _by_submission(job: Job, ran: float) -> float:
    return job.submitted


def _by_estimate(job: Job, ran: float) -> float:
    return job.estimate_hours


def _by_remaining(job: Job, ran: float) -> float:
    return job.hours - ran


def _by_estimated_remaining(job: Job, ran: float) -> float:
    """A job that has outrun its estimate is always about to end."""
    return max(job.estimate_hours - ran, 0.0)


def _by_attained(job: Job, ran: float) -> float:
    return ran


def _by_queue(job: Job, ran: float) -> float:
    return float(ran * job.gpus >= GPU_HOURS_OF_SHORT_JOBS * (1 - 1e-9))  # times carry rounding


def _by_loss_reduction(job: Job, ran: float) -> float:
    return _loss_reduction(job, job.evals_after(ran))


@lru_cache(maxsize=2**16)  # asked at every event, and new with every eval alone
def _loss_reduction(job: Job, known: int) -> float:
    """The last fall of the loss per GPU-hour, as a share of all its fall so far; who has shown nothing goes first."""
    if known < 2 or len(job.losses) < known:
        return -float("inf")
    first, before, last = job.losses[0], job.losses[known - 2], job.losses[known - 1]
    whole = max(first - min(job.losses[:known]), 1e-9)
    return -max(before - last, 0.0) / whole / (job.hours / job.evals * job.gpus)


FIFO = Ordered("FIFO", _by_submission, strict=True)
FIFO_SKIPPING = Ordered("FIFO-Skip", _by_submission)
SJF = Ordered("SJF", _by_estimate)
SRTF = Ordered("SRTF", _by_remaining, preemptive=True)
SRTF_EST = Ordered("SRTF-Est", _by_estimated_remaining, preemptive=True)
LAS = Ordered("LAS", _by_attained, preemptive=True, quantum_hours=QUANTUM_HOURS)
TIRESIAS = TwoQueues("2D-LAS", _by_queue, preemptive=True)
SLAQ = Ordered("SLAQ", _by_loss_reduction, preemptive=True, quantum_hours=QUANTUM_HOURS)

SCHEDULERS: dict[str, Scheduler] = {
    item.name: item for item in (FIFO, FIFO_SKIPPING, SJF, SRTF, SRTF_EST, LAS, TIRESIAS, SLAQ)
}
