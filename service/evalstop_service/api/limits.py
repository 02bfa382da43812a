"""How much a request may hold: refused while it arrives, before it fills the memory."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evalstop_service.api.problems import Problem, answer


class BodyLimit:
    """ASGI middleware: answers 413 to bodies over `max_bytes`, 415 to compressed ones.

    `streamed`: paths whose routes hold little of a body at a time, and see to its limits by themselves.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, streamed: Collection[str] = ()) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._streamed = frozenset(streamed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._streamed:
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if headers.get(b"content-encoding", "identity").lower() != "identity":
            problem = Problem(415, "The body is compressed", "send it as plain JSON, without Content-Encoding")
            await answer(problem, scope["path"])(scope, receive, send)
            return
        declared = headers.get(b"content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        await self._count(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        received, answered = 0, False

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise _TooLarge
            return message

        async def watched(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except _TooLarge:
            if not answered:
                await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = Problem(
            413,
            "The body is too large",
            f"it may hold {self._max_bytes} bytes; send the observations in smaller batches. Nothing was stored",
            headers={"Connection": "close"},
        )
        await answer(problem, scope["path"])(scope, receive, send)


class _TooLarge(BaseException):
    """Not an Exception, so that no handler on the way mistakes it for a broken body."""
