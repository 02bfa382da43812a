"""Refusals are answered late to an address that asks for much at one time, so that it does not spend the processor.

A flood that asks again at once after each 401 or 429 would otherwise be answered as fast as the process can. Nothing
that is granted waits, nor who asks for one thing after the other.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_AT_ONCE = 2
"""Requests of one address at one time, beyond which its refusals wait."""

PAUSE_SECONDS = 1.0

_REFUSED = (401, 429)


class SlowRefusals:
    """Middleware: holds a refusal back for a second where its address has more than `MOST_AT_ONCE` under way."""

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
