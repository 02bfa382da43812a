"""Bodies of requests: who sends one, how much of all bodies may be held while they arrive, and decompression.

The sender is identified before any of the body is held.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from anyio import to_thread
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evalstop_service.clock import Clock
from evalstop_service.decisions import message_links
from evalstop_service.decisions.veto_windows import VetoListener
from evalstop_service.errors import Overloaded, TooOften
from evalstop_service.security.scopes import VisitorRole
from evalstop_service.store.database import Work
from evalstop_service.web.api.ingest_endpoint import replay
from evalstop_service.web.context import UNAUTHORIZED, read_address, read_secret
from evalstop_service.web.limits import (
    LIMITS,
    MAX_BODY_BYTES,
    RECEIVED_AT,
    SIGN_IN,
    Limits,
    Places,
    in_thread,
    is_decision_path,
    is_veto_path,
)
from evalstop_service.web.pages.cookies import SESSION, read_cookie
from evalstop_service.web.pages.visitor import Site, identify_visitor
from evalstop_service.web.problems import Problem, ProblemKind, answer, problem_of

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SHORT_BYTES = 64 * 1024
"""Largest body of a decision, and the most that is held without a valid key or session."""

MOST_PARTS = 1_100_000
"""Limit on lists, objects, strings and commas in a body; a batch of 10,000 observations with all their fields has
160,000."""

ENCODINGS = "gzip, zstd, identity"

WINDOW_LOG = 23
"""Base-2 logarithm of zstd's largest window, 8 MiB: every decoder must support it, and it bounds the memory."""

SENDER = "sender"
"""The name in a request's scope of its `Sender`, once it is identified."""

_TOO_LARGE = Problem(
    413,
    ProblemKind.BODY_TOO_LARGE,
    f"the limit is {MAX_BODY_BYTES} bytes; send the observations in smaller batches. Nothing was stored",
    headers={"Connection": "close"},
)

_STRANGER = Problem(
    401,
    UNAUTHORIZED.kind,
    f"without a valid key or session a body may have at most {SHORT_BYTES} bytes; {UNAUTHORIZED.detail}",
    headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
)


@dataclass(frozen=True)
class Sender:
    """The sender of a request, by its headers. `known`: a valid key or session; `operates`: may veto in its project;
    `reports`: may report on stops there."""

    work: Work
    known: bool = False
    operates: bool = False
    reports: bool = False
    project_id: UUID | None = None


