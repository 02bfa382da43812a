"""Committers for tests: each acts as a process of its own, on one event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from evalstop_service.errors import ServiceError
from evalstop_service.ingest import Committer, Message, Receipt, RunCache
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store.database import Database

DEADLINE_SECONDS = 60.0
MAX_OPEN = 6
"""Committers kept open at the same time: each holds connections to its database."""

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
_lock = threading.Lock()
_running: list[RunningCommitter] = []
_shared_caches: WeakKeyDictionary[Database, RunCache] = WeakKeyDictionary()


class RunningCommitter:
    """A running committer whose clock shows the time of the last call."""

    def __init__(self, database: Database, cache: RunCache) -> None:
        self.database, self.cache = database, cache
        self.metrics = ServiceMetrics()
        self.now = datetime.now(UTC)
        self.committer = Committer(database, cache, lambda: self.now, self.metrics)
        self._exit = AsyncExitStack()
        run_on_loop(self._exit.enter_async_context(self.committer.run()))

    def submit_all(self, messages: Sequence[Message], now: datetime) -> list[Receipt | ServiceError]:
        """Submit messages in one turn of the loop."""

        async def gather_receipts() -> list[Receipt | BaseException]:
            return await asyncio.gather(*map(self.committer.submit, messages), return_exceptions=True)

        self.now = now
        return cast("list[Receipt | ServiceError]", run_on_loop(gather_receipts()))

    def read_counter(self, name: str, **labels: str) -> float:
        """Read a counter of the committer."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def close(self) -> None:
        """Commit waiting messages and close."""
        run_on_loop(self._exit.aclose())


def close_all_committers() -> None:
    """Close all open committers."""
    with _lock:
        while _running:
            _running.pop().close()


def close_committers_of(database: Database, kept: RunCache | None = None) -> None:
    """Close the open committers of this database; that of the cache `kept` stays."""
    with _lock:
        for running in [running for running in _running if running.database is database]:
            if running.cache is not kept:
                _running.remove(running)
                running.close()


def share_cache(database: Database) -> RunCache:
    """The cache of the committer that tests on this database share, one after another.

    A new committer's first commit takes 30 ms on PostgreSQL: connections, and what the server reads for each.
    """
    return _shared_caches.setdefault(database, RunCache())


def run_on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop and return its result."""
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
        threading.Thread(target=_loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, _loop).result(DEADLINE_SECONDS)


def get_committer(database: Database, cache: RunCache) -> RunningCommitter:
    """Return the committer of this cache, and close the least recently used ones."""
    with _lock:
        committer = next(
            (running for running in _running if running.cache is cache and running.database is database), None
        )
        if committer is None:
            while len(_running) >= MAX_OPEN:
                _running.pop(0).close()
            committer = RunningCommitter(database, cache)
        else:
            _running.remove(committer)
        _running.append(committer)
        return committer
