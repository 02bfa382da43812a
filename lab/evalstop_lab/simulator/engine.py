"""The discrete-event simulation: jobs arrive, start as gangs, are paused, and end.

Events are on a heap by (time, kind, sequence). All events of one instant are processed before GPUs are allocated, once.
An event of a job carries the job's version: starting, pausing and ending a job raise it, and events of an earlier
version are ignored.

A stop depends only on the job's own evals. So it is decided in advance (`ends`), and evals need no events.

A parked job runs only on idle GPUs, and is paused for any other job.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType

import numpy as np

from evalstop_lab.simulator.jobs import Floats, Integers, Parked, Workload
from evalstop_lab.simulator.schedulers import Scheduler

# Jobs that end or are parked in an instant free GPUs for those that arrive in it.
FINISH, CHANGE, CROSSING, QUANTUM, ARRIVAL = range(5)


@dataclass(frozen=True)
class Cluster:
    """`restore_hours` is the cost of resuming a paused job."""

    gpus: int = 64
    restore_hours: float = 0.1


@dataclass(frozen=True, eq=False)
class Schedule:
    """The result for each job. `ran` are hours of progress, `held` hours on its GPUs: progress and restores.

    `spells` are all periods on GPUs: job, start, end, in order of their ends. `parked` are the parts of them in which
    the job was parked, which cost no other job anything. `contended` are the periods (start, end) in which a job that
    is not parked waits.
    """

    started: Floats
    ended: Floats
    ran: Floats
    held: Floats
    pauses: Integers
    spells: list[tuple[int, float, float]]
    contended: list[tuple[float, float]]
    parked: list[tuple[int, float, float]]


def simulate_cluster(
    workload: Workload,
    scheduler: Scheduler,
    cluster: Cluster,
    ends: Floats | None = None,
    parked: Parked = MappingProxyType({}),
) -> Schedule:
    """Run all jobs to their ends.

    `ends`: after how many hours of running each job ends; by default after all of its hours. `parked`: when jobs
    are parked and return. Raises ValueError if a gang is larger than the cluster.
    """
    largest = max((job.gpus for job in workload.jobs), default=0)
    if largest > cluster.gpus:
        raise ValueError(f"a job needs {largest} GPUs, but the cluster has {cluster.gpus}; give it more")
    running = _Running(workload, scheduler, cluster, workload.hours if ends is None else ends, parked)
    running.run()
    return running.schedule()


_Place = tuple[int, float, int]
"""The position of a running or waiting job, whether it is parked first; lower ones go first."""

_FIRST_PARKED: _Place = (1, -math.inf, 0)


class _Running:
    """The state of a cluster between two events."""

    def __init__(
        self, workload: Workload, scheduler: Scheduler, cluster: Cluster, ends: Floats, parked: Parked
    ) -> None:
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
        self._changes, self._changed = parked, [0] * count
        self._is_parked = [0] * count
        self._parked: dict[int, float] = {}  # running jobs that are parked, and since when
        self._parked_spells: list[tuple[int, float, float]] = []
        self._contended: list[tuple[float, float]] = []
        self._contended_since: float | None = None
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
                elif kind == CROSSING:
                    look = True
                else:
                    self._apply_change(job, now)
                    look = True
            if look and self._waiting:
                if self._preemptive:
                    self._repack(now)
                else:
                    self._fill(now)
            if look:
                self._record_contention(now)

    def schedule(self) -> Schedule:
        return Schedule(
            np.array(self._started),
            np.array(self._ended),
            np.array(self._ran),
            np.array(self._held),
            np.array(self._pauses, dtype=np.int64),
            self._spells,
            self._contended,
            self._parked_spells,
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

    def _push_change(self, job: int) -> None:
        changes, number = self._changes.get(job, ()), self._changed[job]
        if number < len(changes):
            at = self._jobs[job].eval_at(changes[number][0])
            self._push(self._goes[job] + max(at - self._ran[job], 0.0), CHANGE, job)

    def _apply_change(self, job: int, now: float) -> None:
        """Park a running job or let it return, by its evals."""
        _, parked = self._changes[job][self._changed[job]]
        self._changed[job] += 1
        self._is_parked[job] = int(parked)
        if parked:
            self._parked.setdefault(job, now)
        else:
            self._end_parking(job, now)
        self._push_change(job)

    def _end_parking(self, job: int, now: float) -> None:
        since = self._parked.pop(job, None)
        if since is not None:
            self._parked_spells.append((job, since, now))

    def _record_contention(self, now: float) -> None:
        contended = bool(self._waiting) and not self._waiting[0][0]
        if contended and self._contended_since is None:
            self._contended_since = now
        elif not contended and self._contended_since is not None:
            self._contended.append((self._contended_since, now))
            self._contended_since = None

    def _place(self, job: int, ran: float) -> _Place:
        return self._is_parked[job], self._rank(self._jobs[job], ran), job

    def _fill(self, now: float) -> None:
        """Start, in order, the jobs that fit; others take the GPUs of parked jobs, of those parked last first."""
        waiting, gpus = self._waiting, self._gpus
        index, blocked = 0, False
        while (self._free or self._parked) and index < len(waiting):
            parked, _, job = waiting[index]
            fits = gpus[job] <= self._free
            if not parked:
                fits = fits or (bool(self._parked) and self._make_room(gpus[job], now))
            blocked = self._strict and not fits and not parked
            if fits:
                del waiting[index]
                self._start(job, now)
            else:
                index = bisect_left(waiting, _FIRST_PARKED) if blocked else index + 1

    def _make_room(self, gpus: int, now: float) -> bool:
        """Pause parked jobs until enough GPUs are free; pauses none if that is not possible."""
        if self._free + sum(self._gpus[job] for job in self._parked) < gpus:
            return False
        for job in list(self._parked)[::-1]:
            if self._free >= gpus:
                break
            self._pause(job, now)
        return True

    def _repack(self, now: float) -> None:
        """Reallocate GPUs, in order, to running and waiting jobs; pause those that get none."""
        parked, rank, jobs, ran, goes = self._is_parked, self._rank, self._jobs, self._ran, self._goes
        ranked = [
            (parked[job], rank(jobs[job], ran[job] + (now - goes[job]) if now > goes[job] else ran[job]), job)
            for job in self._on
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
        for _, _, job in ranked:
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
        self._waiting = [item for item in self._waiting if item[2] not in staying]
        for job in chosen:
            if job not in on:
                self._start(job, now)

    def _progress(self, job: int, now: float) -> float:
        goes = self._goes[job]
        return self._ran[job] + (now - goes) if now > goes else self._ran[job]

    def _start(self, job: int, now: float) -> None:
        self._on[job] = None
        if self._is_parked[job]:
            self._parked[job] = now
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
        if self._changes:
            self._push_change(job)
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
        if self._parked:
            self._end_parking(job, now)
        self._free += self._gpus[job]
        self._version[job] += 1
        since = self._since[job]
        self._held[job] += now - since
        self._spells.append((job, since, now))
