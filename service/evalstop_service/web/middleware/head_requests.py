"""HEAD: what GET would answer, but for the body (RFC 9110, section 9.3.2). Probes and link checkers ask so."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware: the app is asked by GET, and told that the client has gone once it has begun to answer.

    So also a stream ends that would go on for hours.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        begun = False

        async def receiving() -> Message:
            return {"type": "http.disconnect"} if begun else await receive()

        async def head(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun, scope["method"] = True, "HEAD"  # as which it is counted and logged
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        scope["method"] = "GET"
        await self._app(scope, receiving, head)
