"""What one sender may use of what all requests of a process share: places, rates, threads and the processor.

A sender is a key in its project, or who signed in with a session; an address until it is known. No project uses more
than half of anything, however many keys it has. Whoever is over a limit gets TooOften with the seconds to wait, or
waits for a thread or for the processor. Decisions have a lane of their own: see `is_decision_path`.

| limit | of | in all | a key | a project |
|---|---|---|---|---|
| `requests` | requests in progress | 400 | 32 | 200 |
| `pulls` | receivers that wait for an event | 200 | 100 | 100 |
| `event streams` | open pages | 200 | 20 | 100 |
| `costly` | endpoint tests, backtests, new policies, searches | | 30, then 1 in 2 s | 60, then 1 a second |
| threads | of ordinary requests: 8, on PostgreSQL one a connection | | a quarter | half |
| threads of decisions | | 8 | a quarter | half |
| processor | of the event loop and of threads, while others send requests | | half | half |
| bodies | bytes of arriving bodies, in the pools of `web.body_limit` | 100 MiB | a quarter of a pool | half of a pool |
| edits | processor time to judge runs anew: `ingest.costs` | | a tenth | a fifth |
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread
from cachetools import TTLCache
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from evalstop_service.errors import Overloaded, TooOften
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.security.rate_limits import Rate, RateLimit
from evalstop_service.store.database import WORK, Work
from evalstop_service.web.processor import Processor

P = ParamSpec("P")
T = TypeVar("T")

MAX_BODY_BYTES = 8 * 2**20
"""Largest body of a request, as sent and decompressed."""

RETRY_SECONDS = 1.0

DECISION_THREADS = 8
AUTHENTICATION_THREADS = 4

COSTLY, COSTLY_OF_PROJECT = Rate(burst=30, per_second=0.5), Rate(burst=60, per_second=1.0)

SEARCH_COST, SEARCH_COST_PER_SECOND = 0.25, 2.0
"""What a search counts for, as a share of a costly request, and what each second that it takes adds."""

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
    def hold(self, sender: Work) -> Iterator[None]:
        """Hold one until the block ends; raises the errors of `take`."""
        self.take(sender)
        try:
            yield
        finally:
            self.release(sender)

    def _shares(self, sender: Work) -> list[tuple[Hashable, int]]:
        shares: list[tuple[Hashable, int]] = [(("key", sender.key), self.of_key), (None, self.most)]
        if sender.project is not None:  # the addresses of strangers have none
            shares.insert(1, (("project", sender.project), self.of_project))
        return shares


class Lane:
    """Threads for one kind of requests: one project uses at most half of them, one key a quarter. Others wait."""

    def __init__(self, threads: int) -> None:
        self._threads = CapacityLimiter(threads)
        self._of_project, self._of_key = max(1, threads // 2), max(1, threads // 4)
        self._shares: WeakValueDictionary[Hashable, CapacityLimiter] = WeakValueDictionary()

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in a thread, for the key and the project of the current `WORK`."""
        work = WORK.get()
        async with self._share("key", work.key, self._of_key), self._share("project", work.project, self._of_project):
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
        self._costly, self._costly_of_project = RateLimit(COSTLY), RateLimit(COSTLY_OF_PROJECT)
        self.processor = Processor(delayed)
        self._ordinary, self._decisions = Lane(threads), Lane(DECISION_THREADS)
        self._authentication = CapacityLimiter(AUTHENTICATION_THREADS)
        self._authentication_of_decisions = CapacityLimiter(AUTHENTICATION_THREADS)
        self.sessions = RecentSessions()

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

    @contextmanager
    def spend_on_search(self) -> Iterator[None]:
        """Count a search as a costly request, by the time that it takes; raises TooOften when there were too many."""
        self.spend_costly(SEARCH_COST)
        begun = time.monotonic()
        try:
            yield
        finally:
            cost = SEARCH_COST_PER_SECOND * (time.monotonic() - begun)
            self._costly.charge(WORK.get().key, cost)
            self._costly_of_project.charge(WORK.get().project, cost)

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
            return await (self._decisions if sender.is_decision else self._ordinary).run(run)
        finally:
            self.processor.charge(sender, seconds * 1000)


class RecentSessions:
    """Who sent the cookies that were recently found valid, so that they are known without reading the database.

    Thread-safe. Holds digests, not the secrets of sessions.
    """

    def __init__(self) -> None:
        self._senders: TTLCache[bytes, Work] = TTLCache(maxsize=10_000, ttl=300.0)
        self._lock = threading.Lock()

    def add(self, cookie: str, key: Hashable, project: Hashable) -> None:
        """Remember the cookie of a session that was found valid."""
        with self._lock:
            self._senders[_digest(cookie)] = Work(key, project)

    def find(self, header: bytes) -> Work | None:
        """Who sent such a cookie in a header `Cookie`."""
        digests = [_digest(value) for value in cookie_parser(header.decode("latin-1")).values()]
        with self._lock:
            return next((sender for digest in digests if (sender := self._senders.get(digest)) is not None), None)


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogatepass")).digest()


LIMITS: ContextVar[Limits] = ContextVar("limits")
"""The limits of the app that answers the current request."""

KNOWN_KEY = "evalstop_key"
"""The name in a request's scope of the cached key of its last header `Authorization`."""

HELD: ContextVar[list[tuple[Places, Work]]] = ContextVar("held")
"""The places that the current request holds until it is answered; a FastAPI dependency that yields costs more."""


class Entrance:
    """ASGI middleware: finds the lane and the sender of a request, if it is known without reading the database.

    1. `WORK`: a path of decisions has its lane; the sender is its address until it is known.
    2. What the request holds is released after the answer.
    """

    def __init__(self, app: ASGIApp, limits: Limits, key_cache: KeyCache) -> None:
        self._app, self._limits, self._key_cache = app, limits, key_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, client = scope["path"], scope.get("client")
        sender = self._find_sender(scope) or Work(client[0] if client else "")
        if path == SIGN_IN or is_decision_path(path):
            sender = sender._replace(is_decision=True)
        WORK.set(sender)
        LIMITS.set(self._limits)
        held: list[tuple[Places, Work]] = []
        HELD.set(held)
        try:
            await self._app(scope, receive, send)
        finally:
            for places, holder in held:
                places.release(holder)

    def _find_sender(self, scope: Scope) -> Work | None:
        sender = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                key = scope[KNOWN_KEY] = self._key_cache.get(value.partition(b" ")[2].decode("latin-1"))
                sender = sender if key is None else Work(key.id, key.project_id)
            elif name == b"cookie" and sender is None:
                sender = self._limits.sessions.find(value)
        return sender


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
