"""The threads that requests run in, with a lane of their own for decisions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from contextvars import ContextVar
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread
from starlette.types import ASGIApp, Receive, Scope, Send

from evalstop_service.store.turns import WORK, Work
from evalstop_service.web.decision_paths import SIGN_IN, is_decision_path

P = ParamSpec("P")
T = TypeVar("T")

DECISION_THREADS = 8
AUTHENTICATION_THREADS = 4


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


class Threads:
    """The threads of one app. `ordinary`: how many there are beside those for decisions."""

    def __init__(self, ordinary: int = 16) -> None:
        self._ordinary, self._decisions = Lane(ordinary), Lane(DECISION_THREADS)
        self._authentication = CapacityLimiter(AUTHENTICATION_THREADS)
        self._authentication_of_decisions = CapacityLimiter(AUTHENTICATION_THREADS)

    @property
    def authentication(self) -> CapacityLimiter:
        """The threads in which the sender of the current request is identified.

        Requests with invalid keys take none from the routes, and only other decisions take those of decisions.
        """
        return self._authentication_of_decisions if WORK.get().is_decision else self._authentication

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in a thread of the lane that the current request belongs to."""
        return await (self._decisions if WORK.get().is_decision else self._ordinary).run(function)


THREADS: ContextVar[Threads] = ContextVar("threads")
"""The threads of the app that answers the current request."""


class EnterLane:
    """ASGI middleware: assigns each request to its lane, by its path."""

    def __init__(self, app: ASGIApp, threads: Threads) -> None:
        self._app, self._threads = app, threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, client = scope["path"], scope.get("client")
            is_decision = path == SIGN_IN or is_decision_path(path)
            THREADS.set(self._threads)
            WORK.set(Work(client[0] if client else "", None, is_decision))
        await self._app(scope, receive, send)


def set_sender(key: Hashable, project: Hashable) -> None:
    """Set the sender of the current request, once it is identified: a key or a session."""
    WORK.set(Work(key, project, WORK.get().is_decision))


def in_thread(function: Callable[P, T]) -> Callable[P, Awaitable[T]]:
    """The function as a coroutine that runs it in a thread of its request's lane.

    FastAPI would take one of AnyIO's threads, which all requests share.
    """

    @wraps(function)
    async def run(*arguments: P.args, **keywords: P.kwargs) -> T:
        return await THREADS.get().run(partial(function, *arguments, **keywords))

    return run


def to_coroutine(endpoint: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """The endpoint of a route as a coroutine, which runs in a thread of its request's lane unless it is one itself."""
    return endpoint if iscoroutinefunction(endpoint) else in_thread(endpoint)
