"""Limits the size of a request body and of all bodies together, while they arrive and before they fill the memory;
decompresses those that may be compressed.

The sender is identified before any of the body is held. It has a share of each pool, and others cannot fill these:

| pool | for | in all | a key | a project |
|---|---|---|---|---|
| decisions | short bodies of operators and receivers: vetoes, pauses, reports | 8 MiB | 1 MiB | 4 MiB |
| bodies | other bodies of a key or session | 64 MiB | 16 MiB, or one body if the limit is higher | 32 MiB |
| strangers | bodies without a valid key or session, and the sign-in form | 8 MiB | 512 KiB per address | |
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from anyio import to_thread
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evalstop_service.clock import Clock
from evalstop_service.decisions import message_links
from evalstop_service.decisions.veto_windows import HeardVeto
from evalstop_service.errors import Overloaded, TooOften
from evalstop_service.security.scopes import VisitorRole
from evalstop_service.store.database import Work
from evalstop_service.web.api.ingest_endpoint import replay_body
from evalstop_service.web.context import UNAUTHORIZED, read_address, read_secret
from evalstop_service.web.limits import LIMITS, RECEIVED_AT, SIGN_IN, Places, in_thread, is_decision_path, is_veto_path
from evalstop_service.web.pages.cookies import SESSION, read_cookie
from evalstop_service.web.pages.visitor import Site, identify_visitor
from evalstop_service.web.problem_kinds import ProblemKind
from evalstop_service.web.problems import Problem, answer, problem_of

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SHORT_BYTES = 64 * 1024
"""Largest body of a decision, and the most that is held without a valid key or session."""

_MIB = 2**20

MOST_PARTS = 1_100_000
"""Limit on lists, objects, strings and commas in a body; a batch of 10,000 observations with all their fields has
160,000."""

ENCODINGS = "gzip, zstd, identity"

WINDOW_LOG = 23
"""Base-2 logarithm of zstd's largest window, 8 MiB: every decoder must support it, and it bounds the memory."""

MOST_MEMBERS = 100
"""Compressed files may be concatenated, including empty ones, and each costs a copy of those after it."""

_BUSY = Problem(
    503,
    ProblemKind.OVERLOADED,
    "too many large bodies arrive at once; nothing was stored. Send the same request again in a second",
    headers={"Retry-After": "1", "Connection": "close"},
)

_SHARE_USED = Problem(
    429,
    ProblemKind.TOO_MANY_BODIES,
    "nothing was stored; send fewer requests at once, and this one again in a second",
    headers={"Retry-After": "1", "Connection": "close"},
)

_STRANGER = Problem(
    401,
    UNAUTHORIZED.kind,
    f"without a valid key or session a body may have at most {SHORT_BYTES} bytes; {UNAUTHORIZED.detail}",
    headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
)


