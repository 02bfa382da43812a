"""Group commit: whatever arrived while the last commit was under way goes into the next one.

A request alone is committed at once; a hundred at a time share a transaction. Nothing lingers in the hope of company.
A run is in the hands of one flusher at a time, so that two transactions of this process never wait for one another.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.clock import Clock
from evalstop_service.errors import Closed, Overloaded, ServiceError
from evalstop_service.ingest.junction import take
from evalstop_service.ingest.live import LiveRuns
from evalstop_service.ingest.news import Arrival, Points, Receipt
from evalstop_service.store.database import Database, is_full, is_passing
from evalstop_service.telemetry import Telemetry
from evalstop_service.traces import Tracer

_log = logging.getLogger(__name__)

PAUSES_SECONDS = (0.02, 0.1, 0.3, 0.6, 1.0)
"""Before a transaction that failed for a passing reason is tried again; after the last its requests are refused."""


@dataclass(frozen=True)
class Limits:
    """How much is committed together, and how much may wait.

    `flushers`: transactions under way at one time; an embedded database has one writer. `requests` and `observations`:
    the most of one transaction. `waiting`: the most observations that wait or are being committed.
    """

    flushers: int = 4
    requests: int = 1000
    observations: int = 20_000
    waiting: int = 200_000


class _Job:
    """An arrival on its way, and who waits for what becomes of it: a loop's future or, without a loop, a thread's."""

    __slots__ = ("arrival", "future", "loop", "size", "traceparent")

    def __init__(
        self,
        arrival: Arrival,
        future: asyncio.Future[Receipt] | Future[Receipt],
        loop: asyncio.AbstractEventLoop | None,
        traceparent: str | None,
    ) -> None:
        self.arrival, self.future, self.loop, self.traceparent = arrival, future, loop, traceparent
        self.size = len(arrival.news.points) if isinstance(arrival.news, Points) else 1


class Committer:
    """Takes arrivals from any thread or event loop and answers each once its own transaction is durable."""

    def __init__(
        self,
        database: Database,
        live: LiveRuns,
        clock: Clock,
        telemetry: Telemetry,
        limits: Limits | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._database, self._live, self._clock, self._telemetry = database, live, clock, telemetry
        self._limits = limits or Limits()
        self._tracer = tracer or Tracer()
        self._wake = threading.Condition()
        self._turns: dict[asyncio.AbstractEventLoop, list[_Job]] = {}  # what came in this turn of a loop
        self._queues: dict[UUID, list[_Job]] = {}  # by run, longest waiting first
        self._busy: set[UUID] = set()
        self._waiting = 0
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def waiting(self) -> int:
        """Observations that wait for a commit or are in one."""
        return self._waiting

    def take(self, arrival: Arrival) -> Receipt:
        """Take an arrival in, from a thread that may wait. Raises NotFound, Conflict, Overloaded, and DBAPIError."""
        future: Future[Receipt] = Future()
        self._submit([_Job(arrival, future, None, self._tracer.here())])
        return future.result()

    async def soon(self, arrival: Arrival) -> Receipt:
        """Take an arrival in, from an event loop. Raises what `take` does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Receipt] = loop.create_future()
        job = _Job(arrival, future, loop, self._tracer.here())
        turn = self._turns.get(loop)
        if turn is None:  # whatever else arrives in this turn of the loop goes with it, and wakes a flusher once
            self._turns[loop] = [job]
            loop.call_soon(lambda: self._submit(self._turns.pop(loop)))
        else:
            turn.append(job)
        return await future

    def close(self) -> None:
        """Commit what waits, then end. Arrivals that come after this are refused."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _submit(self, jobs: Sequence[_Job]) -> None:
        """Queue what may wait and wake a flusher for it; what may not is told so at once."""
        refused: list[tuple[_Job, Exception]] = []
        with self._wake:
            for job in jobs:
                if self._closed:
                    refused.append((job, Closed()))
                elif self._waiting and self._waiting + job.size > self._limits.waiting:
                    refused.append((job, Overloaded()))
                else:
                    self._waiting += job.size
                    self._queues.setdefault(job.arrival.run_id, []).append(job)
            if self._idle:
                self._wake.notify()
            elif self._queues and len(self._threads) < self._limits.flushers:
                thread = threading.Thread(target=self._flush, name=f"flusher-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        if refused:
            self._telemetry.refused.labels("overloaded").inc(len(refused))
            _resolve(refused)

    def _flush(self) -> None:
        group: list[_Job] = []
        while True:
            with self._wake:
                self._busy -= {job.arrival.run_id for job in group}
                self._waiting -= sum(job.size for job in group)
                while not (group := self._next()):
                    if self._closed and not self._queues:
                        self._wake.notify_all()
                        return
                    self._idle += 1
                    self._wake.wait()
                    self._idle -= 1
                if self._queues and self._idle:
                    self._wake.notify()
                self._telemetry.waiting_observations.set(self._waiting)
            _tell(group, self._committed(group))

    def _next(self) -> list[_Job]:
        """What is committed next: the queues of runs that no flusher holds, as far as the limits go."""
        group: list[_Job] = []
        observations = 0
        for run_id in [run_id for run_id in self._queues if run_id not in self._busy]:
            queue = self._queues[run_id]
            taken = 0
            for job in queue:
                if group and (
                    len(group) >= self._limits.requests or observations + job.size > self._limits.observations
                ):
                    break
                group.append(job)
                observations += job.size
                taken += 1
            if taken:
                self._busy.add(run_id)
            if taken < len(queue):
                self._queues[run_id] = queue[taken:]
                break
            del self._queues[run_id]
        return group

    def _committed(self, group: Sequence[_Job]) -> list[Receipt | Exception]:
        """Each job's receipt, or why there is none. What one breaks, the others do not pay for."""
        try:
            return list(self._take(group))
        except sa.exc.DBAPIError as error:
            if is_passing(error) or is_full(error):
                return [error] * len(group)
            broken: Exception = error
        except Exception as error:
            broken = error
        if len(group) == 1:
            return [broken]
        _log.error("a commit of %d requests failed; each is tried alone", len(group), exc_info=broken)
        return [answer for job in group for answer in self._committed([job])]

    def _take(self, group: Sequence[_Job]) -> Sequence[Receipt | ServiceError]:
        arrivals = [job.arrival for job in group]
        for pause_seconds in (*PAUSES_SECONDS, None):
            begun = time.perf_counter()
            try:
                with self._tracer.span("commit", links=[job.traceparent for job in group], requests=len(group)):
                    answers = take(self._database, self._live, arrivals, self._clock(), self._telemetry, self._tracer)
            except sa.exc.DBAPIError as error:
                if pause_seconds is None or not is_passing(error):
                    raise
                _log.warning("a commit of %d requests failed (%s); it is tried again", len(group), error.orig)
                time.sleep(pause_seconds)
                continue
            self._measure(group, answers, time.perf_counter() - begun)
            return answers
        raise AssertionError("the last try returns or raises")

    def _measure(self, group: Sequence[_Job], answers: Sequence[Receipt | ServiceError], seconds: float) -> None:
        self._telemetry.commit_seconds.observe(seconds)
        self._telemetry.commit_requests.observe(len(group))
        receipts = [answer for answer in answers if isinstance(answer, Receipt)]
        counts = {
            "accepted": sum(receipt.accepted for receipt in receipts),
            "duplicate": sum(receipt.duplicates for receipt in receipts),
            "conflict": sum(len(receipt.contradictions) for receipt in receipts),
        }
        self._telemetry.commit_observations.observe(counts["accepted"])
        for result, count in counts.items():
            if count:
                self._telemetry.observations.labels(result).inc(count)


def _tell(group: Sequence[_Job], answers: Sequence[Receipt | Exception]) -> None:
    """Hand every answer to who waits for it; a loop is woken once for all of its own."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[_Job, Receipt | Exception]]] = defaultdict(list)
    for job, answer in zip(group, answers, strict=True):
        if job.loop is None:
            _resolve([(job, answer)])
        else:
            loops[job.loop].append((job, answer))
    for loop, pairs in loops.items():
        try:
            loop.call_soon_threadsafe(_resolve, pairs)
        except RuntimeError:  # closed: nobody waits any more
            _log.warning("%d requests were committed after their event loop had ended", len(pairs))


def _resolve(pairs: Sequence[tuple[_Job, Receipt | Exception]]) -> None:
    for job, answer in pairs:
        if job.future.done():  # cancelled: the client has gone
            continue
        if isinstance(answer, Exception):
            job.future.set_exception(answer)
        else:
            job.future.set_result(answer)
