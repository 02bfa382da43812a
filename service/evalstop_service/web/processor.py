"""Limits a key, and a project, to half of the processor while others send requests too, and lets theirs go first.

All requests of a process share one interpreter: one event loop, which decodes, applies and answers observations, and
threads that take turns with it. A key that always has some in progress would fill it, and every request of others would
wait behind them. While nobody else sends requests, a key may use all of it, at no cost.

Accounting  Posts of observations by processor sharing: while n of them are in progress, each costs one n-th of the time
            that the loop's thread computes. Every other request costs `ROUTE_MS`, and the time of its threads. Waiting
            for the database costs nothing. What begins while nobody else is active is not counted.
Delay       A sender that has used more than half of the time waits before its next request begins; the wait is as long
            as its debt, so that requests that waited together begin together and share a commit. Decisions have an
            account of their own: a veto does not wait for what its key has posted.
Order       A key that uses more than a tenth of the time is heavy. Its request waits until no request of another key or
            session was in progress for `QUIET_SECONDS`. So that it is never kept out, a quarter of the waiting requests
            begins every `TURN_SECONDS`: all at once would hold the loop too long, and a fixed number would not keep up.
            Of its other requests than posts, `AT_ONCE` compute at a time: a veto that arrives waits for no more.
            Requests of other heavy keys are not waited for, nor requests that take so long that they rather wait than
            compute. Decisions wait for nobody but those that compute: who floods with vetoes holds up no other veto.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from evalstop_service.security.rate_limits import Rate, RateLimit
from evalstop_service.store.database import Work

HALF = Rate(burst=10, per_second=500)
"""Milliseconds of processor time, for each key and for each project."""

TENTH = Rate(burst=10, per_second=100)
"""Milliseconds beyond which a key is heavy."""

AT_ONCE = 1
"""How many requests of heavy keys to routes compute at a time. Posts share a commit: any number of them does.