@dataclass(frozen=True, eq=False)
class BodyLimit:
    """ASGI middleware: answers 413 to bodies over `MAX_BODY_BYTES`, 415 to compressed ones, 401 to bodies over 64 KiB
    without a valid key or session, 429 to a sender that has used its share, 503 when a pool is full.

    A body is passed on when it has arrived completely.
    `identify`: identifies the sender of a request by its headers.
    `compressible`: paths whose bodies may be compressed. `streamed_below`: prefixes of paths; their routes hold little
    of a body at a time and enforce their own limits. `refusal`: makes a problem the response to a request for a path.
    """

    app: ASGIApp
    limits: Limits
    identify: Callable[[Scope], Awaitable[Sender]]
    compressible: Collection[str] = ()
    streamed_below: tuple[str, ...] = ()
    refusal: Callable[[Problem, str], ASGIApp] = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(self.streamed_below):
            await self.app(scope, receive, send)
            return
        refusal: Problem | None = None
        try:
            await self._answer_request(scope, receive, send)
        except (Problem, Overloaded, TooOften) as error:
            refusal = problem_of(error).with_traceback(None)  # some are raised again and again, and would keep frames
        if refusal is not None:
            # Only after the body is released: refusals are sent slowly, and bodies that still arrive need the room.
            await self.refusal(refusal, scope["path"])(scope, receive, send)

    async def _answer_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Identify the sender of a body, hold it and pass it on. Raises Problem, Overloaded and TooOften."""
        path: str = scope["path"]
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        encoding = headers.get(b"content-encoding", "").strip().lower() or "identity"
        declared = headers.get(b"content-length", "")
        size = int(declared) if declared.isdecimal() else None
        _check_head(path, encoding, path in self.compressible)
        if size is not None and size > MAX_BODY_BYTES:
            raise _TOO_LARGE
        if declared in ("", "0") and b"transfer-encoding" not in headers:
            await self.app(scope, receive, send)
            return
        try:
            sender = scope[SENDER] = await self.identify(scope)
        except Exception as error:  # the database is away
            raise problem_of(error) from error
        is_plain = encoding == "identity"
        # A stranger's body is not worth the time to decompress it.
        if not sender.known and not (is_plain and (size or 0) <= SHORT_BYTES):
            raise _STRANGER
        with _Held(self._select_pool(sender, path, size if is_plain else None), sender) as held:
            body = await _receive_body(receive, held)
            if body is None:
                return
            if not is_plain:
                body = await in_thread(decompress)(body, encoding)
                held.grow(len(body))
            if (count := _count_parts(body)) > MOST_PARTS:
                detail = f"it has {count} lists, objects, strings and commas, and the limit is {MOST_PARTS}; "
                detail += "send the observations in smaller batches. Nothing was stored"
                raise Problem(413, ProblemKind.BODY_TOO_LARGE, detail)
            await self.app(scope, replay([{"type": "http.request", "body": body}], receive), send)

    def _select_pool(self, sender: Sender, path: str, declared_bytes: int | None) -> Places:
        if not sender.known or path == SIGN_IN:
            return self.limits.bodies_of_strangers
        is_short = declared_bytes is not None and declared_bytes <= SHORT_BYTES
        of_decision = is_short and sender.reports and is_decision_path(path)
        return self.limits.bodies_of_decisions if of_decision else self.limits.bodies


def _check_head(path: str, encoding: str, is_compressible: bool) -> None:
    if "\0" in path:
        raise Problem(404, ProblemKind.NOT_FOUND, "a path may not contain the character NUL; /docs lists all paths")
    if encoding != "identity" and not is_compressible:
        raise Problem(415, ProblemKind.NOT_JSON, "send it as plain JSON, without Content-Encoding")
    if encoding not in ENCODINGS.split(", "):
        detail = f"Content-Encoding must be one of {ENCODINGS}; nothing was stored"
        raise Problem(415, ProblemKind.NOT_JSON, detail, headers={"Accept-Encoding": ENCODINGS})


class _Held:
    """The bytes of a body that are held, in their pool, until the block ends."""

    def __init__(self, pool: Places, sender: Sender) -> None:
        self._pool, self._sender, self.size = pool, sender, 0

    def grow(self, size: int) -> None:
        """Hold so many bytes in all; raises Problem, and the errors of the pool."""
        if size > MAX_BODY_BYTES:
            raise _TOO_LARGE
        if size > SHORT_BYTES and not self._sender.known:
            raise _STRANGER
        self._pool.take(self._sender.work, max(0, size - self.size))
        self.size = max(self.size, size)

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.release(self._sender.work, self.size)


async def _receive_body(receive: Receive, held: _Held) -> bytes | None:
    """The body, held as it arrives; None if the client has disconnected."""
    parts: list[bytes] = []
    arriving = True
    while arriving:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        held.grow(held.size + len(parts[-1]))
        arriving = message.get("more_body", False)
    return b"".join(parts)


def decompress(body: bytes, encoding: str, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Decompress a body of at most so many bytes, by `gzip` or `zstd`. Raises Problem."""
    try:
        if encoding == "gzip":
            gzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            content, is_complete, rest = gzip.decompress(body, max_bytes + 1), gzip.eof, gzip.unused_data
        else:
            reader = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG})
            content, is_complete, rest = reader.decompress(body, max_bytes + 1), reader.eof, reader.unused_data
    except (zlib.error, zstd.ZstdError) as error:
        raise Problem(400, ProblemKind.INVALID_JSON, f"{error}; nothing was stored") from error
    if len(content) > max_bytes:
        raise _TOO_LARGE
    if not is_complete or rest:
        detail = "it is truncated, or other data follows it; nothing was stored"
        raise Problem(400, ProblemKind.INVALID_JSON, detail)
    return content