class HeldBodies:
    """The pools of one process; `max_bytes`: the limit of a body."""

    def __init__(self, max_bytes: int) -> None:
        largest = max(64 * _MIB, 2 * max_bytes)
        self.known = Places("bodies", most=largest, of_key=max(16 * _MIB, max_bytes), of_project=largest // 2)
        self._decisions = Places("bodies of decisions", most=8 * _MIB, of_key=_MIB, of_project=4 * _MIB)
        self._strangers = Places("bodies without a key", most=8 * _MIB, of_key=_MIB // 2, of_project=_MIB // 2)

    def select_pool(self, sender: Sender, path: str, declared_bytes: int | None) -> Places:
        """The pool for a body; `declared_bytes`: its declared length, or None."""
        if not sender.known or path == SIGN_IN:
            return self._strangers
        is_short = declared_bytes is not None and declared_bytes <= SHORT_BYTES
        return self._decisions if is_short and sender.reports and is_decision_path(path) else self.known


@dataclass(frozen=True, eq=False)
class BodyLimit:
    """ASGI middleware: answers 413 to bodies over `max_bytes`, 415 to compressed ones, 401 to bodies over 64 KiB
    without a valid key or session, 429 to a sender that has used its share, 503 when a pool is full.

    A body is passed on when it has arrived completely.
    `identify`: identifies the sender of a request by its headers. `report_refused_veto` is called when an authorized
    veto or pause, or a sign-in, is answered with a server error, with the project if known.
    `compressible`: paths whose bodies may be compressed. `streamed_below`: prefixes of paths; their routes hold little
    of a body at a time and enforce their own limits. `refusal`: makes a problem the response to a request for a path.
    """

    app: ASGIApp
    max_bytes: int
    held_bodies: HeldBodies
    identify: Callable[[Scope], Awaitable[Sender]]
    report_refused_veto: Callable[[UUID | None], None]
    compressible: Collection[str] = ()
    streamed_below: tuple[str, ...] = ()
    refusal: Callable[[Problem, str], ASGIApp] = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(self.streamed_below):
            await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        encoding = headers.get(b"content-encoding", "").strip().lower() or "identity"
        problem = None
        if "\0" in scope["path"]:
            detail = "a path may not contain the character NUL; /docs lists all paths"
            problem = Problem(404, ProblemKind.NOT_FOUND, detail)
        elif scope["path"] not in self.compressible:
            if encoding != "identity":
                detail = "send it as plain JSON, without Content-Encoding"
                problem = Problem(415, ProblemKind.COMPRESSED_BODY, detail)
        elif encoding not in ENCODINGS.split(", "):
            detail = f"Content-Encoding must be one of {ENCODINGS}; nothing was stored"
            problem = Problem(415, ProblemKind.UNKNOWN_ENCODING, detail, headers={"Accept-Encoding": ENCODINGS})
        if problem is not None:
            await self.refusal(problem, scope["path"])(scope, receive, send)
            return
        declared = headers.get(b"content-length", "")
        size = int(declared) if declared.isdecimal() else None
        if size is not None and size > self.max_bytes:
            await self.refusal(_too_large(self.max_bytes), scope["path"])(scope, receive, send)
        elif declared in ("", "0") and b"transfer-encoding" not in headers:
            await self.app(scope, receive, send)
        else:
            await self._answer_request(scope, receive, send, size, encoding)

    async def _answer_request(
        self, scope: Scope, receive: Receive, send: Send, declared_bytes: int | None, encoding: str
    ) -> None:
        """Identify the sender, then hold the body; reports failures on veto paths."""
        path: str = scope["path"]
        sender: Sender | None = None

        def report_failure() -> None:
            if is_veto_path(path) and (path == SIGN_IN or sender is None or sender.operates):
                self.report_refused_veto(None if sender is None else sender.project_id)

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                # A stranger can have sign-ins answered with 429, and must not keep windows open.
                if status >= 500 or (status == 429 and sender is not None and sender.operates and path != SIGN_IN):
                    report_failure()
            await send(message)

        try:
            sender = await self.identify(scope)
        except Exception as error:  # the database is away
            await self.refusal(problem_of(error), path)(scope, receive, watched)
            return
        # A stranger's body is not worth the time to decompress it.
        if not sender.known and (encoding != "identity" or (declared_bytes or 0) > SHORT_BYTES):
            await self.refusal(_STRANGER, path)(scope, receive, watched)
            return
        try:
            arrived = await self._hold_body(scope, receive, watched, sender, declared_bytes, encoding)
        except Exception:  # a bug, which an outer layer answers with 500
            report_failure()
            raise
        if not arrived and sender.operates and path != SIGN_IN:
            # Its sender gave up, as while this process was stopped for some seconds. uvicorn then drops a body that has
            # arrived. A sign-in may be a stranger's, who must not keep windows open.
            report_failure()

    async def _hold_body(
        self, scope: Scope, receive: Receive, send: Send, sender: Sender, declared_bytes: int | None, encoding: str
    ) -> bool:
        """Receive the body, counting it in its pool, decompress it and pass it on; False if it did not arrive."""
        is_plain = encoding == "identity"
        pool = self.held_bodies.select_pool(sender, scope["path"], declared_bytes if is_plain else None)
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            if size > self.max_bytes:
                raise _too_large(self.max_bytes)
            if size > SHORT_BYTES and not sender.known:
                raise _STRANGER
            try:
                pool.take(sender.work, size - held)
            except Overloaded:
                raise _BUSY from None
            except TooOften:
                raise _SHARE_USED from None
            held = size

        parts: list[bytes] = []
        refusal: Problem | None = None
        try:
            try:
                arriving = True
                while arriving:
                    message = await receive()
                    if message["type"] != "http.request":  # the client has disconnected
                        return False
                    parts.append(message.get("body", b""))
                    hold(held + len(parts[-1]))
                    arriving = message.get("more_body", False)
                body = b"".join(parts)
                parts.clear()
                if not is_plain:
                    body = await in_thread(decompress)(body, encoding, self.max_bytes)
                    hold(max(held, len(body)))
                if (count := _count_parts(body)) > MOST_PARTS:
                    detail = f"it has {count} lists, objects, strings and commas, and the limit is {MOST_PARTS}; "
                    detail += "send the observations in smaller batches. Nothing was stored"
                    raise Problem(413, ProblemKind.BODY_TOO_LARGE, detail)
            except Problem as problem:
                refusal = problem
            else:
                await self.app(scope, replay_body(body, receive), send)
        finally:
            pool.release(sender.work, held)
        if refusal is not None:
            # Only after the release: refusals are sent slowly, and bodies that still arrive need the room.
            await self.refusal(refusal, scope["path"])(scope, receive, send)
        return True


def _too_large(max_bytes: int) -> Problem:
    return Problem(
        413,
        ProblemKind.BODY_TOO_LARGE,
        f"the limit is {max_bytes} bytes; send the observations in smaller batches. Nothing was stored",
        headers={"Connection": "close"},
    )


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a body of at most so many bytes, by `gzip` or `zstd`. Raises Problem."""
    parts: list[bytes] = []
    room = max_bytes
    for _ in range(MOST_MEMBERS):
        try:
            if encoding == "gzip":
                gzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
                part, is_complete, body = gzip.decompress(body, room + 1), gzip.eof, gzip.unused_data
            else:
                reader = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG})
                part, is_complete, body = reader.decompress(body, room + 1), reader.eof, reader.unused_data
        except (zlib.error, zstd.ZstdError) as error:
            raise _cannot_decompress(_describe_error(error)) from error
        if len(part) > room:
            raise _too_large(max_bytes)
        if not is_complete:
            raise _cannot_decompress("it is truncated")
        parts.append(part)
        room -= len(part)
        if not body:
            return b"".join(parts)
    raise _cannot_decompress(f"it is a concatenation of more than {MOST_MEMBERS} compressed files")


def _cannot_decompress(reason: str) -> Problem:
    return Problem(400, ProblemKind.UNREADABLE_ENCODING, f"{reason}; nothing was stored")


def _describe_error(error: Exception) -> str:
    if "too much memory" in str(error):
        return f"its window is over {2 ** (WINDOW_LOG - 20)} MiB; compress it without `--long` and `--ultra`"
    return str(error)


def _count_parts(body: bytes) -> int:
    """About how many values a body contains; counting is much faster than parsing."""
    if len(body) <= MOST_PARTS:
        return 0
    return sum(map(body.count, (b"[", b"{", b","))) + body.count(b'"') // 2


class HearVetoes:
    """ASGI middleware in front of all others: no window ends before the vetoes sent in it are answered."""

    def __init__(self, app: ASGIApp, hearing: Callable[[], AbstractContextManager[HeardVeto]], clock: Clock) -> None:
        self._app, self._hearing, self._clock = app, hearing, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not is_veto_path(scope["path"]):
            await self._app(scope, receive, send)
            return
        scope[RECEIVED_AT] = self._clock()
        with self._hearing() as veto:

            async def watched() -> Message:
                message = await receive()
                veto.arrived = not message.get("more_body", False)
                return message

            await self._app(scope, watched, send)


@dataclass(frozen=True)
class Sender:
    """The sender of a request, by its headers. `known`: a valid key or session; `operates`: may veto in its project;
    `reports`: may report on stops there."""

    work: Work
    known: bool = False
    operates: bool = False
    reports: bool = False
    project_id: UUID | None = None


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
