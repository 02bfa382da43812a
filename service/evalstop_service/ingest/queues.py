"""What waits to be committed: by run, in the order in which it came, and each run in one commit at a time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from uuid import UUID

from evalstop_service.ingest.messages import Arrival, Points, Receipt


@dataclass(frozen=True)
class Limits:
    """How much is committed together, and how much may wait.

    `flushers`: transactions under way at one time; an embedded database has one writer. `requests` and `observations`:
    the most of one transaction. `direct`: the most observations of one statement on the event loop, which each of them
    holds up for some microseconds. `waiting`: the most observations that wait or are being committed.
    """

    flushers: int = 4
    requests: int = 1000
    observations: int = 20_000
    direct: int = 800
    waiting: int = 200_000


class Job:
    """An arrival on its way, and who waits for what becomes of it: a loop's future or, without a loop, a thread's.

    `thorough`: it takes a transaction. `mistaken`: its run was not as it was remembered.
    """

    __slots__ = ("arrival", "future", "loop", "mistaken", "size", "thorough", "traceparent")

    def __init__(
        self,
        arrival: Arrival,
        future: asyncio.Future[Receipt] | Future[Receipt],
        loop: asyncio.AbstractEventLoop | None,
        traceparent: str | None,
    ) -> None:
        self.arrival, self.future, self.loop, self.traceparent = arrival, future, loop, traceparent
        self.thorough = not isinstance(arrival.news, Points)
        self.size = len(arrival.news.points) if isinstance(arrival.news, Points) else 1
        self.mistaken = False


Answers = Sequence[Receipt | Exception | None]
"""What became of each job of a group; None: it is still to be done, thoroughly."""


class Queues:
    """The jobs of a committer, which holds its lock while it speaks to them.

    `jobs`, `size`: those that wait for a commit or are in one, and their observations.
    """

    def __init__(self, limits: Limits) -> None:
        self.jobs = self.size = 0
        self._limits = limits
        self._by_run: dict[UUID, list[Job]] = {}  # longest waiting first
        self._busy: set[UUID] = set()

    def __bool__(self) -> bool:
        return bool(self._by_run)

    @property
    def is_done(self) -> bool:
        """Whether nothing waits, and nothing is being committed."""
        return not self._by_run and not self._busy

    @property
    def need_a_flusher(self) -> bool:
        """Whether any job that could be taken now takes a transaction."""
        return any(queue[0].thorough for queue in self._free())

    def admit(self, job: Job) -> bool:
        """Add a job, unless too much waits already."""
        if self.size and self.size + job.size > self._limits.waiting:
            return False
        job.thorough |= job.size > self._limits.direct
        self.jobs += 1
        self.size += job.size
        self._by_run.setdefault(job.arrival.run_id, []).append(job)
        return True

    def take_thorough(self) -> list[Job]:
        """The jobs that the next transaction takes, as far as the limits go; those of runs in no other commit."""
        group: list[Job] = []
        size = 0
        for job in self._next(thorough=True):
            if group and (len(group) >= self._limits.requests or size + job.size > self._limits.observations):
                break
            group.append(job)
            size += job.size
        return self._taken(group)

    def take_direct(self) -> list[Job]:
        """All the jobs that take no transaction; what is too much for one statement takes one, and costs less in it."""
        group: list[Job] = []
        size = 0
        for job in self._next(thorough=False):
            group.append(job)
            size += job.size
            if len(group) > 1 and (len(group) > self._limits.requests or size > self._limits.direct):
                self.make_thorough()
                return []
        return self._taken(group)

    def make_thorough(self) -> None:
        """Let all that waits take transactions."""
        for queue in self._by_run.values():
            for job in queue:
                job.thorough = True

    def ended(self, group: Sequence[Job], answers: Answers) -> None:
        """A commit is over: what has no answer waits again, thoroughly and before all else of its run."""
        left: dict[UUID, list[Job]] = defaultdict(list)
        for job, answer in zip(group, answers, strict=True):
            self._busy.discard(job.arrival.run_id)
            if answer is None:
                job.thorough = True
                left[job.arrival.run_id].append(job)
            else:
                self.jobs -= 1
                self.size -= job.size
        for run_id, jobs in left.items():
            self._by_run[run_id] = jobs + self._by_run.get(run_id, [])

    def _free(self) -> Iterator[list[Job]]:
        """The queues of the runs that are in no commit."""
        return (queue for run_id, queue in self._by_run.items() if run_id not in self._busy)

    def _next(self, *, thorough: bool) -> Iterator[Job]:
        """Of each of these queues the jobs up to the first one of the other kind."""
        for queue in self._free():
            for job in queue:
                if job.thorough is not thorough:
                    break
                yield job

    def _taken(self, group: list[Job]) -> list[Job]:
        """A group, no longer queued: of each run what had waited longest."""
        counts: dict[UUID, int] = {}
        for job in group:
            counts[job.arrival.run_id] = counts.get(job.arrival.run_id, 0) + 1
        for run_id, count in counts.items():
            if count == len(self._by_run[run_id]):
                del self._by_run[run_id]
            else:
                del self._by_run[run_id][:count]
        self._busy |= counts.keys()
        return group
