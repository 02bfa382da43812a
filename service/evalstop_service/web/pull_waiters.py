"""Receivers that wait for an event to fetch, and the database polls that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from threading import Event
from uuid import UUID

import anyio.to_thread
from anyio import CapacityLimiter

from evalstop_service.clock import Clock
from evalstop_service.store.database import Database, read_now
from evalstop_service.store.queue import leases

POLL_SECONDS = 0.2
"""Pause between two polls: the longest delay that polling adds to an event."""


class PullWaiters:
    """For use on the event loop. One poll serves all waiting receivers, and wakes only those of endpoints with
    something to claim: a hundred that wake at every poll would hold the event loop for milliseconds.
    """

    def __init__(self, database: Database, clock: Clock, shutdown: Event) -> None:
        self._thread = CapacityLimiter(1)
        self._database, self._clock, self._shutdown = database, clock, shutdown
        self._waiting: dict[asyncio.Future[bool], UUID] = {}
        self._polls: asyncio.Task[None] | None = None  # ends when nobody waits

    async def wait_until_due(self, endpoint_id: UUID, seconds: float, disconnect: Awaitable[object]) -> bool:
        """Wait until the endpoint may have something to claim; returns whether it may. Raises DBAPIError.

        False after so many seconds, when `disconnect` returns, and when the server shuts down.
        """
        due: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[due] = endpoint_id
        if self._polls is None:
            self._polls = asyncio.create_task(self._poll())
        disconnected = asyncio.ensure_future(disconnect)
        try:
            await asyncio.wait((due, disconnected), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return due.done() and due.result() and not disconnected.done()
        finally:
            disconnected.cancel()
            del self._waiting[due]

    async def _poll(self) -> None:
        while self._waiting:
            await asyncio.sleep(POLL_SECONDS)
            answered, failure = set(self._waiting.values()), None
            try:
                if not self._shutdown.is_set():
                    answered = await anyio.to_thread.run_sync(self._find_claimable, answered, limiter=self._thread)
            except Exception as error:
                failure = error
            for due, endpoint_id in self._waiting.items():
                if endpoint_id not in answered or due.done():
                    continue
                if failure is None:
                    due.set_result(not self._shutdown.is_set())
                else:
                    due.set_exception(failure)
        self._polls = None

    def _find_claimable(self, endpoint_ids: set[UUID]) -> set[UUID]:
        """The endpoints with due events."""
        with self._database.reading() as tx:
            return leases.find_endpoints_with_due(tx, endpoint_ids, read_now(tx, self._clock))
