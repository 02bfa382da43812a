"""How much a request may hold, and all of them together: refused while it arrives, before it fills the memory."""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evalstop_service.web.problems import Problem, answer

MOST_HELD_BYTES = 64 * 2**20
"""Of all bodies that are arriving or being read; what comes then is answered 503."""

MOST_PARTS = 1_100_000
"""Lists, objects, texts and commas of a body; a batch of 10,000 observations with all their fields has 160,000."""

_BUSY = Problem(
    503,
    "The service cannot take more just now",
    "too many large bodies arrive at one time; nothing was stored, send the same again in a second",
    headers={"Retry-After": "1", "Connection": "close"},
)


class BodyLimit:
    """ASGI middleware: answers 413 to bodies over `max_bytes`, 415 to compressed ones.

    A body is handed on when it has come whole.
    `streamed`, and all `streamed_below`: paths whose routes hold little of a body at a time, and see to its limits by
    themselves. `refusal`: a problem as the answer to a request for a path.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        streamed: Collection[str] = (),
        streamed_below: tuple[str, ...] = (),
        refusal: Callable[[Problem, str], ASGIApp] = answer,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._streamed = frozenset(streamed)
        self._streamed_below = streamed_below
        self._refusal = refusal
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._streamed or scope["path"].startswith(self._streamed_below):
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if headers.get(b"content-encoding", "identity").lower() != "identity":
            problem = Problem(415, "The body is compressed", "send it as plain JSON, without Content-Encoding")
            await self._refusal(problem, scope["path"])(scope, receive, send)
            return
        declared = headers.get(b"content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await self._refusal(self._too_large(), scope["path"])(scope, receive, send)
        elif declared in ("", "0") and b"transfer-encoding" not in headers:
            await self._app(scope, receive, send)
        else:
            await self._hold(scope, receive, send)

    async def _hold(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Receive the body, counting it among all that are held, and hand it on."""
        parts: list[bytes] = []
        size = 0
        try:
            arriving = True
            while arriving:
                message = await receive()
                if message["type"] != "http.request":  # the client has gone
                    return
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                self._held_bytes += len(parts[-1])
                if size > self._max_bytes or self._held_bytes > MOST_HELD_BYTES:
                    problem = self._too_large() if size > self._max_bytes else _BUSY
                    await self._refusal(problem, scope["path"])(scope, receive, send)
                    return
                arriving = message.get("more_body", False)
            body = b"".join(parts)
            parts.clear()
            if (count := _parts(body)) > MOST_PARTS:
                await self._refusal(_too_many_parts(count), scope["path"])(scope, receive, send)
            else:
                await self._app(scope, _whole(body, receive), send)
        finally:
            self._held_bytes -= size

    def _too_large(self) -> Problem:
        return Problem(
            413,
            "The body is too large",
            f"it may hold {self._max_bytes} bytes; send the observations in smaller batches. Nothing was stored",
            headers={"Connection": "close"},
        )


def _parts(body: bytes) -> int:
    """How many values a body unfolds into, about; counting is quicker than reading by far."""
    if len(body) <= MOST_PARTS:
        return 0
    return sum(map(body.count, (b"[", b"{", b","))) + body.count(b'"') // 2


def _too_many_parts(count: int) -> Problem:
    return Problem(
        413,
        "The body is too large",
        f"it holds {count} lists, objects, texts and commas, and may hold {MOST_PARTS}; send the observations in "
        "smaller batches. Nothing was stored",
    )


def _whole(body: bytes, receive: Receive) -> Receive:
    """What the app receives: the body at once."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
