"""Group commit: whatever arrived while the last commit was under way goes into the next one.

A request alone is committed at once; a hundred at a time share a transaction. Nothing lingers in the hope of company.
Of a crowd one half goes ahead, and is stored while the other is still being read: neither waits for the other's turn.
A run is in the hands of one commit at a time, so that two transactions of this process never wait for one another.

    soon, take ──> queues, by run ──┬──> on the event loop: FromMemory, one statement     few points that follow
                                    └──> flushers, threads: a transaction                 all else, what is left over
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial

import sqlalchemy as sa

from evalstop_service.clock import Clock
from evalstop_service.errors import Closed, Overloaded, ServiceError
from evalstop_service.ingest.apply import take
from evalstop_service.ingest.from_memory import FromMemory
from evalstop_service.ingest.messages import Arrival, Receipt
from evalstop_service.ingest.queues import Answers, Job, Limits, Queues
from evalstop_service.ingest.run_cache import LiveRuns
from evalstop_service.ingest.unit_of_work import Moved
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.observability.tracing import Tracer
from evalstop_service.store.database import Database, is_disk_full, is_transient
from evalstop_service.store.direct import Direct

_log = logging.getLogger(__name__)

PAUSES_SECONDS = (0.02, 0.1, 0.3, 0.6, 1.0)
"""Before a transaction that failed for a passing reason is tried again; after the last its requests are refused."""

CROWD = 8
"""Requests under way together, from which on it is quicker to commit them by halves."""

FADING = 0.97
"""Of the largest crowd that is remembered, at each submission: what is left of it."""


class Committer:
    """Takes arrivals from any thread or event loop and answers each once its own transaction is durable."""

    def __init__(
        self,
        database: Database,
        live: LiveRuns,
        clock: Clock,
        service_metrics: ServiceMetrics,
        limits: Limits | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._database, self._live, self._clock, self._service_metrics = database, live, clock, service_metrics
        self._limits = limits or Limits()
        self._queues = Queues(self._limits)
        service_metrics.waiting_observations.set_function(lambda: self._queues.size)
        self._tracer = tracer or Tracer()
        lock = threading.RLock()
        self._wake = threading.Condition(lock)  # of flushers
        self._done = threading.Condition(lock)  # of who closes, whom a call for one flusher must not reach instead
        self._turns: dict[asyncio.AbstractEventLoop, list[Job]] = {}  # what came in this turn of a loop
        self._crowd = 0.0  # how many requests were under way together lately
        self._unfinished: list[tuple[list[Job], FromMemory]] = []  # worked in, and to be gone on with by a flusher
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._direct: Direct | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the direct connections

    @property
    def waiting(self) -> int:
        """Observations that wait for a commit or are in one."""
        return self._queues.size

    @asynccontextmanager
    async def at_home(self) -> AsyncIterator[None]:
        """Commit on this event loop what can be, for the length of a block; ends as `close` does."""
        if not self._database.embedded:
            self._loop = asyncio.get_running_loop()
            most = min(self._limits.flushers, self._database.direct_connections)
            self._direct = Direct(self._database, most, self._go)
            await self._direct.open()
        try:
            yield
        finally:
            await asyncio.to_thread(self.close)
            if self._direct is not None:
                await self._direct.close()

    def take(self, arrival: Arrival) -> Receipt:
        """Take an arrival in, from a thread that may wait. Raises NotFound, Conflict, Overloaded, and DBAPIError."""
        future: Future[Receipt] = Future()
        self._submit([Job(arrival, future, None, self._tracer.here())])
        return future.result()

    async def soon(self, arrival: Arrival) -> Receipt:
        """Take an arrival in, from an event loop. Raises what `take` does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Receipt] = loop.create_future()
        job = Job(arrival, future, loop, self._tracer.here())
        turn = self._turns.setdefault(loop, [])
        turn.append(job)
        if len(turn) >= max(self._crowd, CROWD) / 2:  # one half is stored while the other is still being read
            self._submit_turn(loop)
        elif len(turn) == 1:  # whatever else arrives in this turn of the loop goes with it, and wakes a flusher once
            loop.call_soon(self._submit_turn, loop)
        return await future

    def close(self) -> None:
        """Commit what waits, then end. Arrivals that come after this are refused."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            self._done.wait_for(lambda: self._queues.is_done)
        for thread in self._threads:
            thread.join()

    def _submit_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        if jobs := self._turns.pop(loop, None):
            self._submit(jobs)

    def _submit(self, jobs: Sequence[Job]) -> None:
        """Queue what may wait and see to it; what may not is told so at once."""
        refused: list[tuple[Job, Receipt | Exception]] = []
        with self._wake:
            for job in jobs:
                job.thorough |= self._direct is None
                if self._closed:
                    refused.append((job, Closed()))
                elif not self._queues.admit(job):
                    refused.append((job, Overloaded()))
            self._crowd = max(self._queues.jobs, self._crowd * FADING)
        if refused:
            self._service_metrics.refused.labels("overloaded").inc(len(refused))
            _resolve(refused)
        self._see_to_all()

    def _see_to_all(self) -> None:
        """Have what is queued taken by whoever can, from any thread."""
        if self._loop is None or self._direct is None:
            self._wake_a_flusher()
        elif _running_loop() is self._loop:
            self._go()
        else:
            self._loop.call_soon_threadsafe(self._go)

    def _wake_a_flusher(self) -> None:
        with self._wake:
            if self._idle:
                self._wake.notify()
            elif (self._queues or self._unfinished) and len(self._threads) < self._limits.flushers:
                thread = threading.Thread(target=self._flush, name=f"flusher-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    # --- on the event loop of the direct connections

    def _go(self) -> None:
        """Begin to commit directly what is queued and can be; the rest is for the flushers."""
        assert self._direct is not None
        while True:
            with self._wake:
                if not self._direct.is_open:
                    self._queues.make_thorough()
                group = self._queues.take_direct() if self._direct.is_idle else []
                leave = self._queues.need_a_flusher
            if not group:
                break
            self._begin(group, self._direct)
        if leave:
            self._wake_a_flusher()

    def _begin(self, group: list[Job], direct: Direct) -> None:
        begun = time.perf_counter()
        try:
            worked_in = FromMemory(self._live, [job.arrival for job in group], self._clock())
            parameters = worked_in.stroke.parameters
        except Exception:
            _log.exception("%d requests could not be worked in from memory; they are tried thoroughly", len(group))
            self._end(group, [None] * len(group))
            return
        if not any(worked_in.answers):
            self._end(group, worked_in.answers)
        elif worked_in.is_whole:
            ended = self._tracer.begin("commit", links=[job.traceparent for job in group], requests=len(group))
            direct.save(parameters, partial(self._came, group, worked_in, begun, ended))
        else:
            with self._wake:
                self._unfinished.append((group, worked_in))
            self._wake_a_flusher()

    def _came(
        self, group: list[Job], worked_in: FromMemory, begun: float, ended: Callable[[], None], saved: bool | None
    ) -> None:
        """A direct commit has ended."""
        ended()
        if saved:
            worked_in.remember(self._service_metrics)
            self._measure(worked_in.answers, time.perf_counter() - begun)
            self._end(group, worked_in.answers)
        else:
            self._end(group, self._mistaken(group) if saved is False else [None] * len(group))

    # --- in a flusher

    def _flush(self) -> None:
        while True:
            with self._wake:
                while not self._unfinished and not (group := self._queues.take_thorough()):
                    if self._closed and self._queues.is_done:
                        return
                    self._idle += 1
                    self._wake.wait()
                    self._idle -= 1
                worked_in = None
                if self._unfinished:  # a stop may wait in it
                    group, worked_in = self._unfinished.pop(0)
                if self._idle and (self._unfinished or self._queues.need_a_flusher):
                    self._wake.notify()
            self._end(group, self._committed(group) if worked_in is None else self._gone_on(group, worked_in))

    def _gone_on(self, group: Sequence[Job], worked_in: FromMemory) -> Answers:
        """Store what was worked in from memory, and do what follows from it."""
        begun = time.perf_counter()
        try:
            with self._tracer.span("commit", links=[job.traceparent for job in group], requests=len(group)):
                worked_in.go_on(self._database)
        except Moved:
            return self._mistaken(group)
        except Exception as error:
            _log.warning("what was worked in from memory could not be stored (%s); it is tried again", error)
            return [None] * len(group)
        worked_in.remember(self._service_metrics)
        self._measure(worked_in.answers, time.perf_counter() - begun)
        return worked_in.answers

    def _committed(self, group: Sequence[Job]) -> Answers:
        """Each job's receipt, or why there is none. What one breaks, the others do not pay for."""
        try:
            return self._take(group)
        except sa.exc.DBAPIError as error:
            if is_transient(error) or is_disk_full(error):
                return [error] * len(group)
            broken: Exception = error
        except Exception as error:
            broken = error
        if len(group) == 1:
            return [broken]
        _log.error("a commit of %d requests failed; each is tried alone", len(group), exc_info=broken)
        return [answer for job in group for answer in self._committed([job])]

    def _take(self, group: Sequence[Job]) -> Sequence[Receipt | ServiceError]:
        arrivals = [job.arrival for job in group]
        mistaken = {job.arrival.run_id for job in group if job.mistaken}
        for pause_seconds in (*PAUSES_SECONDS, None):
            begun = time.perf_counter()
            try:
                with self._tracer.span("commit", links=[job.traceparent for job in group], requests=len(group)):
                    answers = take(
                        self._database,
                        self._live,
                        arrivals,
                        self._clock(),
                        self._service_metrics,
                        self._tracer,
                        mistaken=mistaken,
                    )
            except sa.exc.DBAPIError as error:
                if pause_seconds is None or not is_transient(error):
                    raise
                _log.warning("a commit of %d requests failed (%s); it is tried again", len(group), error.orig)
                time.sleep(pause_seconds)
                continue
            self._measure(answers, time.perf_counter() - begun)
            return answers
        raise AssertionError("the last try returns or raises")

    # --- in either

    def _mistaken(self, group: Sequence[Job]) -> Answers:
        """All is to be done again: which run was not as it was remembered is not told."""
        self._service_metrics.live_runs.labels("mistaken").inc()
        for job in group:
            job.mistaken = True
        return [None] * len(group)

    def _end(self, group: Sequence[Job], answers: Answers) -> None:
        """A group's commit is over, and what has no answer is seen to again."""
        with self._wake:
            self._queues.ended(group, answers)
            queued = bool(self._queues)
            if self._closed:
                self._wake.notify_all()
                self._done.notify_all()
        _tell(group, answers)
        if queued:
            self._see_to_all()

    def _measure(self, answers: Answers, seconds: float) -> None:
        receipts = [answer for answer in answers if isinstance(answer, Receipt)]
        self._service_metrics.commit_seconds.observe(seconds)
        self._service_metrics.commit_requests.observe(sum(answer is not None for answer in answers))
        counts = {
            "accepted": sum(receipt.accepted for receipt in receipts),
            "duplicate": sum(receipt.duplicates for receipt in receipts),
            "conflict": sum(len(receipt.contradictions) for receipt in receipts),
        }
        self._service_metrics.commit_observations.observe(counts["accepted"])
        for result, count in counts.items():
            if count:
                self._service_metrics.observations.labels(result).inc(count)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _tell(group: Sequence[Job], answers: Answers) -> None:
    """Hand every answer there is to who waits for it; a loop is woken once for all of its own."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[Job, Receipt | Exception]]] = defaultdict(list)
    here = _running_loop()
    for job, answer in zip(group, answers, strict=True):
        if answer is None:
            continue
        if job.loop is None or job.loop is here:
            _resolve([(job, answer)])
        else:
            loops[job.loop].append((job, answer))
    for loop, pairs in loops.items():
        try:
            loop.call_soon_threadsafe(_resolve, pairs)
        except RuntimeError:  # closed: nobody waits any more
            _log.warning("%d requests were committed after their event loop had ended", len(pairs))


def _resolve(pairs: Sequence[tuple[Job, Receipt | Exception]]) -> None:
    for job, answer in pairs:
        if job.future.done():  # cancelled: the client has gone
            continue
        if isinstance(answer, Exception):
            job.future.set_exception(answer)
        else:
            job.future.set_result(answer)
