"""Delays refusals to an address with many concurrent requests, so that it does not use up the processor.

Otherwise a flood that retries immediately after each 401 or 429 would be answered as fast as the process can. Accepted
requests are never delayed, nor clients that send one request after the other.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_AT_ONCE = 2
"""Concurrent requests of one address beyond which its refusals are delayed."""

PAUSE_SECONDS = 1.0

_REFUSED = (401, 429)


class SlowRefusals:
    """Middleware: delays a refusal by a second if its address has more than `MOST_AT_ONCE` requests in progress."""

    def __init__(self, app: ASGIApp, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._app, self._pause_seconds = app, pause_seconds
        self._under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address = scope["client"][0] if scope.get("client") else ""

        async def send_late(message: Message) -> None:
            refused = message["type"] == "http.response.start" and message["status"] in _REFUSED
            if refused and self._under_way[address] > MOST_AT_ONCE:
                await asyncio.sleep(self._pause_seconds)
            await send(message)

        self._under_way[address] += 1
        try:
            await self._app(scope, receive, send_late)
        finally:
            self._under_way[address] -= 1
            if not self._under_way[address]:
                del self._under_way[address]
