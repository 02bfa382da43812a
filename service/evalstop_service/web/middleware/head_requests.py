"""HEAD requests: the answer of GET without its body (RFC 9110, section 9.3.2), for probes and link checkers."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware: passes the request to the app as GET, and reports a disconnect once the answer has started.

    This ends streams that would otherwise last for hours.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        started = False

        async def receiving() -> Message:
            return {"type": "http.disconnect"} if started else await receive()

        async def head(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started, scope["method"] = True, "HEAD"  # the method for metrics and logs
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        scope["method"] = "GET"
        await self._app(scope, receiving, head)
