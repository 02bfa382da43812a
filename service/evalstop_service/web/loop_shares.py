"""Limits one key to half of the event loop's processor time while others send requests too, and lets theirs go first.

All requests of a process share one event loop, on which observations are decoded, applied and answered. A key that
always has some in progress would fill it, and every request of others would wait behind them. While nobody else sends
requests, a key may use all of it, at no cost.

Accounting  Processor sharing: while n requests are in progress, each costs one n-th of the time that the loop's thread
            computes. A clock advances by that share; a request costs the clock's advance between its begin and its end.
            Waiting for the database costs nothing. A request that begins while nobody else is active is not counted.
Delay       A key that has used more than half of the time waits before its next request begins; the wait is as long as
            its debt, so that requests that waited together begin together and share a commit.
Order       A key that uses more than a tenth of the time is heavy. Its request waits until no request of another key or
            session was in progress for `QUIET_SECONDS`. So that it is never kept out, a quarter of the waiting requests
            begins every `TURN_SECONDS`: all at once would hold the loop too long, and a fixed number would not keep up.
            Requests of other heavy keys are not waited for, nor requests that take so long that they rather wait than
            compute.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from evalstop_service.security.rate_limits import Rate, RateLimit

HALF = Rate(burst=10, per_second=500)
"""Milliseconds of the event loop's processor time, for each key."""

TENTH = Rate(burst=10, per_second=100)
"""Milliseconds beyond which a key is heavy."""

ACTIVE_SECONDS = 1.0
"""How long a sender counts as active after a request."""

TURN_SECONDS = 0.05
"""How often requests of heavy keys begin while others always have one in progress."""

QUIET_SECONDS = 0.01
"""How long nobody else may have a request in progress: the next one of a loading page often follows at once."""

LONG_SECONDS = 0.1
"""A request in progress for so long is not waited for: it may be an open page or a waiting receiver."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request in progress. `share_ms_at_begin`: where the clock stood, None for one that is not charged."""

    sender: Hashable
    share_ms_at_begin: float | None


class LoopShares:
    """The shares of one event loop; all methods are called on it. `delayed` is called for each delayed request, `limit`
    and `heavy` count milliseconds for each key."""

    def __init__(
        self,
        delayed: Callable[[], object] = lambda: None,
        limit: RateLimit | None = None,
        heavy: RateLimit | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        thread_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self._delayed = delayed
        self._limit = limit or RateLimit(HALF, monotonic)
        self._heavy = heavy or RateLimit(TENTH, monotonic)
        self._monotonic, self._thread_time = monotonic, thread_time
        self._in_progress = 0  # requests that are charged
        self._share_ms = 0.0  # the clock: milliseconds that one request in progress has cost so far
        self._computed = 0.0  # the thread's time at the last advance
        self._latest: Hashable = None
        self._latest_at = -ACTIVE_SECONDS
        self._other_at = -ACTIVE_SECONDS  # when somebody but the latest sender last sent a request
        self._light: dict[Request, float] = {}  # requests of light senders in progress, the latest last
        self._light_ended_at = -QUIET_SECONDS
        self._waiting: list[asyncio.Future[None]] = []  # requests of heavy keys that wait for their turn
        self._turns: asyncio.Task[None] | None = None  # gives the turns; ends when nobody waits

    async def begin(self, key: Hashable) -> Request | None:
        """Wait until the key may begin to post observations; returns what `end` needs."""
        if not self._note_sender(key):
            return None
        wait = self.find_wait(key)
        if wait or self._gives_way(key):
            self._delayed()
        while wait:
            await asyncio.sleep(min(wait, ACTIVE_SECONDS))  # the others may be silent then
            wait = self.find_wait(key)
        if self._gives_way(key):
            await self._wait_for_turn()
        self._advance()
        self._in_progress += 1
        request = Request(key, self._share_ms)
        self._add_light(request)
        return request

    async def begin_other(self, sender: Hashable) -> Request:
        """Begin a request that another part of the app answers: a heavy key waits, but nobody is charged."""
        self._note_sender(sender)
        if self._gives_way(sender):
            self._delayed()
            await self._wait_for_turn()
        request = Request(sender, None)
        self._add_light(request)
        return request

    def end(self, request: Request | None) -> None:
        """Charge the sender for a request that ends, and let others begin."""
        if request is None:
            return
        if request.share_ms_at_begin is not None:
            self._advance()
            self._in_progress -= 1
            cost = self._share_ms - request.share_ms_at_begin
            self._limit.charge(request.sender, cost)
            self._heavy.charge(request.sender, cost)
        if self._light.pop(request, None) is not None:
            self._light_ended_at = self._monotonic()

    def find_wait(self, key: Hashable) -> float:
        """The seconds until this key has paid its debt; 0 while nobody else is active."""
        return self._limit.find_wait(key) if self._has_others(key) else 0.0

    def _note_sender(self, sender: Hashable) -> bool:
        """Note a request; returns whether others are active."""
        if sender != self._latest:
            self._latest, self._other_at = sender, self._latest_at
        self._latest_at = self._monotonic()
        return self._latest_at - self._other_at < ACTIVE_SECONDS

    def _has_others(self, key: Hashable) -> bool:
        other_at = self._latest_at if key != self._latest else self._other_at
        return self._monotonic() - other_at < ACTIVE_SECONDS

    def _is_heavy(self, sender: Hashable) -> bool:
        return self._heavy.find_wait(sender) > 0

    def _add_light(self, request: Request) -> None:
        if not self._is_heavy(request.sender):
            self._light[request] = self._monotonic()

    def _gives_way(self, sender: Hashable) -> bool:
        return self._is_heavy(sender) and self._has_light()

    def _has_light(self) -> bool:
        """Whether a request of a light sender is in progress, and not for long, or has just ended."""
        now = self._monotonic()
        latest_at = next(reversed(self._light.values()), -LONG_SECONDS)
        return now - latest_at < LONG_SECONDS or now - self._light_ended_at < QUIET_SECONDS

    async def _wait_for_turn(self) -> None:
        """Wait with the other requests of heavy keys, first come, first served."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if self._turns is None:
            self._turns = asyncio.create_task(self._give_turns())
        await turn

    async def _give_turns(self) -> None:
        next_at = self._monotonic() + TURN_SECONDS
        while self._waiting:
            await asyncio.sleep(QUIET_SECONDS)
            has_light = self._has_light()
            if has_light and self._monotonic() < next_at:
                continue
            count = math.ceil(len(self._waiting) / 4) if has_light else len(self._waiting)
            for turn in self._waiting[:count]:
                if not turn.done():  # its request was cancelled
                    turn.set_result(None)
            del self._waiting[:count]
            next_at = self._monotonic() + TURN_SECONDS
        self._turns = None

    def _advance(self) -> None:
        computed = self._thread_time()
        if self._in_progress:
            self._share_ms += 1000 * (computed - self._computed) / self._in_progress
        self._computed = computed
