"""Server-sent events that notify open pages of changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack

import anyio
import anyio.to_thread
import sqlalchemy as sa
from anyio import CapacityLimiter
from fastapi import Response
from fastapi.responses import PlainTextResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from evalstop_service.errors import Overloaded, TooOften
from evalstop_service.store.turns import Work
from evalstop_service.web.limits import Limits

POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 15
SEND_TIMEOUT_SECONDS = 30
_POLLING_THREADS = 4  # separate from those of the API, so that open pages cannot starve it

ReadRevision = Callable[[], str | None]
"""Reads the current revision of a page; None if the visitor may no longer see it."""


class Streams:
    """The open streams of a process."""

    def __init__(self, limits: Limits, poll_seconds: float = POLL_SECONDS) -> None:
        self._places = limits.event_streams
        self._poll_seconds = poll_seconds
        self._polls = CapacityLimiter(_POLLING_THREADS)
        self.open_count = 0

    def open_stream(self, sender: Work, seen_revision: str, read_revision: ReadRevision) -> Response:
        """A stream of `changed` events after `seen_revision`, for a sender; 429 when too many are open."""
        if not self._places.has_room(sender):
            return PlainTextResponse("too many open pages of one person or project", 429, {"Retry-After": "30"})
        return EventSourceResponse(
            self._send_events(sender, seen_revision, read_revision),
            ping=HEARTBEAT_SECONDS,
            send_timeout=SEND_TIMEOUT_SECONDS,
        )

    async def _send_events(
        self, sender: Work, seen_revision: str, read_revision: ReadRevision
    ) -> AsyncIterator[ServerSentEvent]:
        self.open_count += 1
        try:
            with ExitStack() as held:  # here, because a stream that is never sent is never closed
                try:
                    held.enter_context(self._places.hold(sender))
                except (Overloaded, TooOften):  # streams that began at the same moment took the last places
                    return  # the browser opens the stream again, and is refused if there is still no place
                while True:
                    try:
                        revision = await anyio.to_thread.run_sync(read_revision, limiter=self._polls)
                    except (sa.exc.OperationalError, sa.exc.TimeoutError):
                        revision = seen_revision  # no event until the database answers again
                    if revision is None:
                        yield ServerSentEvent(event="gone", data="")
                        return
                    if revision != seen_revision:
                        seen_revision = revision
                        yield ServerSentEvent(event="changed", id=revision, data=revision)
                    await anyio.sleep(self._poll_seconds)
        finally:
            self.open_count -= 1
