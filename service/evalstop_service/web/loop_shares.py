"""Limits one key to half of the event loop's processor time while others send requests too.

All requests of a process share one event loop, on which observations are decoded, applied and answered. A key that
always has some in progress would fill it, and every request of others would wait behind them. At half of the time, the
loop is free for others every other moment. While nobody else sends requests, a key may use all of it, at no cost.

Accounting  Processor sharing: while n requests are in progress, each costs one n-th of the time that the loop's thread
            computes. A clock advances by that share; a request costs the clock's advance between its begin and its end.
            Waiting for the database costs nothing. A request that begins while nobody else is active is not counted.
Delay       A key that has spent its budget waits before its next request begins; the wait is as long as its debt, so
            that requests that waited together begin together and share a commit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable

from evalstop_service.security.rate_limits import Rate, RateLimit

HALF = Rate(burst=10, per_second=500)
"""Milliseconds of the event loop's processor time, for each key."""

ACTIVE_SECONDS = 1.0
"""How long a sender counts as active after a request."""


class LoopShares:
    """The shares of one event loop; all methods are called on it. `delayed` is called for each delayed request, `limit`
    counts milliseconds for each key."""

    def __init__(
        self,
        delayed: Callable[[], object] = lambda: None,
        limit: RateLimit | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        thread_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self._delayed = delayed
        self._limit = limit or RateLimit(HALF, monotonic)
        self._monotonic, self._thread_time = monotonic, thread_time
        self._in_progress = 0
        self._share_ms = 0.0  # the clock: milliseconds that one request in progress has cost so far
        self._computed = 0.0  # the thread's time at the last advance
        self._latest: Hashable = None
        self._latest_at = -ACTIVE_SECONDS
        self._other_at = -ACTIVE_SECONDS  # when somebody but the latest sender last sent a request

    def note_sender(self, sender: Hashable) -> None:
        """Note that this sender is active."""
        now = self._monotonic()
        if sender != self._latest:
            self._latest, self._other_at = sender, self._latest_at
        self._latest_at = now

    async def begin(self, key: Hashable) -> float | None:
        """Wait until the key may begin a request; returns what `end` needs."""
        self.note_sender(key)
        if not self._has_others(key):
            return None
        wait = self.find_wait(key)
        if wait:
            self._delayed()
        while wait:
            await asyncio.sleep(min(wait, ACTIVE_SECONDS))  # the others may be silent then
            wait = self.find_wait(key)
        self._advance()
        self._in_progress += 1
        return self._share_ms

    def end(self, key: Hashable, share_ms_at_begin: float | None) -> None:
        """Charge the key for a request that ends."""
        if share_ms_at_begin is None:
            return
        self._advance()
        self._in_progress -= 1
        self._limit.charge(key, self._share_ms - share_ms_at_begin)

    def find_wait(self, key: Hashable) -> float:
        """The seconds until this key may begin a request, as far as is known now; 0 while nobody else is active."""
        return self._limit.find_wait(key) if self._has_others(key) else 0.0

    def _has_others(self, key: Hashable) -> bool:
        other_at = self._latest_at if key != self._latest else self._other_at
        return self._monotonic() - other_at < ACTIVE_SECONDS

    def _advance(self) -> None:
        computed = self._thread_time()
        if self._in_progress:
            self._share_ms += 1000 * (computed - self._computed) / self._in_progress
        self._computed = computed
