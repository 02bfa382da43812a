"""What one sender may use of what all requests of a process share: places, rates, threads and the processor.

A sender is a key in its project, or who signed in with a session; an address until it is known. No project uses more
than half of anything, however many keys it has. Whoever is over a limit gets TooOften with the seconds to wait, or
waits for its share of the threads and of the processor. Decisions have a lane of their own: see `is_decision_path`.

| limit | of | in all | a key | a project |
|---|---|---|---|---|
| `requests` | requests in progress | 400 | 32 | 200 |
| `pulls` | receivers that wait for an event | 200 | 100 | 100 |
| `costly` | endpoint tests, backtests, new policies, searches | | 30, then 1 in 2 s | 60, then 1 a second |
| threads | of ordinary requests: 8, on PostgreSQL one a connection | | a quarter | half |
| threads of decisions | | 8 | a quarter | half |
| processor | of the event loop and of threads, while others send requests | | half | half |
| `bytes of bodies` | of keys and sessions | 64 MiB | 16 MiB | 32 MiB |
| `bytes of decisions` | short bodies of operators and receivers: vetoes, pauses, reports | 8 MiB | 1 MiB | 4 MiB |
| `bytes of strangers` | bodies without a valid key or session, and the sign-in form | 8 MiB | 512 KiB an address | |
| edits | processor time to judge runs anew: `ingest.messages` | | a tenth | a fifth |
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread
from starlette.types import ASGIApp, Receive, Scope, Send

from evalstop_service.errors import Overloaded, TooOften
from evalstop_service.security.rate_limits import Rate, RateLimit
from evalstop_service.store.database import WORK, Work

P = ParamSpec("P")
T = TypeVar("T")

_MIB = 2**20
MAX_BODY_BYTES = 8 * _MIB
"""Largest body of a request, as sent and decompressed."""

RETRY_SECONDS = 1.0

DECISION_THREADS = 8
AUTHENTICATION_THREADS = 4

COSTLY, COSTLY_OF_PROJECT = Rate(burst=30, per_second=0.5), Rate(burst=60, per_second=1.0)

SEARCH_COST = 0.25
"""What a search counts for, as a share of a costly request."""

HALF = Rate(burst=10, per_second=500)
"""Milliseconds of processor time, for each key and for each project."""

ROUTE_MS = 2.0
"""The time of the event loop that a request to a route costs, beside that of its threads."""

ACTIVE_SECONDS = 1.0
"""How long a sender counts as active after a request."""

SIGN_IN = "/login"

RECEIVED_AT = "received_at"
"""The key of the time in the scope of a veto: it counts from its first byte, however long it then waits."""

_VETOES = re.compile(
    r"/api/v1/(decisions/[^/]+/veto|project/pause)|/decisions/[^/]+/veto|/settings/pause|/act/[^/]+/[^/]+/(veto|wait)|/login"
)

_DECIDES = re.compile(
    r"/api/v1/(decisions/[^/]+/(veto|undo|release|report)|project/(pause|resume)|runs/[^/]+/stop)"
    r"|/decisions/[^/]+/(veto|undo|release)|/act/[^/]+/[^/]+/(veto|wait)|/settings/(pause|resume)|/runs/[^/]+/stop"
    r"|/api/v1/pull/endpoints/[^/]+/(claim|settle)"
)


def is_decision_path(path: str) -> bool:
    """Whether this is a path of decisions or of receivers' reports: no flood of other requests may hold it up."""
    return _DECIDES.fullmatch(path) is not None


def is_veto_path(path: str) -> bool:
    """Whether this is a path of vetoes or pauses, or of the sign-in that they require."""
    return _VETOES.fullmatch(path) is not None


class Places:
    """Counts what senders hold at a time, such as requests: at most `most`, and `of_key` and `of_project` of one key
    and of one project. Thread-safe."""

    def __init__(
        self, name: str, most: int, of_key: int, of_project: int, refused: Callable[[str], object] = lambda _: None
    ) -> None:
        self.name, self._refused = name, refused
        self.most, self.of_key, self.of_project = most, of_key, of_project
        self._lock = threading.Lock()
        self._held: Counter[Hashable] = Counter()  # by key, by project, and in all: None

    def has_room(self, sender: Work) -> bool:
        """Whether this sender may hold one more."""
        with self._lock:
            return all(self._held[holder] < most for holder, most in self._shares(sender))

    def take(self, sender: Work, count: int = 1) -> None:
        """Count so many more; raises TooOften when the sender has none left, Overloaded when all have none left."""
        with self._lock:
            for holder, most in self._shares(sender):
                if self._held[holder] + count > most:
                    self._refused(self.name)
                    if holder is None:
                        raise Overloaded
                    kind = "key" if holder == ("key", sender.key) else "project"
                    raise TooOften(
                        f"{most} {self.name} are in progress, the most for one {kind}; wait for one to end",
                        RETRY_SECONDS,
                    )
            for holder, _ in self._shares(sender):
                self._held[holder] += count

    def release(self, sender: Work, count: int = 1) -> None:
        """Count so many less."""
        with self._lock:
            for holder, _ in self._shares(sender):
                self._held[holder] -= count
                if not self._held[holder]:
                    del self._held[holder]

    @contextmanager
    def hold(self, sender: Work, count: int = 1) -> Iterator[None]:
        """Hold so many until the block ends; raises the errors of `take`."""
        self.take(sender, count)
        try:
            yield
        finally:
            self.release(sender, count)

    def _shares(self, sender: Work) -> list[tuple[Hashable, int]]:
        shares: list[tuple[Hashable, int]] = [(("key", sender.key), self.of_key), (None, self.most)]
        if sender.project is not None:  # the addresses of strangers have none
            shares.insert(1, (("project", sender.project), self.of_project))
        return shares


