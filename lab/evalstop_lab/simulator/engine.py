"""The discrete-event simulation: jobs arrive, start as gangs, are paused, and end.

Events are on a heap by (time, kind, sequence). All events of one instant are processed before GPUs are allocated, once.
An event of a job carries the job's version: starting, pausing and ending a job raise it, and events of an earlier
version are ignored.

A stop depends only on the job's own evals. So it is decided in advance (`ends`), and evals need no events.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from evalstop_lab.simulator.jobs import Floats, Integers, Workload
from evalstop_lab.simulator.schedulers import Scheduler

# Jobs that end in an instant free GPUs for those that arrive in it.
FINISH, CROSSING, QUANTUM, ARRIVAL = range(4)


@dataclass(frozen=True)
class Cluster:
    """`restore_hours` is the cost of resuming a paused job."""

    gpus: int = 64
    restore_hours: float = 0.1


@dataclass(frozen=True, eq=False)
class Schedule:
    """The result for each job. `ran` are hours of progress, `held` hours on its GPUs: progress and restores.

    `spells` are all periods on GPUs: job, start, end, in order of their ends.
    """

    started: Floats
    ended: Floats
    ran: Floats
    held: Floats
    pauses: Integers
    spells: list[tuple[int, float, float]]


def simulate_cluster(
    workload: Workload, scheduler: Scheduler, cluster: Cluster, ends: Floats | None = None
) -> Schedule:
    """Run all jobs to their ends.

    `ends`: after how many hours of running each job ends; by default after all of its hours. Raises ValueError if a
    gang is larger than the cluster.
    """
    largest = max((job.gpus for job in workload.jobs), default=0)
    if largest > cluster.gpus:
        raise ValueError(f"a job needs {largest} GPUs, but the cluster has {cluster.gpus}; give it more")
    running = _Running(workload, scheduler, cluster, workload.hours if ends is None else ends)
    running.run()
    return running.schedule()


_Place = tuple[float, int]
"""The position of a running or waiting job; lower ones go first."""


class _Running:
    """The state of a cluster between two events."""

    def __init__(self, workload: Workload, scheduler: Scheduler, cluster: Cluster, ends: Floats) -> None:
        count = len(workload.jobs)
        self._jobs, self._cluster = workload.jobs, cluster
        self._gpus = [job.gpus for job in workload.jobs]
        self._rank, self._crossing = scheduler.rank, scheduler.crossing
        self._preemptive, self._strict = scheduler.preemptive, scheduler.strict
        self._quantum = scheduler.quantum_hours
        self._end = ends.tolist()
        self._free = cluster.gpus
        self._waiting: list[_Place] = []  # in order
        self._on: dict[int, None] = {}  # running jobs, in order of their starts
        self._version = [0] * count
        self._ran, self._held = [0.0] * count, [0.0] * count  # up to the last pause
        self._since, self._goes = [0.0] * count, [0.0] * count  # on GPUs since, and progressing since
        self._pauses = [0] * count
        self._started, self._ended = [math.nan] * count, [math.nan] * count
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._spells: list[tuple[int, float, float]] = []
        self._pushed = 0
        self._ticking = False
        if count:
            self._push(workload.jobs[0].submitted, ARRIVAL, 0)

    def run(self) -> None:
        heap, version = self._heap, self._version
        while heap:
            now = heap[0][0]
            look = False
            while heap and heap[0][0] == now:
                _, kind, _, job, meant = heappop(heap)
                if kind == ARRIVAL:
                    self._arrive(job)
                    look = True
                elif kind == QUANTUM:
                    self._ticking = False
                    look = True
                elif version[job] != meant:
                    continue
                elif kind == FINISH:
                    self._finish(job, now)
                    look = True
                else:
                    look = True
            if look and self._waiting:
                if self._preemptive:
                    self._repack(now)
                else:
                    self._fill(now)

    def schedule(self) -> Schedule:
        return Schedule(
            np.array(self._started),
            np.array(self._ended),
            np.array(self._ran),
            np.array(self._held),
            np.array(self._pauses, dtype=np.int64),
            self._spells,
        )

    def _push(self, time: float, kind: int, job: int) -> None:
        self._pushed += 1
        heappush(self._heap, (time, kind, self._pushed, job, self._version[job]))

    def _arrive(self, job: int) -> None:
        insort(self._waiting, self._place(job, 0.0))
        if job + 1 < len(self._jobs):
            self._push(self._jobs[job + 1].submitted, ARRIVAL, job + 1)

    def _finish(self, job: int, now: float) -> None:
        self._leave(job, now)
        self._ran[job] = self._end[job]
        self._ended[job] = now

    def _place(self, job: int, ran: float) -> _Place:
        return self._rank(self._jobs[job], ran), job

    def _fill(self, now: float) -> None:
        """Start, in order, the jobs that fit."""
        waiting, index = self._waiting, 0
        while self._free and index < len(waiting):
            _, job = waiting[index]
            if self._gpus[job] <= self._free:
                del waiting[index]
                self._start(job, now)
            elif self._strict:
                break
            else:
                index += 1

    def _repack(self, now: float) -> None:
        """Reallocate GPUs, in order, to running and waiting jobs; pause those that get none."""
        rank, jobs, ran, goes = self._rank, self._jobs, self._ran, self._goes
        ranked = [
            (rank(jobs[job], ran[job] + (now - goes[job]) if now > goes[job] else ran[job]), job) for job in self._on
        ]
        if not ranked or max(ranked) < self._waiting[0]:  # all running jobs continue
            self._fill(now)
        else:
            self._give_out(ranked + self._waiting, now)
        if self._quantum is not None and self._waiting and not self._ticking:
            self._ticking = True
            self._push(now + self._quantum, QUANTUM, 0)

    def _give_out(self, ranked: list[_Place], now: float) -> None:
        on, gpus, free = self._on, self._gpus, self._cluster.gpus
        chosen = []
        ranked.sort()
        for _, job in ranked:
            if gpus[job] <= free:
                chosen.append(job)
                free -= gpus[job]
                if not free:
                    break
            elif self._strict:
                break
        staying = set(chosen)
        if staying == on.keys():
            return
        for job in [job for job in on if job not in staying]:
            self._pause(job, now)
        self._waiting = [item for item in self._waiting if item[1] not in staying]
        for job in chosen:
            if job not in on:
                self._start(job, now)

    def _progress(self, job: int, now: float) -> float:
        goes = self._goes[job]
        return self._ran[job] + (now - goes) if now > goes else self._ran[job]

    def _start(self, job: int, now: float) -> None:
        self._on[job] = None
        self._free -= self._gpus[job]
        self._version[job] += 1
        self._since[job] = goes = now
        if self._pauses[job]:
            goes += self._cluster.restore_hours
        else:
            self._started[job] = now
        self._goes[job] = goes
        ran = self._ran[job]
        self._push(goes + max(self._end[job] - ran, 0.0), FINISH, job)
        crossing = self._crossing(self._jobs[job], ran)
        if crossing is not None:
            self._push(goes + (crossing - ran), CROSSING, job)

    def _pause(self, job: int, now: float) -> None:
        self._ran[job] = self._progress(job, now)
        self._pauses[job] += 1
        self._leave(job, now)
        insort(self._waiting, self._place(job, self._ran[job]))

    def _leave(self, job: int, now: float) -> None:
        del self._on[job]
        self._free += self._gpus[job]
        self._version[job] += 1
        since = self._since[job]
        self._held[job] += now - since
        self._spells.append((job, since, now))
