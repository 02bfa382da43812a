"""News for open pages: server-sent events that say when what a page shows has changed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import anyio
import anyio.to_thread
import sqlalchemy as sa
from anyio import CapacityLimiter
from fastapi import Response
from fastapi.responses import PlainTextResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 15
SEND_TIMEOUT_SECONDS = 30
MOST_STREAMS = 200
_MOST_POLLS = 4  # threads that the routes of the API do without

Poll = Callable[[], str | None]
"""Reads the present revision of what a page shows; None when the visitor may no longer see it."""


class Streams:
    """The open streams of a process."""

    def __init__(self, most: int = MOST_STREAMS, poll_seconds: float = POLL_SECONDS) -> None:
        self._most = most
        self._poll_seconds = poll_seconds
        self._polls = CapacityLimiter(_MOST_POLLS)
        self.open = 0

    def answer(self, seen: str, poll: Poll) -> Response:
        """A stream of `changed` events from the revision `seen` on; 503 when there are too many streams."""
        if self.open >= self._most:
            return PlainTextResponse("too many pages are open", 503, {"Retry-After": "30"})
        return EventSourceResponse(self._events(seen, poll), ping=HEARTBEAT_SECONDS, send_timeout=SEND_TIMEOUT_SECONDS)

    async def _events(self, seen: str, poll: Poll) -> AsyncIterator[ServerSentEvent]:
        self.open += 1
        try:
            while True:
                try:
                    revision = await anyio.to_thread.run_sync(poll, limiter=self._polls)
                except (sa.exc.OperationalError, sa.exc.TimeoutError):
                    revision = seen  # the page stays as it is until the database answers again
                if revision is None:
                    yield ServerSentEvent(event="gone", data="")
                    return
                if revision != seen:
                    seen = revision
                    yield ServerSentEvent(event="changed", id=revision, data=revision)
                await anyio.sleep(self._poll_seconds)
        finally:
            self.open -= 1