With 3, openings of runs gained a tenth, and a veto beside them took twice as long.
"""

ROUTE_MS = 2.0
"""The time of the event loop that a request to a route costs."""

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
    """A request in progress. `shared_ms_at_begin`: the reading of the clock of posts; None for a request that is not
    shared."""

    sender: Work
    is_post: bool
    shared_ms_at_begin: float | None


class _Turn(NamedTuple):
    """A request of a heavy key that waits: it begins when the future is set."""

    future: asyncio.Future[None]
    is_post: bool
    is_decision: bool


class _Activity:
    """When somebody else than a sender was last active."""

    def __init__(self) -> None:
        self._latest: Hashable = None
        self._latest_at = self._other_at = -ACTIVE_SECONDS

    def note(self, sender: Hashable, now: float) -> None:
        if sender != self._latest:
            self._latest, self._other_at = sender, self._latest_at
        self._latest_at = now

    def has_others(self, sender: Hashable, now: float) -> bool:
        return now - (self._latest_at if sender != self._latest else self._other_at) < ACTIVE_SECONDS


class Processor:
    """The shares of one process; all methods are called on its event loop. `delayed` is called for each delayed
    request, `limit` and `heavy` count milliseconds of senders."""

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
        self._keys, self._projects = _Activity(), _Activity()
        self._in_progress = 0  # posts that are charged
        self._shared_ms = 0.0  # the clock: milliseconds that one post in progress has cost so far
        self._computed = 0.0  # the thread's time at the last advance
        self._light: dict[Request, float] = {}  # requests of light senders in progress, the latest last
        self._light_ended_at = -QUIET_SECONDS
        self._heavy_routes: dict[Request, float] = {}  # those of heavy senders to routes
        self._waiting: list[_Turn] = []  # requests of heavy keys that wait for their turn
        self._turns: asyncio.Task[None] | None = None  # gives the turns; ends when nobody waits

    async def begin(self, sender: Work, *, is_post: bool = False) -> Request | None:
        """Wait until the sender may begin a request; returns what `end` needs."""
        if sender.project is None:  # unknown, or a key to the installation
            return None
        now = self._monotonic()
        self._keys.note(sender.key, now)
        self._projects.note(sender.project, now)
        if is_post and not self._keys.has_others(sender.key, now):
            return None
        is_heavy = self._is_heavy(sender)
        wait = self.find_wait(sender)
        if wait or (is_heavy and self._must_wait_for_turn(sender, is_post)):
            self._delayed()
            while wait:
                await asyncio.sleep(min(wait, ACTIVE_SECONDS))  # the others may be silent then
                wait = self.find_wait(sender)
            if self._must_wait_for_turn(sender, is_post):
                await self._wait_for_turn(is_post, sender.is_decision)
            is_heavy, now = self._is_heavy(sender), self._monotonic()
        if is_post:
            self._advance()
            self._in_progress += 1
        request = Request(sender, is_post, self._shared_ms if is_post else None)
        if not is_heavy:
            self._light[request] = now
        elif not is_post:
            self._heavy_routes[request] = now
        return request

    def end(self, request: Request | None) -> None:
        """Charge the sender for a request that ends, and let others begin."""
        if request is None:
            return
        if request.shared_ms_at_begin is not None:
            self._advance()
            self._in_progress -= 1
            self._charge(request.sender, self._shared_ms - request.shared_ms_at_begin)
        elif not request.is_post:
            self.charge(request.sender, ROUTE_MS)
        self._heavy_routes.pop(request, None)
        if self._light.pop(request, None) is not None:
            self._light_ended_at = self._monotonic()

    def charge(self, sender: Work, milliseconds: float) -> None:
        """Charge a sender for time that it has used, unless nobody else is active."""
        if sender.project is not None and self._keys.has_others(sender.key, self._monotonic()):
            self._charge(sender, milliseconds)

    def find_wait(self, sender: Work) -> float:
        """The seconds until this sender has paid its debt; 0 while nobody else is active."""
        now, of_key, of_project = self._monotonic(), *find_accounts(sender)
        waits_for_keys = self._limit.find_wait(of_key) if self._keys.has_others(sender.key, now) else 0.0
        others = self._projects.has_others(sender.project, now)
        return max(waits_for_keys, self._limit.find_wait(of_project) if others else 0.0)

    def _charge(self, sender: Work, milliseconds: float) -> None:
        of_key, of_project = find_accounts(sender)
        self._limit.charge(of_key, milliseconds)
        if self._projects.has_others(sender.project, self._monotonic()):
            self._limit.charge(of_project, milliseconds)
        self._heavy.charge(of_key, milliseconds)

    def _is_heavy(self, sender: Work) -> bool:
        return self._heavy.find_wait(find_accounts(sender)[0]) > 0

    def _must_wait_for_turn(self, sender: Work, is_post: bool) -> bool:
        if not self._is_heavy(sender):
            return False
        if self._has_light() and not sender.is_decision:
            return True
        return not (is_post or (self._count_room() and not self._waiting))

    def _count_room(self) -> int:
        """How many more requests of heavy keys to routes may begin."""
        since = self._monotonic() - LONG_SECONDS
        latest = itertools.takewhile(lambda begun: begun > since, reversed(self._heavy_routes.values()))
        return AT_ONCE - len(list(itertools.islice(latest, AT_ONCE)))

    def _has_light(self) -> bool:
        """Whether a request of a light sender is in progress, and not for long, or has just ended."""
        now = self._monotonic()
        latest_at = next(reversed(self._light.values()), -LONG_SECONDS)
        return now - latest_at < LONG_SECONDS or now - self._light_ended_at < QUIET_SECONDS

    async def _wait_for_turn(self, is_post: bool, is_decision: bool) -> None:
        """Wait with the other requests of heavy keys, first come, first served."""
        turn = _Turn(asyncio.get_running_loop().create_future(), is_post, is_decision)
        self._waiting.append(turn)
        if self._turns is None:
            self._turns = asyncio.create_task(self._give_turns())
        await turn.future

    async def _give_turns(self) -> None:
        next_at = self._monotonic() + TURN_SECONDS
        while self._waiting:
            await asyncio.sleep(QUIET_SECONDS)
            has_light, is_turn = self._has_light(), self._monotonic() >= next_at
            most = len(self._waiting) if not has_light else math.ceil(len(self._waiting) / 4) if is_turn else 0
            room = self._count_room()
            waiting, self._waiting = self._waiting, []
            for turn in waiting:
                if not (turn.is_post or room) or not (turn.is_decision or most):
                    self._waiting.append(turn)
                    continue
                most, room = most - (not turn.is_decision), room - (not turn.is_post)
                if not turn.future.done():  # its request was cancelled
                    turn.future.set_result(None)
            if is_turn or not has_light:
                next_at = self._monotonic() + TURN_SECONDS
        self._turns = None

    def _advance(self) -> None:
        computed = self._thread_time()
        if self._in_progress:
            self._shared_ms += 1000 * (computed - self._computed) / self._in_progress
        self._computed = computed


def find_accounts(sender: Work) -> tuple[Hashable, Hashable]:
    """The accounts of a sender's key and of its project; those of decisions are their own."""
    return ("key", sender.is_decision, sender.key), ("project", sender.is_decision, sender.project)
