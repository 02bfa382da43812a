"""Receivers that wait for an event to fetch, and the database polls that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from uuid import UUID

import anyio.to_thread
from anyio import CapacityLimiter

from evalstop_service.clock import Clock
from evalstop_service.store.database import Database
from evalstop_service.store.queue import pull, queues

POLL_SECONDS = 0.2
"""Pause between two polls: the longest delay that polling adds to an event."""


class PullWaiters:
    """`requests` limits how many wait, `threads` those that query the database. For use on the event loop.

    The other routes have separate threads, so that waiting receivers never block them. One poll serves all waiting
    receivers: if each polled, 60 of them would keep a processor busy.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self.requests = CapacityLimiter(200)
        self.threads = CapacityLimiter(4)
        self._database, self._clock = database, clock
        self._endpoint_ids: set[UUID] = set()
        self._next: asyncio.Task[Set[UUID]] | None = None

    async def wait_for_look(self, endpoint_id: UUID, seconds: float) -> bool:
        """Wait for the next poll, for so many seconds at most: claims that end with a poll would all end together.

        Returns whether the endpoint may have something to claim. Raises DBAPIError.
        """
        self._endpoint_ids.add(endpoint_id)
        if self._next is None:
            self._next = asyncio.create_task(self._wait_and_look())
        poll = asyncio.shield(self._next)  # a cancelled request must not cancel the others' poll
        try:
            return endpoint_id in await asyncio.wait_for(poll, seconds)
        except TimeoutError:
            return False

    async def _wait_and_look(self) -> Set[UUID]:
        await asyncio.sleep(POLL_SECONDS)
        endpoint_ids, self._endpoint_ids, self._next = self._endpoint_ids, set(), None
        return await anyio.to_thread.run_sync(self._find_claimable, endpoint_ids, limiter=self.threads)

    def _find_claimable(self, endpoint_ids: Set[UUID]) -> Set[UUID]:
        """The endpoints with due events; all of them when a veto window has ended, which may make something due."""
        with self._database.reading() as tx:
            now, over = queues.read_clock(tx, self._clock())
            return (
                endpoint_ids
                if over
                else {endpoint_id for endpoint_id in endpoint_ids if pull.is_any_due(tx, endpoint_id, now)}
            )