def _count_parts(body: bytes) -> int:
    """About how many values a body contains; counting is much faster than parsing."""
    if len(body) <= MOST_PARTS:
        return 0
    return sum(map(body.count, (b"[", b"{", b","))) + body.count(b'"') // 2


@dataclass(frozen=True)
class HearVetoes:
    """ASGI middleware in front of all others: no window ends before the vetoes sent in it are answered, and one that
    may not have been heard extends the windows."""

    app: ASGIApp
    listener: VetoListener
    clock: Clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not is_veto_path(scope["path"]):
            await self.app(scope, receive, send)
            return
        scope[RECEIVED_AT] = self.clock()
        status = None
        with self.listener.hearing() as veto:

            async def watched() -> Message:
                message = await receive()
                veto.arrived = not message.get("more_body", False)
                return message

            async def answering(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await self.app(scope, watched, answering)
            finally:
                sender: Sender | None = scope.get(SENDER)
                if _may_be_unheard(scope["path"], sender, status):
                    self.listener.report_failure(None if sender is None else sender.project_id)


def _may_be_unheard(path: str, sender: Sender | None, status: int | None) -> bool:
    """Whether a veto, pause or sign-in that was answered so may have to be sent again; None: it was not answered."""
    if path == SIGN_IN:  # a stranger's may be answered with 429, or given up, and must not keep windows open
        return status is not None and status >= 500
    if sender is None:
        return status is None or status >= 500
    # One who gave up may have waited for a process that was stopped: uvicorn then drops a body that has arrived.
    return sender.operates and (status is None or status == 429 or status >= 500)


_LINK = re.compile(r"/act/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/([^/]+)/(?:veto|wait)")


def create_identify(site: Site) -> Callable[[Scope], Awaitable[Sender]]:
    """A function that identifies the sender of a request; raises the database's errors if it is unavailable."""
    key_cache = site.context.key_cache

    def find_link_holder(delivery_id: UUID, token: str) -> Sender | None:
        with site.database.reading() as tx:
            link = message_links.open_link(tx, site.context.encryption, delivery_id, token, site.clock())
        if link is None:
            return None
        # A link that offers nothing more must not extend windows by requests that fail.
        return Sender(Work(delivery_id, link.project.id), True, bool(link.choices), True, link.project.id)

    async def identify(scope: Scope) -> Sender:
        # The link in a message says who sends, so that strangers at the same address hold up nobody who has it.
        if match := _LINK.fullmatch(scope["path"]):
            find = partial(find_link_holder, UUID(match[1]), match[2])
            holder = await to_thread.run_sync(find, limiter=LIMITS.get().authentication)
            if holder is not None:
                return holder
        request = Request(scope)
        address = read_address(request)
        secret = read_secret(request.headers.get("authorization", ""))
        if secret is not None:
            try:
                urgent = is_decision_path(scope["path"])
                key = await key_cache.authenticate_in_thread(secret, address, urgent, LIMITS.get().authentication)
            except TooOften:  # unknown senders get a small share; the route explains the refusal
                key = None
            if key is not None:
                operates = not {"operate", "admin"}.isdisjoint(key.scopes)
                reports = operates or "report" in key.scopes
                return Sender(Work(key.id, key.project_id), True, operates, reports, key.project_id)
        elif read_cookie(request, SESSION):
            visitor = await identify_visitor(request, site)
            if visitor is not None:
                operates = visitor.role.covers(VisitorRole.OPERATOR)
                return Sender(Work(visitor.identity, visitor.project.id), True, operates, operates, visitor.project.id)
        return Sender(Work(address))

    return identify