class _Activity:
    """When somebody else than a sender was last active."""

    def __init__(self) -> None:
        self._latest: Hashable = None
        self._latest_at = self._other_at = -ACTIVE_SECONDS

    def note(self, sender: Hashable, now: float) -> None:
        if sender is not self._latest and sender != self._latest:
            self._latest, self._other_at = sender, self._latest_at
        self._latest_at = now

    def has_others(self, sender: Hashable, now: float) -> bool:
        is_latest = sender is self._latest or sender == self._latest  # comparing two ids takes a microsecond
        return now - (self._other_at if is_latest else self._latest_at) < ACTIVE_SECONDS


class Processor:
    """Shares one interpreter, its event loop and its threads, between the senders: a key or a project that has used
    more than half of the time waits for as long as its debt before it goes on. While nobody else sends requests,
    nothing is counted. Decisions have accounts of their own: a veto does not wait for what its key has posted.

    Posts of observations are charged by processor sharing: while n of them are in progress, each costs one n-th of the
    time that the loop's thread computes. Any other request costs `ROUTE_MS`, and the time of its threads. Waiting for
    the database costs nothing. All methods are called on the event loop; `delayed` is called for each delayed request.
    """

    def __init__(
        self,
        delayed: Callable[[], object] = lambda: None,
        limit: RateLimit | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        thread_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self._delayed, self._limit = delayed, limit or RateLimit(HALF, monotonic)
        self._monotonic, self._thread_time = monotonic, thread_time
        self._keys, self._projects = _Activity(), _Activity()
        self._posts = 0  # posts in progress that are charged
        self._post_ms = 0.0  # a clock: milliseconds that one post in progress has cost so far
        self._computed = 0.0  # the thread's time when the clock was last read

    async def wait_for_share(self, sender: Work) -> None:
        """Wait until this sender has no debt."""
        if sender.project is None:  # unknown, or a key to the installation
            return
        now = self._monotonic()
        self._keys.note(sender.key, now)
        self._projects.note(sender.project, now)
        wait = self.find_wait(sender)
        if wait:
            self._delayed()
        while wait:
            await asyncio.sleep(min(wait, ACTIVE_SECONDS))  # the others may be silent then
            wait = self.find_wait(sender)

    def begin_post(self, sender: Work) -> float | None:
        """Begin to count the time of a post; returns what `end_post` needs, None if nobody else is active."""
        if not self._keys.has_others(sender.key, self._monotonic()):
            return None
        began = self._read_post_clock()
        self._posts += 1
        return began

    def end_post(self, sender: Work, began: float | None) -> None:
        """Charge the sender for a post."""
        if began is not None:
            milliseconds = self._read_post_clock() - began
            self._posts -= 1
            self._charge(sender, milliseconds)

    def charge(self, sender: Work, milliseconds: float) -> None:
        """Charge a sender for time that it has used, unless nobody else is active."""
        if sender.project is not None and self._keys.has_others(sender.key, self._monotonic()):
            self._charge(sender, milliseconds)

    def find_wait(self, sender: Work) -> float:
        """The seconds until this sender has paid its debt; 0 while nobody else is active."""
        now, wait = self._monotonic(), 0.0
        if self._keys.has_others(sender.key, now):
            wait = self._limit.find_wait(find_accounts(sender)[0])
        if self._projects.has_others(sender.project, now):
            wait = max(wait, self._limit.find_wait(find_accounts(sender)[1]))
        return wait

    def _charge(self, sender: Work, milliseconds: float) -> None:
        of_key, of_project = find_accounts(sender)
        self._limit.charge(of_key, milliseconds)
        if self._projects.has_others(sender.project, self._monotonic()):
            self._limit.charge(of_project, milliseconds)

    def _read_post_clock(self) -> float:
        computed = self._thread_time()
        if self._posts:
            self._post_ms += 1000 * (computed - self._computed) / self._posts
        self._computed = computed
        return self._post_ms


def find_accounts(sender: Work) -> tuple[Hashable, Hashable]:
    """The accounts of a sender's key and of its project; those of decisions are their own."""
    return ("key", sender.is_decision, sender.key), ("project", sender.is_decision, sender.project)


class Lane:
    """Threads for one kind of requests: one project uses at most half of them, one key a quarter. Others wait."""

    def __init__(self, threads: int, processor: Processor) -> None:
        self._threads, self._processor = CapacityLimiter(threads), processor
        self._of_project, self._of_key = max(1, threads // 2), max(1, threads // 4)
        self._shares: WeakValueDictionary[Hashable, CapacityLimiter] = WeakValueDictionary()

    async def run(self, work: Work, function: Callable[[], T]) -> T:
        """Call a function in a thread, for this key and project."""
        async with self._share("key", work.key, self._of_key):
            await self._processor.wait_for_share(work)  # here, so that few go on at once when the debt is paid
            async with self._share("project", work.project, self._of_project):
                return await to_thread.run_sync(function, limiter=self._threads)

    def _share(self, kind: str, sender: Hashable, most: int) -> CapacityLimiter:
        # The dictionary forgets a sender when none of its requests holds or awaits the limiter.
        share = self._shares.get((kind, sender))
        if share is None:
            share = self._shares[kind, sender] = CapacityLimiter(most)
        return share


class Limits:
    """The limits of one app. `threads`: for ordinary requests. `refused` and `delayed` count for the metrics."""

    def __init__(
        self,
        threads: int = 16,
        refused: Callable[[str], object] = lambda _: None,
        delayed: Callable[[], object] = lambda: None,
    ) -> None:
        self.count_refused = refused
        self.requests = Places("requests", most=400, of_key=32, of_project=200, refused=refused)
        self.pulls = Places("pulls", most=200, of_key=100, of_project=100, refused=refused)
        self.bodies = Places("bytes of bodies", 64 * _MIB, 16 * _MIB, 32 * _MIB, refused)
        self.bodies_of_decisions = Places("bytes of decisions", 8 * _MIB, _MIB, 4 * _MIB, refused)
        self.bodies_of_strangers = Places("bytes of strangers", 8 * _MIB, _MIB // 2, _MIB // 2, refused)
        self._costly, self._costly_of_project = RateLimit(COSTLY), RateLimit(COSTLY_OF_PROJECT)
        self.processor = Processor(delayed)
        self._ordinary, self._decisions = (Lane(count, self.processor) for count in (threads, DECISION_THREADS))
        self._authentication = CapacityLimiter(AUTHENTICATION_THREADS)
        self._authentication_of_decisions = CapacityLimiter(AUTHENTICATION_THREADS)

    @property
    def authentication(self) -> CapacityLimiter:
        """The threads that identify the sender of the current request.

        Requests with invalid keys take none from the routes, and only other decisions take those of decisions.
        """
        return self._authentication_of_decisions if WORK.get().is_decision else self._authentication

    def spend_costly(self, cost: float = 1.0) -> None:
        """Count a costly request of the current sender; raises TooOften when there were too many."""
        sender = WORK.get()
        wait = self._costly.spend(sender.key, cost) or self._costly_of_project.spend(sender.project, cost)
        if wait:
            self.count_refused("costly")
            raise TooOften("too many costly requests; wait before you send another", wait)

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        """Call a function in a thread of the current request's lane, and charge its sender for the processor time."""
        sender, seconds = WORK.get(), 0.0

        def run() -> T:
            nonlocal seconds
            started = time.thread_time()
            try:
                return function()
            finally:
                seconds = time.thread_time() - started

        try:
            return await (self._decisions if sender.is_decision else self._ordinary).run(sender, run)
        finally:
            self.processor.charge(sender, seconds * 1000)


LIMITS: ContextVar[Limits] = ContextVar("limits")
"""The limits of the app that answers the current request."""

HELD: ContextVar[list[tuple[Places, Work]]] = ContextVar("held")
"""The places that the current request holds until it is answered; a FastAPI dependency that yields costs more."""


@dataclass(frozen=True)
class Entrance:
    """ASGI middleware: finds the lane of a request, whose sender is its address until it is known, and releases what it
    holds after the answer."""

    app: ASGIApp
    limits: Limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, client = scope["path"], scope.get("client")
        WORK.set(Work(client[0] if client else "", None, path == SIGN_IN or is_decision_path(path)))
        LIMITS.set(self.limits)
        held: list[tuple[Places, Work]] = []
        HELD.set(held)
        try:
            await self.app(scope, receive, send)
        finally:
            for places, holder in held:
                places.release(holder)


def set_sender(key: Hashable, project: Hashable) -> None:
    """Set the sender of the current request, once it is identified: a key or a session."""
    WORK.set(Work(key, project, WORK.get().is_decision))


def hold_place(places: Places) -> None:
    """Hold a place for the current request until it is answered; raises TooOften."""
    sender = WORK.get()
    places.take(sender)
    HELD.get().append((places, sender))


def in_thread(function: Callable[P, T]) -> Callable[P, Awaitable[T]]:
    """The function as a coroutine that runs it in a thread of its request's lane.

    FastAPI would take one of AnyIO's threads, which all requests share.
    """

    @wraps(function)
    async def run(*arguments: P.args, **keywords: P.kwargs) -> T:
        return await LIMITS.get().run_in_thread(partial(function, *arguments, **keywords))

    return run


def to_coroutine(endpoint: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """The endpoint of a route as a coroutine, which runs in a thread of its request's lane unless it is one itself."""
    return endpoint if iscoroutinefunction(endpoint) else in_thread(endpoint)
