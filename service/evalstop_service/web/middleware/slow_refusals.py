"""Delays refusals to an address that gets many, so that it does not use up the processor.

Otherwise a flood that retries immediately after each 401 or 429 would be answered as fast as the process can. Accepted
requests are never delayed.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evalstop_service.security.rate_limits import Rate, RateLimit

PROMPT_REFUSALS = Rate(burst=20, per_second=5)
"""Refusals of an address that are answered at once."""

PAUSE_SECONDS = 1.0

_REFUSED = (401, 429)


class SlowRefusals:
    """Middleware: delays a refusal by a second if its address has had more than `PROMPT_REFUSALS`."""

    def __init__(self, app: ASGIApp, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._app, self._pause_seconds = app, pause_seconds
        self._limit = RateLimit(PROMPT_REFUSALS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address = scope["client"][0] if scope.get("client") else ""

        async def send_late(message: Message) -> None:
            refused = message["type"] == "http.response.start" and message["status"] in _REFUSED
            if refused and self._limit.spend(address):
                await asyncio.sleep(self._pause_seconds)
            await send(message)

        await self._app(scope, receive, send_late)
