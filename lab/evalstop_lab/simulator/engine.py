"""The discrete-event simulation: jobs arrive, start as gangs, are paused, and end.

Events are on a heap by (time, kind, sequence). All events of one instant are processed before GPUs are allocated, once.
An event of a job carries the job's version: starting, pausing and ending a job raise it, and events of an earlier
version are ignored.

A stop depends only on the job's own evals. So it is decided in advance (`ends`), and evals need no events.

A job that is set aside (`priorities`) runs only on idle GPUs, and is paused for any other job.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from evalstop_lab.simulator.jobs import NEVER_SET_ASIDE, Floats, Integers, Priorities, Priority, Workload
from evalstop_lab.simulator.schedulers import Scheduler

# Jobs that end or are set aside in an instant free GPUs for those that arrive in it.
FINISH, CHANGE, RETURN, CROSSING, QUANTUM, ARRIVAL = range(6)


@dataclass(frozen=True)
class Cluster:
    """`restore_hours` is the cost of resuming a paused job."""

    gpus: int = 64
    restore_hours: float = 0.1


@dataclass(frozen=True, eq=False)
class Schedule:
    """The result for each job. `ran` are hours of progress, `held` hours on its GPUs: progress and restores.

    `spells` are all periods on GPUs: job, start, end, in order of their ends. `contended` are the periods (start, end)
    in which a job that is not set aside waits. `set_aside` are the parts of `spells` in which the job was set aside:
    they cost no other job anything.
    """

    started: Floats
    ended: Floats
    ran: Floats
    held: Floats
    pauses: Integers
    spells: list[tuple[int, float, float]]
    contended: list[tuple[float, float]]
    set_aside: list[tuple[int, float, float]]
    events: int


def simulate_cluster(
    workload: Workload,
    scheduler: Scheduler,
    cluster: Cluster,
    ends: Floats | None = None,
    priorities: Priorities = NEVER_SET_ASIDE,
) -> Schedule:
    """Run all jobs to their ends.

    `ends`: after how many hours of running each job ends; by default after all of its hours. `priorities`: when jobs
    are set aside and return. Raises ValueError if a gang is larger than the cluster.
    """
    largest = max((job.gpus for job in workload.jobs), default=0)
    if largest > cluster.gpus:
        raise ValueError(f"a job needs {largest} GPUs, but the cluster has {cluster.gpus}; give it more")
    running = _Running(workload, scheduler, cluster, workload.hours if ends is None else ends, priorities)
    running.run()
    return running.schedule()


_Place = tuple[int, float, int]
"""The position of a running or waiting job, by priority first; lower ones go first."""

_NORMAL = int(Priority.NORMAL)
_FIRST_SET_ASIDE: _Place = (int(Priority.DEMOTED), -math.inf, 0)


class _Running:
    """The state of a cluster between two events."""

    def __init__(
        self, workload: Workload, scheduler: Scheduler, cluster: Cluster, ends: Floats, priorities: Priorities
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
        self._changes, self._set_aside_hours = priorities.changes, priorities.most_hours
        self._priority = [_NORMAL] * count
        self._changed, self._times_changed = [0] * count, [0] * count
        self._set_aside: dict[int, float] = {}  # running jobs that are set aside, and since when
        self._aside_spells: list[tuple[int, float, float]] = []
        self._contended: list[tuple[float, float]] = []
        self._contended_since: float | None = None
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._spells: list[tuple[int, float, float]] = []
        self._pushed = self._popped = 0
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
                elif kind == RETURN:
                    look = self._return(job, meant, now) or look
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
                self._popped += 1
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
            self._aside_spells,
            self._popped,
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
        """Set a running job aside or let it return, by its evals."""
        _, priority = self._changes[job][self._changed[job]]
        self._changed[job] += 1
        self._set_priority(job, priority, now)
        self._push_change(job)
        if priority is Priority.DEMOTED:
            self._pushed += 1
            meant = self._times_changed[job]
            heappush(self._heap, (now + self._set_aside_hours, RETURN, self._pushed, job, meant))

    def _return(self, job: int, meant: int, now: float) -> bool:
        """Let a job return that was demoted for long enough, running or waiting; returns whether it did."""
        if self._times_changed[job] != meant or not math.isnan(self._ended[job]):
            return False
        before = self._place(job, self._ran[job])
        self._set_priority(job, Priority.NORMAL, now)
        if job not in self._on:
            self._waiting.remove(before)
            insort(self._waiting, self._place(job, self._ran[job]))
        return True

    def _set_priority(self, job: int, priority: Priority, now: float) -> None:
        self._priority[job] = int(priority)
        self._times_changed[job] += 1
        if priority is Priority.NORMAL:
            self._end_aside(job, now)
        elif job in self._on:
            self._set_aside.setdefault(job, now)

    def _end_aside(self, job: int, now: float) -> None:
        since = self._set_aside.pop(job, None)
        if since is not None:
            self._aside_spells.append((job, since, now))

    def _record_contention(self, now: float) -> None:
        contended = bool(self._waiting) and self._waiting[0][0] == _NORMAL
        if contended and self._contended_since is None:
            self._contended_since = now
        elif not contended and self._contended_since is not None:
            self._contended.append((self._contended_since, now))
            self._contended_since = None

    def _place(self, job: int, ran: float) -> _Place:
        return self._priority[job], self._rank(self._jobs[job], ran), job

    def _fill(self, now: float) -> None:
        """Start, in order, the jobs that fit; others take the GPUs of jobs that are set aside, lowest priority
        first."""
        waiting, gpus = self._waiting, self._gpus
        index, blocked = 0, False
        while (self._free or self._set_aside) and index < len(waiting):
            priority, _, job = waiting[index]
            if priority == _NORMAL:
                fits = gpus[job] <= self._free or (bool(self._set_aside) and self._make_room(gpus[job], now))
                blocked = self._strict and not fits
            else:
                fits, blocked = gpus[job] <= self._free, False
            if fits:
                del waiting[index]
                self._start(job, now)
            else:
                index = bisect_left(waiting, _FIRST_SET_ASIDE) if blocked else index + 1

    def _make_room(self, gpus: int, now: float) -> bool:
        """Pause jobs that are set aside until enough GPUs are free; pauses none if that is not possible."""
        if self._free + sum(self._gpus[job] for job in self._set_aside) < gpus:
            return False
        latest_first = list(self._set_aside)[::-1]
        for job in sorted(latest_first, key=lambda job: -self._priority[job]):
            if self._free >= gpus:
                break
            self._pause(job, now)
        return True

    def _repack(self, now: float) -> None:
        """Reallocate GPUs, in order, to running and waiting jobs; pause those that get none."""
        priority, rank, jobs, ran, goes = self._priority, self._rank, self._jobs, self._ran, self._goes
        ranked = [
            (priority[job], rank(jobs[job], ran[job] + (now - goes[job]) if now > goes[job] else ran[job]), job)
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
        if self._priority[job] != _NORMAL:
            self._set_aside[job] = now
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
        if self._set_aside:
            self._end_aside(job, now)
        self._free += self._gpus[job]
        self._version[job] += 1
        since = self._since[job]
        self._held[job] += now - since
        self._spells.append((job, since, now))
