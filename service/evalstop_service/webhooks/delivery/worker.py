"""The delivery worker: sends what is due, at least once, and records the result.

1. **Wake** by NOTIFY, by a commit in this process, at the next due time, or when an attempt finishes.
2. **Settle and claim** in one transaction: results of finished attempts go in, due deliveries come out under a lease.
   Attempts that finish during a transaction are settled by the next one, so groups grow with the load.
3. **Start** as many attempts as there is room for, the endpoints in turn.
4. **Send**: sign the body with each valid secret and POST it.
5. **Judge** the answer: delivered, retry at a time, or dead. The result waits for the next transaction.

Workers share nothing but rows: any number of them, in any number of processes, deliver from one outbox. When a worker
dies, its leases expire, and another worker sends the events again with the same `webhook-id`.
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
from evalstop_service.security.encryption import Encryption
from evalstop_service.store.database import Database
from evalstop_service.store.queue.attempts import (
    BreakerLimits,
    ClaimedDelivery,
    Dead,
    Delivered,
    FinishedAttempt,
    Released,
    Retry,
)
from evalstop_service.store.queue.leases import Settlement
from evalstop_service.webhooks import signature
from evalstop_service.webhooks.channels import render_body
from evalstop_service.webhooks.delivery.claims import (
    ClaimLimits,
    ClaimResult,
    DeliveryRules,
    EndpointQueues,
    settle_and_claim,
    settle_attempts,
)
from evalstop_service.webhooks.delivery.notification_listener import NotificationListener, Wakeup
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.links import add_url, locate_act_page
from evalstop_service.webhooks.retry import Answer, Backoff, judge_answer

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
"""Pause between retries while the database is unavailable; it doubles from the first to the longest."""

SETTLE_SECONDS = 10.0
"""How long a stopping worker tries to record its last attempts while the database is unavailable."""

BUSY_POLL_SECONDS = 0.05
"""Pause after a claim that found deliveries: there may be more."""

MAX_SETTLE_DELAY_SECONDS = 0.05
"""How long a result waits for others while enough deliveries are queued."""

MAX_QUEUED_SECONDS = 1.0
"""A delivery that starts within this time of its claim is sent even if its lease hardly outlasts the attempt."""

DATABASE_UNAVAILABLE = (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.InternalError, sa.exc.TimeoutError)
"""Raised when the database restarts, is full or unreachable; any other error is a bug and ends the worker."""

T = TypeVar("T")


@dataclass(frozen=True)
class WorkerLimits:
    """The limits of a worker.

    `concurrency`: concurrent attempts; `per_endpoint`: those to one endpoint, so that one that hangs leaves room for
    the others; `ahead`: how many times as many to claim ahead for an endpoint that accepts its events. `poll_seconds`:
    between two polls for due deliveries when nothing wakes the worker; `woken_poll_seconds`: when PostgreSQL wakes it.
    `lease_seconds`: how long a delivery stays with a worker that has died; longer than any attempt.
    """

    concurrency: int = 32
    per_endpoint: int = 8
    ahead: int = 6
    poll_seconds: float = 1.0
    woken_poll_seconds: float = 10.0
    lease_seconds: float = 60.0


class DeliveryWorker:
    """`await DeliveryWorker(...).run(stop)` delivers until `stop` is set, then finishes the attempts in progress.

    The caller opens and closes `sender`. `clock` gives the time in UTC, `chance` spreads the retries.
    """

    def __init__(
        self,
        database: Database,
        sender: Sender,
        *,
        clock: Clock,
        chance: random.Random,
        backoff: Backoff | None = None,
        limits: WorkerLimits | None = None,
        breaker: BreakerLimits | None = None,
        encryption: Encryption | None = None,
        public_url: str | None = None,
        service_metrics: ServiceMetrics | None = None,
    ) -> None:
        self._database = database
        self._public_url = public_url
        self._sender = sender
        self._clock = clock
        self._chance = chance
        self._backoff = backoff or Backoff()
        self._limits = limits or WorkerLimits()
        self._rules = DeliveryRules(breaker or BreakerLimits(), encryption or Encryption())
        self._service_metrics = service_metrics or ServiceMetrics()
        if self._limits.lease_seconds <= sender.timeout_seconds:
            raise ValueError(
                f"lease_seconds ({self._limits.lease_seconds:g}) must be longer than an attempt can take "
                f"(timeout_seconds, {sender.timeout_seconds:g}): else two workers may send it concurrently"
            )
        self._queues = EndpointQueues(self._limits.concurrency, self._limits.per_endpoint, self._limits.ahead)
        self._time_read: tuple[datetime, float] | None = None  # the database's time, and when by time.monotonic
        self._wakeup = Wakeup()
        self._finished: list[FinishedAttempt] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until `stop` is set; waits while the database is unavailable. If cancelled, lets its leases
        expire."""
        # A separate thread: DNS look-ups use the loop's threads, and a resolver that hangs must not delay settlements.
        threads = ThreadPoolExecutor(1, thread_name_prefix="deliver")
        listener = None if self._database.embedded else NotificationListener(self._database.url, self._wakeup.wake)
        loop = asyncio.get_running_loop()

        def wake_from_any_thread() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._wakeup.wake)

        with self._database.calling_on_commit(wake_from_any_thread):
            watching = [asyncio.create_task(_wake_on(stop, self._wakeup))]
            if listener is not None:
                watching.append(asyncio.create_task(listener.run()))
            try:
                await self._deliver_until_stopped(stop, threads, listener)
                await self._shut_down(threads)
            finally:
                for task in (*watching, *self._tasks):
                    task.cancel()
                await asyncio.gather(*watching, *self._tasks, return_exceptions=True)
                threads.shutdown(wait=False)

    async def _deliver_until_stopped(
        self, stop: asyncio.Event, threads: ThreadPoolExecutor, listener: NotificationListener | None
    ) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not stop.is_set():
            try:
                claim = await self._settle_and_claim(threads)
            except DATABASE_UNAVAILABLE as error:
                first = pause == FIRST_PAUSE_SECONDS
                log.error("database unavailable (%s), retrying in %.2f s", error, pause, exc_info=first)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), pause)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                continue
            pause = FIRST_PAUSE_SECONDS
            await self._wakeup.wait(self._pause_seconds(claim, listener is not None and listener.receives))

    def _pause_seconds(self, claim: ClaimResult, woken: bool) -> float:
        """Until the next transaction, unless something wakes the worker."""
        if claim.claimed:
            return BUSY_POLL_SECONDS
        longest = self._limits.woken_poll_seconds if woken else self._limits.poll_seconds
        if claim.next_due is None:
            return longest
        return min(longest, max(0.0, (claim.next_due - self._now()).total_seconds()))

    async def _settle_and_claim(self, threads: ThreadPoolExecutor) -> ClaimResult:
        """Settle finished attempts, and claim and start due deliveries; results that could not be settled are kept."""
        finished, self._finished = self._finished, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        claim_limits = ClaimLimits(
            self._queues.claim_limit(),
            self._limits.per_endpoint,
            self._queues.claim_limits_by_endpoint(),
            self._limits.lease_seconds,
        )
        try:
            claim = await _run_in_thread(
                threads, settle_and_claim, self._database, self._clock, self._rules, finished, claim_limits
            )
        except DATABASE_UNAVAILABLE:
            self._finished = finished + self._finished
            raise
        except Exception:
            if not finished:
                raise
            log.exception("cannot record %d attempts together; recording them one by one", len(finished))
            await self._settle_one_by_one(threads, finished)
            return await self._settle_and_claim(threads)
        self._report_settled(finished, claim.settled)
        self._time_read = claim.now, time.monotonic()
        self._queues.add_claimed(claim.claimed)
        self._start_attempts()
        return claim

    async def _settle_one_by_one(self, threads: ThreadPoolExecutor, finished: Sequence[FinishedAttempt]) -> None:
        for number, attempt in enumerate(finished):
            try:
                self._report_settled(
                    [attempt], await _run_in_thread(threads, settle_attempts, self._database, self._rules, [attempt])
                )
            except DATABASE_UNAVAILABLE:
                self._finished = [*finished[number:], *self._finished]
                raise
            except Exception:
                log.exception("cannot record delivery %s; it is sent again after its lease", attempt.claimed.id)

    async def _shut_down(self, threads: ThreadPoolExecutor) -> None:
        """Release the deliveries that have not started, wait for those that have, and record both."""
        self._stopping = True
        self._finished += [
            FinishedAttempt(claimed, Released(), self._now()) for claimed in self._queues.remove_all_waiting()
        ]
        deadline: float | None = None
        while self._finished or self._queues.running:
            finished, self._finished = self._finished, []
            try:
                if finished:
                    self._report_settled(
                        finished, await _run_in_thread(threads, settle_attempts, self._database, self._rules, finished)
                    )
            except DATABASE_UNAVAILABLE as error:
                self._finished = finished + self._finished
                deadline = deadline or time.monotonic() + SETTLE_SECONDS
                if time.monotonic() >= deadline:
                    log.error("%d attempts were not recorded (%s) and will be repeated", len(self._finished), error)
                    return
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
                continue
            if not self._finished and self._queues.running:
                await self._wakeup.wait(self._limits.lease_seconds)

    def _start_attempts(self) -> None:
        """Start as many attempts as there is room for."""
        while (claimed := self._queues.start_next()) is not None:
            task = asyncio.create_task(self._run_attempts(claimed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_attempts(self, claimed: ClaimedDelivery | None) -> None:
        """Make an attempt, then the next one that can start, and so on."""
        while claimed is not None:
            finished = None
            try:
                with logs.log_context(run_id=claimed.run_id, delivery_id=claimed.id):
                    finished = await self._attempt_delivery(claimed)
            except Exception:
                log.exception(
                    "delivery %s: the attempt failed unexpectedly; it is repeated after its lease", claimed.id
                )
            finally:
                self._queues.finish_attempt(claimed, finished is not None and isinstance(finished.result, Delivered))
            if finished is not None:
                self._finished.append(finished)
            claimed = None if self._stopping else self._queues.start_next()
            self._schedule_settlement()

    def _schedule_settlement(self) -> None:
        """Settle immediately when the queues run low, else a little later together with others."""
        if self._stopping or self._queues.runs_low:
            self._wakeup.wake()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MAX_SETTLE_DELAY_SECONDS, self._wakeup.wake)

    async def _attempt_delivery(self, claimed: ClaimedDelivery) -> FinishedAttempt:
        started = self._now()
        spare = self._limits.lease_seconds - self._sender.timeout_seconds
        remaining_seconds = (claimed.lease_until - started).total_seconds() - self._sender.timeout_seconds
        if remaining_seconds < min(0.0, spare - MAX_QUEUED_SECONDS):
            return FinishedAttempt(
                claimed, Released(), started
            )  # queued for so long that its lease may end during the attempt
        answer = await self._send_event(claimed, started)
        at = started + timedelta(milliseconds=answer.duration_ms)
        result = judge_answer(answer, claimed.attempts, at, self._chance.random(), self._backoff)
        if answer.duration_ms:
            self._service_metrics.delivery_seconds.observe(answer.duration_ms / 1000)
            self._service_metrics.delivery_lag_seconds.observe(max(0.0, (started - claimed.due_at).total_seconds()))
        return FinishedAttempt(claimed, result, at, answer.duration_ms, answer.status_code, answer.excerpt)

    async def _send_event(self, claimed: ClaimedDelivery, now: datetime) -> Answer:
        event = add_url(claimed.body, self._public_url, claimed.run_id)
        act_url = locate_act_page(self._public_url, claimed.id, claimed.secrets[0])
        body = render_body(claimed.format, event, act_url).encode()
        try:
            headers = signature.sign_headers(claimed.secrets, str(claimed.event_id), int(now.timestamp()), body)
        except ValueError as error:
            return Answer(None, f"not sent: {error}", None, 0.0)
        return await self._sender.send(claimed.url, headers, body, event)

    def _now(self) -> datetime:
        """The database's time, which leases are compared with, whatever this machine's clock shows."""
        assert self._time_read is not None, "nothing was claimed yet"
        now, read_at = self._time_read
        return now + timedelta(seconds=time.monotonic() - read_at)

    def _report_settled(self, finished: Sequence[FinishedAttempt], settled: Settlement) -> None:
        for endpoint_id, until in settled.opened.items():
            log.warning("endpoint %s keeps failing; nothing is sent to it until %s", endpoint_id, rfc3339(until))
            removed = self._queues.remove_waiting(endpoint_id)
            self._finished += [
                FinishedAttempt(removed_delivery, Released(), self._now()) for removed_delivery in removed
            ]
        results: Counter[str] = Counter()
        for attempt in finished:
            claimed, result = attempt.claimed, attempt.result
            log_context = {"run_id": claimed.run_id, "delivery_id": claimed.id}
            if claimed.id in settled.still_held:
                results[_RESULT_LABELS[type(result)]] += 1
                if isinstance(result, Retry | Dead):
                    then = f"next at {rfc3339(result.due_at)}" if isinstance(result, Retry) else "given up"
                    args = (claimed.id, claimed.attempts, then, result.error)
                    log.warning("delivery %s: attempt %d failed, %s: %s", *args, extra=log_context)
            elif claimed.id in settled.cancelled:
                results["cancelled"] += 1
                log.info("delivery %s: cancelled during attempt %d", claimed.id, claimed.attempts, extra=log_context)
            else:
                log.warning(
                    "delivery %s: attempt %d finished after its lease", claimed.id, claimed.attempts, extra=log_context
                )
        for label, count in results.items():
            if label:
                self._service_metrics.deliveries.labels(label).inc(count)


_RESULT_LABELS = {Delivered: "delivered", Retry: "retry", Dead: "dead", Released: ""}


async def _wake_on(stop: asyncio.Event, wakeup_: Wakeup) -> None:
    await stop.wait()
    wakeup_.wake()


def _run_in_thread(threads: ThreadPoolExecutor, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(threads, call, *arguments)
