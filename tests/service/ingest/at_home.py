"""Scenes whose news go the way that a server's do: through a committer at home on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar, cast

from evalstop_service.errors import ServiceError
from evalstop_service.ingest import Arrival, Committer, LiveRuns, News, Receipt
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store.database import Database
from evalstop_service.store.runs import Run

from tests.service.scenes import NOW, Scene

DEADLINE_SECONDS = 30.0

_T = TypeVar("_T")


class Home:
    """An event loop in a thread of its own, and committers on it: one for each memory, of which a few stay open."""

    MOST = 4

    def __init__(self, database: Database) -> None:
        self.service_metrics = ServiceMetrics()
        self._database = database
        self._loop = asyncio.new_event_loop()
        self._open: list[tuple[LiveRuns, Committer, AsyncExitStack]] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """What comes of a coroutine that runs on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_SECONDS)

    def of(self, live: LiveRuns) -> Committer:
        """The committer with this memory."""
        for memory, committer, _ in self._open:
            if memory is live:
                return committer
        if len(self._open) == self.MOST:
            self.leave()
        committer, end = Committer(self._database, live, lambda: NOW, self.service_metrics), AsyncExitStack()
        self.do(end.enter_async_context(committer.at_home()))
        self._open.append((live, committer, end))
        return committer

    def leave(self) -> None:
        """Close the committers that there are."""
        while self._open:
            self.do(self._open.pop()[-1].aclose())

    def close(self) -> None:
        """Close the committers and the loop."""
        self.leave()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_SECONDS)
        self._loop.close()


@dataclass(frozen=True)
class SceneAtHome(Scene):
    """A scene that takes news in on a loop."""

    home: Home | None = None

    def take(self, run: Run, news: News, now: datetime = NOW) -> Receipt:
        (answer,) = self.take_all([Arrival(self.project_id, run.id, news)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def take_all(self, arrivals: Sequence[Arrival], now: datetime = NOW) -> list[Receipt | ServiceError]:
        assert self.home is not None
        committer = self.home.of(self.live)

        async def together() -> list[Receipt | BaseException]:
            return await asyncio.gather(*map(committer.soon, arrivals), return_exceptions=True)

        return cast("list[Receipt | ServiceError]", self.home.do(together()))

    def count(self, name: str, **labels: str) -> float:
        """What the committers counted."""
        assert self.home is not None
        return self.home.service_metrics.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def at_home(scene: Scene) -> Iterator[SceneAtHome]:
    """The same scene at home on a loop."""
    home = Home(scene.database)
    try:
        yield SceneAtHome(scene.database, scene.project_id, scene.live, home)
    finally:
        home.close()
