"""The worker: moves what is due out of the outbox, at least once, and records what became of it.

    claim (a lease) ──> sign ──> send ──> judge ──> settle

Workers meet in rows only: any number of them, in any number of processes, share one outbox. A worker that dies leaves
leases that run out, and another sends the event again under the same `webhook-id`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.clock import Clock
from evalstop_service.delivery import signature
from evalstop_service.delivery.backoff import Answer, Backoff, judge
from evalstop_service.delivery.sender import Sender
from evalstop_service.store import decisions, outbox
from evalstop_service.store.database import Database
from evalstop_service.store.outbox import Claimed

log = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS = 5.0
"""Between two tries at a database that does not answer."""

DATABASE_AWAY = (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.InternalError, sa.exc.TimeoutError)
"""What a database raises that is restarting, full or out of reach; anything else is a fault and ends the worker."""

T = TypeVar("T")


@dataclass(frozen=True)
class Pace:
    """How a worker goes about it.

    `concurrency`: attempts under way at one time; `per_endpoint`: of those, to one endpoint, so that one that hangs
    leaves room for the others. `poll_seconds`: between two looks into an idle outbox. `lease_seconds`: how long a
    delivery stays with a worker that has died; longer than any attempt can take.
    """

    concurrency: int = 32
    per_endpoint: int = 8
    poll_seconds: float = 0.1
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
    ) -> None:
        self._database = database
        self._sender = sender
        self._clock = clock
        self._chance = chance
        self._backoff = backoff or Backoff()
        self._pace = pace or Pace()
        if self._pace.lease_seconds <= sender.timeout_seconds:
            raise ValueError(
                f"lease_seconds ({self._pace.lease_seconds:g}) must be longer than an attempt can take "
                f"(timeout_seconds, {sender.timeout_seconds:g}): else two workers send the same delivery at one time"
            )
        self._busy: Counter[UUID] = Counter()

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until `stop` is set; wait for a database that is away. Cancelled, it leaves its leases to run out."""
        # Threads of our own: name look-ups use the loop's, and a resolver that hangs must not keep us from settling.
        threads = ThreadPoolExecutor(4, thread_name_prefix="deliver")
        under_way: set[asyncio.Task[None]] = set()
        stopped = asyncio.ensure_future(stop.wait())
        pause = self._pace.poll_seconds
        try:
            while not stop.is_set():
                try:
                    room = self._pace.concurrency - len(under_way)
                    claimed = await _in_thread(threads, self._claim, room, dict(self._busy))
                    pause = self._pace.poll_seconds
                except DATABASE_AWAY as error:
                    first = pause == self._pace.poll_seconds
                    claimed, pause = [], _longer(pause)
                    log.error("cannot claim deliveries (%s); next try in %.1f s", error, pause, exc_info=first)
                for one in claimed:
                    self._busy[one.endpoint_id] += 1
                    under_way.add(asyncio.create_task(self._deliver(threads, one, stop)))
                done = await _first_of(stopped, under_way, pause)
                under_way -= done
            if under_way:
                await asyncio.wait(under_way)
        finally:
            for task in (stopped, *under_way):
                task.cancel()
            await asyncio.gather(stopped, *under_way, return_exceptions=True)
            threads.shutdown(wait=False)

    def _claim(self, limit: int, busy: Mapping[UUID, int]) -> list[Claimed]:
        now = self._clock()
        with self._database.reading() as tx:
            wanted = outbox.due(tx, now, limit, self._pace.per_endpoint, busy) if limit > 0 else []
            if not wanted and not decisions.any_due(tx, now):
                return []
        with self._database.transaction() as tx:
            decisions.request_due(tx, now)
            return outbox.claim(tx, now, self._pace.lease_seconds, len(wanted), wanted)

    async def _deliver(self, threads: ThreadPoolExecutor, claimed: Claimed, stop: asyncio.Event) -> None:
        try:
            answer = await self._send(claimed)
            await self._settle(threads, claimed, answer, stop)
        except Exception:
            log.exception("delivery %s: the attempt broke off; it is sent again when its lease is over", claimed.id)
        finally:
            self._busy[claimed.endpoint_id] -= 1
            if not self._busy[claimed.endpoint_id]:
                del self._busy[claimed.endpoint_id]

    async def _send(self, claimed: Claimed) -> Answer:
        body = claimed.body.encode()
        try:
            timestamp = int(self._clock().timestamp())
            headers = signature.headers(claimed.secrets, str(claimed.event_id), timestamp, body)
        except ValueError as error:
            return Answer(None, f"not sent: {error}", None, 0.0)
        return await self._sender.send(claimed.url, headers, body)

    async def _settle(self, threads: ThreadPoolExecutor, claimed: Claimed, answer: Answer, stop: asyncio.Event) -> None:
        """Record the answer; while the database is away, try again until the lease is over."""
        at = self._clock()
        result = judge(answer, claimed.attempts, at, self._chance.random(), self._backoff)

        def write() -> bool:
            with self._database.transaction() as tx:
                return outbox.settle(
                    tx, claimed, result, at=at, duration_ms=answer.duration_ms, status_code=answer.status_code
                )

        pause = self._pace.poll_seconds
        while True:
            try:
                kept = await _in_thread(threads, write)
                break
            except Exception as error:
                if stop.is_set() or self._clock() >= claimed.lease_until:
                    raise
                pause = _longer(pause)
                log.error("delivery %s: cannot record %s (%s); next try in %.1f s", claimed.id, result, error, pause)
                await asyncio.sleep(pause)
        if not kept:
            log.warning("delivery %s: attempt %d outlived its lease", claimed.id, claimed.attempts)
        elif not isinstance(result, outbox.Delivered):
            log.warning("delivery %s: attempt %d: %s", claimed.id, claimed.attempts, result)


def _in_thread(threads: ThreadPoolExecutor, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(threads, call, *arguments)


def _longer(pause: float) -> float:
    return min(max(pause, 0.05) * 2, LONGEST_PAUSE_SECONDS)


async def _first_of(
    stopped: asyncio.Future[Any], under_way: set[asyncio.Task[None]], timeout_seconds: float
) -> set[asyncio.Task[None]]:
    """Wait for the end of an attempt, for `stop`, or for the time to look again; gives the attempts that ended."""
    await asyncio.wait({stopped, *under_way}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    return {task for task in under_way if task.done()}
