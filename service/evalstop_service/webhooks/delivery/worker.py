"""The delivery worker: sends what is due, at least once, and records the result.

1. **Settle and claim** in one transaction: results of finished attempts go in, due deliveries come out under a lease,
   as many as can be sent now. Attempts that finish during a transaction are settled by the next one, so groups grow
   with the load.
2. **Send** each: sign the body with each valid secret and POST it.
3. **Judge** the answer: delivered, retry at a time, or dead. The result waits for the next transaction, which begins
   when an attempt has finished, or after `poll_seconds`.

Workers share nothing but rows: any number of them, in any number of processes, deliver from one outbox. When a worker
dies, its leases expire, and another worker sends the events again with the same `webhook-id`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.clock import Clock, rfc3339
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.observability import logs
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.security.encryption import Encryption
from evalstop_service.store.database import Database, read_now
from evalstop_service.store.faults import Fault, find_fault
from evalstop_service.store.queue import leases
from evalstop_service.store.queue.attempts import (
    BreakerLimits,
    ClaimedDelivery,
    Dead,
    Delivered,
    FinishedAttempt,
    Retry,
)
from evalstop_service.webhooks import signature
from evalstop_service.webhooks.channels import render_body
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.links import add_url, locate_act_page
from evalstop_service.webhooks.retry import Answer, Backoff, judge_answer

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
"""Pause between retries while the database is unavailable; it doubles from the first to the longest."""

SETTLE_SECONDS = 10.0
"""How long a stopping worker tries to record its last attempts while the database is unavailable."""

T = TypeVar("T")


@dataclass(frozen=True)
class WorkerLimits:
    """The limits of a worker.

    `concurrency`: concurrent attempts; `per_endpoint`: how many deliveries to one endpoint are claimed at a time, and
    under way when no more are claimed, so that an endpoint that hangs leaves room for the others. `poll_seconds`:
    between two looks for due deliveries. `lease_seconds`: how long a delivery stays with a worker that has died; longer
    than any attempt.
    """

    concurrency: int = 32
    per_endpoint: int = 8
    poll_seconds: float = 0.1
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
        self._breaker, self._encryption = breaker or BreakerLimits(), encryption or Encryption()
        self._service_metrics = service_metrics or ServiceMetrics()
        self._time_read: tuple[datetime, float] | None = None  # the database's time, and when by time.monotonic
        self._running: Counter[UUID] = Counter()  # attempts by endpoint
        self._finished: list[FinishedAttempt] = []
        self._has_finished = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        # A separate thread: DNS look-ups use the loop's threads, and a resolver that hangs must not delay settlements.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deliver")

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until `stop` is set, then record the attempts in progress. Waits while the database is unavailable,
        once stopped for `SETTLE_SECONDS`. If cancelled, lets its leases expire."""
        try:
            await self._deliver(stop)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._thread.shutdown(wait=False)

    async def _deliver(self, stop: asyncio.Event) -> None:
        pause, give_up_at = FIRST_PAUSE_SECONDS, math.inf
        while not stop.is_set() or self._finished or self._tasks:
            try:
                await self._settle_and_claim(self._limits.concurrency if not stop.is_set() else 0)
            except sa.exc.SQLAlchemyError as error:
                if (fault := find_fault(error)) is Fault.BUG:  # which ends the worker
                    raise
                first = pause == FIRST_PAUSE_SECONDS
                log.error("%s (%s), retrying in %.2f s", fault.value, error, pause, exc_info=first)
                if stop.is_set():
                    give_up_at, pause = min(give_up_at, time.monotonic() + SETTLE_SECONDS), FIRST_PAUSE_SECONDS
                if time.monotonic() >= give_up_at:
                    log.error("%d attempts were not recorded and will be repeated", len(self._finished))
                    return
                if stop.is_set():
                    await self._wait_for_attempt(pause)
                else:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), pause)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                continue
            pause = FIRST_PAUSE_SECONDS
            if not self._finished:
                await self._wait_for_attempt(self._limits.poll_seconds)

    async def _settle_and_claim(self, concurrency: int) -> None:
        """Settle finished attempts, and claim and start due deliveries. Results are kept while the database is away."""
        finished, self._finished = self._finished, []
        limit, per_endpoint = concurrency - self._running.total(), self._limits.per_endpoint
        busy = [endpoint_id for endpoint_id, count in self._running.items() if count >= per_endpoint]
        try:
            settled, claimed = await self._call(self._settle_and_claim_rows, finished, limit, busy)
        except Exception as error:
            if find_fault(error) is not Fault.BUG:
                self._finished = finished + self._finished
                raise
            if not finished:
                raise
            log.exception("cannot record %d attempts; they are repeated after their leases", len(finished))
            return
        self._report_settled(finished, settled)
        for delivery in claimed:
            self._running[delivery.endpoint_id] += 1
            task = asyncio.create_task(self._run_attempt(delivery))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _settle_and_claim_rows(
        self, finished: Sequence[FinishedAttempt], limit: int, busy: Sequence[UUID]
    ) -> tuple[Mapping[UUID, DeliveryState], Sequence[ClaimedDelivery]]:
        """In one transaction, unless there is nothing to settle and nothing due:

        1. Settle the attempts first: the deliveries that they release can be claimed immediately.
        2. Read the clock after settling, which may wait for a lock, so that a lease begins when it is written.
        3. Claim what is due, and hand over the stops among it.
        """
        limits = (limit, self._limits.per_endpoint, busy)
        if not finished and limit <= 0:
            return {}, ()
        if not finished:
            with self._database.reading() as tx:  # without the lock of SQLite's one writer
                if not leases.find_due_deliveries(tx, read_now(tx, self._clock), *limits):
                    return {}, ()
        with self._database.transaction() as tx:
            settled = leases.settle_deliveries(tx, finished, self._breaker)
            now = read_now(tx, self._clock)
            self._time_read = now, time.monotonic()
            claimed = leases.claim_deliveries(tx, now, self._limits.lease_seconds, *limits, self._encryption)
            return settled, claimed

    async def _wait_for_attempt(self, seconds: float) -> None:
        """Wait until an attempt has finished, at most so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_finished.wait(), seconds)
        self._has_finished.clear()

    async def _run_attempt(self, claimed: ClaimedDelivery) -> None:
        try:
            with logs.log_context(run_id=claimed.run_id, delivery_id=claimed.id):
                if self._now() >= claimed.lease_until:  # this process was frozen: a stop may have been undone meanwhile
                    log.warning("delivery %s: not sent, its lease ended before", claimed.id)
                    return
                finished = await self._attempt_delivery(claimed)
            self._finished.append(finished)  # found only now: the list is another one since the attempt began
        except Exception:
            log.exception("delivery %s: the attempt failed unexpectedly; it is repeated after its lease", claimed.id)
        finally:
            self._running[claimed.endpoint_id] -= 1
            if not self._running[claimed.endpoint_id]:
                del self._running[claimed.endpoint_id]
            self._has_finished.set()

    async def _attempt_delivery(self, claimed: ClaimedDelivery) -> FinishedAttempt:
        started = self._now()
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
        headers = signature.sign_headers(claimed.secrets, str(claimed.event_id), int(now.timestamp()), body)
        return await self._sender.send(claimed.url, headers, body, event)

    def _now(self) -> datetime:
        """The database's time, which leases are compared with, whatever this machine's clock shows."""
        assert self._time_read is not None, "nothing was claimed yet"
        now, read_at = self._time_read
        return now + timedelta(seconds=time.monotonic() - read_at)

    def _report_settled(self, finished: Sequence[FinishedAttempt], settled: Mapping[UUID, DeliveryState]) -> None:
        results: Counter[str] = Counter()
        for attempt in finished:
            claimed, result = attempt.claimed, attempt.result
            log_context = {"run_id": claimed.run_id, "delivery_id": claimed.id}
            state = settled.get(claimed.id)
            if state is DeliveryState.WAITING:
                results[_RESULT_LABELS[type(result)]] += 1
                if isinstance(result, Retry | Dead):
                    then = f"next at {rfc3339(result.due_at)}" if isinstance(result, Retry) else "given up"
                    args = (claimed.id, claimed.attempts, then, result.error)
                    log.warning("delivery %s: attempt %d failed, %s: %s", *args, extra=log_context)
            elif state is DeliveryState.CANCELLED:
                results["cancelled"] += 1
                log.info("delivery %s: cancelled during attempt %d", claimed.id, claimed.attempts, extra=log_context)
            else:
                log.warning(
                    "delivery %s: attempt %d finished after its lease", claimed.id, claimed.attempts, extra=log_context
                )
        for label, count in results.items():
            self._service_metrics.deliveries.labels(label).inc(count)

    def _call(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Call a function in the worker's thread."""
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


_RESULT_LABELS = {Delivered: "delivered", Retry: "retry", Dead: "dead"}
