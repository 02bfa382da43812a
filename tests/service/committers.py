"""Committers for tests: a process each, as far as ingestion knows, on one event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from evalstop_service.errors import ServiceError
from evalstop_service.ingest import Committer, Message, Receipt, RunCache
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store.database import Database

DEADLINE_SECONDS = 60.0
MOST = 6
"""Committers that stay open: each holds connections to its database."""

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
_lock = threading.Lock()
_running: list[RunningCommitter] = []


class RunningCommitter:
    """A committer on the loop, whose clock shows the time of the last call."""

    def __init__(self, database: Database, cache: RunCache) -> None:
        self.database, self.cache = database, cache
        self.metrics = ServiceMetrics()
        self.now = datetime.now(UTC)
        self.committer = Committer(database, cache, lambda: self.now, self.metrics)
        self._exit = AsyncExitStack()
        run_on_loop(self._exit.enter_async_context(self.committer.run()))

    def submit_all(self, messages: Sequence[Message], now: datetime) -> list[Receipt | ServiceError]:
        """Submit messages in one turn of the loop."""

        async def together() -> list[Receipt | BaseException]:
            return await asyncio.gather(*map(self.committer.submit, messages), return_exceptions=True)

        self.now = now
        return cast("list[Receipt | ServiceError]", run_on_loop(together()))

    def count(self, name: str, **labels: str) -> float:
        """What the committer counted."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def close(self) -> None:
        """Commit what waits."""
        run_on_loop(self._exit.aclose())


def close_all_committers() -> None:
    """Close the committers that are open."""
    with _lock:
        while _running:
            _running.pop().close()


def close_committers_of(database: Database) -> None:
    """Close the committers that are open on this database."""
    with _lock:
        for running in [one for one in _running if one.database is database]:
            _running.remove(running)
            running.close()


def run_on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """What comes of a coroutine that runs on the loop."""
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
        threading.Thread(target=_loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, _loop).result(DEADLINE_SECONDS)


def get_committer(database: Database, cache: RunCache) -> RunningCommitter:
    """The committer with this cache; those used longest ago are closed."""
    with _lock:
        found = next((one for one in _running if one.cache is cache and one.database is database), None)
        if found is None:
            while len(_running) >= MOST:
                _running.pop(0).close()
            found = RunningCommitter(database, cache)
        else:
            _running.remove(found)
        _running.append(found)
        return found
