"""The worker: moves what is due out of the outbox, at least once, and records what became of it.

    wake ──> claim (a lease) ──> sign ──> send ──> judge ──> settle
      ^        `-------- one transaction, again and again -----'
      `── NOTIFY, the bell of this process, the next due time, an attempt that ended

Workers meet in rows only: any number of them, in any number of processes, share one outbox. A worker that dies leaves
leases that run out, and another sends the event again under the same `webhook-id`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

import sqlalchemy as sa

from evalstop_service.clock import Clock, rfc3339
from evalstop_service.observability import logs
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.observability.tracing import Tracer
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import wakeup
from evalstop_service.store.database import Database
from evalstop_service.store.queue.breakers import BreakerLimits
from evalstop_service.store.queue.leases import (
    ClaimedDelivery,
    Dead,
    Delivered,
    FinishedAttempt,
    Released,
    Retry,
    Settlement,
)
from evalstop_service.webhooks import signature
from evalstop_service.webhooks.channels import render_body
from evalstop_service.webhooks.delivery.claim import Exchanged, Rules, Wanted, exchange, settle
from evalstop_service.webhooks.delivery.clock_skew import Setback
from evalstop_service.webhooks.delivery.database_clock import Timekeeper
from evalstop_service.webhooks.delivery.endpoint_queues import Backlog
from evalstop_service.webhooks.delivery.notification_listener import Listener
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.delivery.wakeup import Bell
from evalstop_service.webhooks.retry import Answer, Backoff, judge_answer

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
"""Between two tries at a database that does not answer."""

SETTLE_SECONDS = 10.0
"""As long is tried, once told to stop, to record the last attempts in a database that does not answer."""

SOON_SECONDS = 0.05
"""Until the next look after one that found something: there may be more."""

LINGER_SECONDS = 0.05
"""As long a settlement waits for others when there is enough to send meanwhile."""

LONG_AT_HAND_SECONDS = 1.0
"""A delivery begun within this time of its claim is sent even if the lease leaves next to nothing to spare."""

DATABASE_AWAY = (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.InternalError, sa.exc.TimeoutError)
"""What a database raises that is restarting, full or out of reach; anything else is a fault and ends the worker."""

T = TypeVar("T")


@dataclass(frozen=True)
class Pace:
    """How a worker goes about it.

    `concurrency`: attempts under way at one time; `per_endpoint`: of those, to one endpoint, so that one that hangs
    leaves room for the others; `ahead`: times as many are claimed beforehand for an endpoint that takes its events.
    `poll_seconds`: between two looks into an idle outbox when nobody wakes the worker; `woken_poll_seconds`: when
    PostgreSQL does. `lease_seconds`: how long a delivery stays with a worker that has died; longer than any attempt.
    """

    concurrency: int = 32
    per_endpoint: int = 8
    ahead: int = 6
    poll_seconds: float = 1.0
    woken_poll_seconds: float = 10.0
    lease_seconds: float = 60.0


class Worker:
    """`await Worker(...).run(stop)` delivers until `stop` is set, then finishes what is under way.

    `sender` belongs to the caller and is open. `clock` tells the time in UTC, `chance` spreads the retries.
    """

    def __init__(
        self,
        database: Database,
        sender: Sender,
        *,
        clock: Clock,
        chance: random.Random,
        backoff: Backoff | None = None,
        pace: Pace | None = None,
        breaker: BreakerLimits | None = None,
        encryption: Encryption | None = None,
        service_metrics: ServiceMetrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._database = database
        self._sender = sender
        self._clock = clock
        self._chance = chance
        self._backoff = backoff or Backoff()
        self._pace = pace or Pace()
        self._rules = Rules(breaker or BreakerLimits(), encryption or Encryption())
        self._service_metrics = service_metrics or ServiceMetrics()
        self._tracer = tracer or Tracer()
        if self._pace.lease_seconds <= sender.timeout_seconds:
            raise ValueError(
                f"lease_seconds ({self._pace.lease_seconds:g}) must be longer than an attempt can take "
                f"(timeout_seconds, {sender.timeout_seconds:g}): else two workers send the same delivery at one time"
            )
        self._backlog = Backlog(self._pace.concurrency, self._pace.per_endpoint, self._pace.ahead)
        self._timekeeper = Timekeeper()
        self._setback = Setback(max(self._pace.lease_seconds, self._backoff.cap_seconds), self._pace.lease_seconds)
        self._bell = Bell()
        self._ended: list[FinishedAttempt] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until `stop` is set; wait for a database that is away. Cancelled, it leaves its leases to run out."""
        # A thread of our own: name look-ups use the loop's, and a resolver that hangs must not keep us from settling.
        threads = ThreadPoolExecutor(1, thread_name_prefix="deliver")
        listener = None if self._database.embedded else Listener(self._database.url, self._bell.ring_here)
        with wakeup.calling_on_commit(self._database, self._bell.ring):
            watching = [asyncio.create_task(_ring_on(stop, self._bell))]
            if listener is not None:
                watching.append(asyncio.create_task(listener.run()))
            try:
                await self._deliver_until(stop, threads, listener)
                await self._finish(threads)
            finally:
                for task in (*watching, *self._tasks):
                    task.cancel()
                await asyncio.gather(*watching, *self._tasks, return_exceptions=True)
                threads.shutdown(wait=False)

    async def _deliver_until(self, stop: asyncio.Event, threads: ThreadPoolExecutor, listener: Listener | None) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not stop.is_set():
            try:
                done = await self._exchange(threads)
            except DATABASE_AWAY as error:
                first = pause == FIRST_PAUSE_SECONDS
                log.error("the database is away (%s); next try in %.2f s", error, pause, exc_info=first)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), pause)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                continue
            pause = FIRST_PAUSE_SECONDS
            self._backlog.add(done.claimed)
            self._begin()
            await self._bell.wait(self._rest_seconds(done, listener is not None and listener.hears))

    def _rest_seconds(self, done: Exchanged, woken: bool) -> float:
        """Until the next look, unless the bell is rung before."""
        if done.claimed:
            return SOON_SECONDS
        longest = self._pace.woken_poll_seconds if woken else self._pace.poll_seconds
        if done.next_due is None:
            return longest
        return min(longest, max(0.0, (done.next_due - self._now()).total_seconds()))

    async def _exchange(self, threads: ThreadPoolExecutor) -> Exchanged:
        """Hand in what has ended and take out what is due; what could not be handed in is kept."""
        ended, self._ended = self._ended, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wanted = Wanted(self._backlog.limit(), self._pace.per_endpoint, self._backlog.room(), self._pace.lease_seconds)
        try:
            done = await _in_thread(threads, exchange, self._database, self._clock, self._rules, ended, wanted)
        except DATABASE_AWAY:
            self._ended = ended + self._ended
            raise
        except Exception:
            if not ended:
                raise
            log.exception("cannot record %d attempts together; each is recorded by itself", len(ended))
            await self._settle_apart(threads, ended)
            return await self._exchange(threads)
        self._tell(ended, done.settled)
        monotonic = time.monotonic()
        back = self._timekeeper.tell(done.now, monotonic)
        if self._setback.is_due(back, monotonic) and await _in_thread(
            threads, self._setback.mend, self._database, done.now, monotonic
        ):
            self._bell.ring_here()
        return done

    async def _settle_apart(self, threads: ThreadPoolExecutor, ended: Sequence[FinishedAttempt]) -> None:
        for number, one in enumerate(ended):
            try:
                self._tell([one], await _in_thread(threads, settle, self._database, self._rules, [one]))
            except DATABASE_AWAY:
                self._ended = [*ended[number:], *self._ended]
                raise
            except Exception:
                log.exception("delivery %s cannot be settled; it is sent again when its lease is over", one.claimed.id)

    async def _finish(self, threads: ThreadPoolExecutor) -> None:
        """Give back what was not begun, wait for what was, and record both."""
        self._stopping = True
        self._ended += [FinishedAttempt(one, Released(), self._now()) for one in self._backlog.clear()]
        deadline: float | None = None
        while self._ended or self._backlog.under_way:
            ended, self._ended = self._ended, []
            try:
                if ended:
                    self._tell(ended, await _in_thread(threads, settle, self._database, self._rules, ended))
            except DATABASE_AWAY as error:
                self._ended = ended + self._ended
                deadline = deadline or time.monotonic() + SETTLE_SECONDS
                if time.monotonic() >= deadline:
                    log.error("%d attempts are not on record (%s): they are made again", len(self._ended), error)
                    return
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
                continue
            if not self._ended and self._backlog.under_way:
                await self._bell.wait(self._pace.lease_seconds)

    def _begin(self) -> None:
        """Begin as many attempts as there is room for."""
        while (claimed := self._backlog.begin()) is not None:
            task = asyncio.create_task(self._carry(claimed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, claimed: ClaimedDelivery | None) -> None:
        """Make an attempt, and the next that it left room for, and so on."""
        while claimed is not None:
            ended = None
            try:
                with logs.about(run_id=claimed.run_id, delivery_id=claimed.id):
                    ended = await self._attempt(claimed)
            except Exception:
                log.exception("delivery %s: the attempt broke off; it is made again after its lease", claimed.id)
            finally:
                self._backlog.end(claimed, ended is not None and isinstance(ended.result, Delivered))
            if ended is not None:
                self._ended.append(ended)
            claimed = None if self._stopping else self._backlog.begin()
            self._hand_in()

    def _hand_in(self) -> None:
        """Have what has ended settled: at once when there is room to claim more, together with others when not."""
        if self._stopping or self._backlog.runs_low:
            self._bell.ring_here()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._bell.ring_here)

    async def _attempt(self, claimed: ClaimedDelivery) -> FinishedAttempt:
        begun = self._now()
        spare = self._pace.lease_seconds - self._sender.timeout_seconds
        left = (claimed.lease_until - begun).total_seconds() - self._sender.timeout_seconds
        if left < min(0.0, spare - LONG_AT_HAND_SECONDS):
            return FinishedAttempt(
                claimed, Released(), begun
            )  # it was at hand for so long that its lease may end on the way
        answer = await self._send(claimed, begun)
        at = begun + timedelta(milliseconds=answer.duration_ms)
        result = judge_answer(answer, claimed.attempts, at, self._chance.random(), self._backoff)
        if answer.duration_ms:
            self._service_metrics.delivery_seconds.observe(answer.duration_ms / 1000)
            self._service_metrics.delivery_lag_seconds.observe(max(0.0, (begun - claimed.due_at).total_seconds()))
        return FinishedAttempt(claimed, result, at, answer.duration_ms, answer.status_code, answer.excerpt)

    async def _send(self, claimed: ClaimedDelivery, now: datetime) -> Answer:
        body = render_body(claimed.format, claimed.body).encode()
        try:
            headers = signature.sign_headers(claimed.secrets, str(claimed.event_id), int(now.timestamp()), body)
        except ValueError as error:
            return Answer(None, f"not sent: {error}", None, 0.0)
        run_id, delivery_id = str(claimed.run_id), str(claimed.id)
        with self._tracer.span(
            "deliver", kind="client", run_id=run_id, delivery_id=delivery_id, attempt=claimed.attempts
        ) as span:
            if span.traceparent is not None:
                headers["traceparent"] = span.traceparent
            answer = await self._sender.send(claimed.url, headers, body)
            if answer.error is not None:
                span.fail("the endpoint did not take it")
            return answer

    def _now(self) -> datetime:
        return self._timekeeper.now(time.monotonic())

    def _tell(self, ended: Sequence[FinishedAttempt], settled: Settlement) -> None:
        for endpoint_id in settled.opened:
            log.warning("endpoint %s fails; nothing is sent there for %g s", endpoint_id, self._rules.breaker.seconds)
            given = self._backlog.give_up(endpoint_id)
            self._ended += [FinishedAttempt(one, Released(), self._now()) for one in given]
        results: Counter[str] = Counter()
        for one in ended:
            claimed, result = one.claimed, one.result
            about = {"run_id": claimed.run_id, "delivery_id": claimed.id}
            if claimed.id in settled.kept:
                results[_WORDS[type(result)]] += 1
                if isinstance(result, Retry | Dead):
                    then = f"next at {rfc3339(result.due_at)}" if isinstance(result, Retry) else "given up"
                    told = (claimed.id, claimed.attempts, then, result.error)
                    log.warning("delivery %s: attempt %d failed, %s: %s", *told, extra=about)
            elif claimed.id in settled.cancelled:
                results["cancelled"] += 1
                log.info("delivery %s: cancelled during attempt %d", claimed.id, claimed.attempts, extra=about)
            else:
                log.warning("delivery %s: attempt %d outlived its lease", claimed.id, claimed.attempts, extra=about)
        for word, count in results.items():
            if word:
                self._service_metrics.deliveries.labels(word).inc(count)


_WORDS = {Delivered: "delivered", Retry: "retry", Dead: "dead", Released: ""}


async def _ring_on(stop: asyncio.Event, bell: Bell) -> None:
    await stop.wait()
    bell.ring_here()


def _in_thread(threads: ThreadPoolExecutor, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(threads, call, *arguments)
