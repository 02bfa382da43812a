"""The fast path for plain batches of observations: an ASGI endpoint in front of FastAPI.

Nearly all requests of a busy service are alike: a known key, one JSON object, finite numbers. msgspec decodes them at a
tenth of the cost of the route. Any other request is passed on, including its body, to the FastAPI route of the same
path, which validates it with pydantic. This endpoint refuses nothing, and a test
checks that the route gives the same answer to everything that is accepted here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar
from uuid import UUID

import msgspec
from msgspec import Meta, Struct
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from evalstop_service.clock import Clock
from evalstop_service.domain.decision_lifecycle import Exploit
from evalstop_service.errors import Overloaded, QuotaReached, TooOften
from evalstop_service.ingest import Committer, Message, Observations
from evalstop_service.observability import logs
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.store.database import WORK
from evalstop_service.store.decisions import Decision
from evalstop_service.store.keys import Key
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web import problems
from evalstop_service.web.api.observations import MAX_POINTS, receipt_json
from evalstop_service.web.limits import KNOWN_KEY, Places, in_thread, set_sender
from evalstop_service.web.processor import Processor

_PATH = re.compile(
    r"/api/v1/runs/([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})/observations", re.ASCII
)
_HEADERS = frozenset({b"authorization", b"content-type", b"content-length", b"content-encoding", b"transfer-encoding"})


class _Batch(Struct, forbid_unknown_fields=True):
    observations: Annotated[list[PostedObservation], Meta(min_length=1, max_length=MAX_POINTS)]


_parse_id = lru_cache(maxsize=10_000)(UUID)

_decode = msgspec.json.Decoder(_Batch).decode


@dataclass(frozen=True, eq=False)
class IngestEndpoint:
    """ASGI middleware in front of the app; `max_bytes` is the app's limit for a body, `pool` counts bodies that
    arrive in chunks, `processor` limits the time of a sender."""

    path: ClassVar = "/api/v1/runs/{run_id}/observations"

    app: ASGIApp
    committer: Committer
    key_cache: KeyCache
    clock: Clock
    tell_trainer: Callable[[Decision], bool]
    offer_exploit: Callable[[Run], Exploit | None]
    max_bytes: int
    pool: Places
    processor: Processor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        secret = self._find_secret(scope) if path is not None else None
        if path is None or secret is None:
            await self._pass_on(scope, receive, send)
            return
        try:
            client = scope.get("client")
            key = scope.get(KNOWN_KEY) or await self.key_cache.authenticate_in_thread(
                secret, client[0] if client else ""
            )
        except Exception as error:
            await _answer_error(error, scope, receive, send)
            return
        if (
            key is None
            or key.project_id is None
            or key.networks  # the route compares them with the address
            or not ("ingest" in key.scopes or "admin" in key.scopes)
        ):
            await self.app(scope, receive, send)
            return
        if scope.get(KNOWN_KEY) is None:
            set_sender(key.id, key.project_id)
        request = await self.processor.begin(WORK.get(), is_post=True)
        try:
            await self._answer_request(scope, receive, send, key, key.project_id, path[1])
        finally:
            self.processor.end(request)

    async def _answer_request(
        self, scope: Scope, receive: Receive, send: Send, key: Key, project_id: UUID, run_id: str
    ) -> None:
        body, next_event = await self._read_body(receive)
        points = read(body) if next_event is None else None
        if points is None:
            await self.app(scope, replay_body(body, receive, next_event), send)
            return
        scope["endpoint"], scope["path_params"] = self, {"run_id": run_id}
        logs.add_log_context(run_id=run_id, project_id=project_id)
        message = Message(project_id, _parse_id(run_id), Observations(points), key.id)
        try:
            receipt = await self.committer.submit(message)
        except Exception as error:
            if isinstance(error, QuotaReached):
                self.committer.count_refused(f"quota {error.quota}")
            await _answer_error(error, scope, receive, send)
            return
        decision = receipt.decision
        should_stop = decision is not None and decision.should_stop
        if decision is not None and decision.stops and not should_stop:  # once a decision
            should_stop = await in_thread(self.tell_trainer)(decision)
        exploit = receipt.run.exploit and await in_thread(self.offer_exploit)(receipt.run)
        document = receipt_json(receipt, should_stop, self.clock(), exploit)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(document)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": document})

    async def _read_body(self, receive: Receive) -> tuple[bytes, Event | None]:
        """The body, and None if it is complete; else the part read so far, and the event that came next."""
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            body: bytes = message.get("body", b"")
            return body, None
        parts, size = [], 0
        try:
            while message["type"] == "http.request" and size <= self.max_bytes:
                part = message.get("body", b"")
                try:
                    self.pool.take(WORK.get(), len(part))
                except (Overloaded, TooOften):
                    break
                parts.append(part)
                size += len(part)
                if not message.get("more_body", False):
                    return b"".join(parts), None
                message = await receive()
            return b"".join(parts), message
        finally:
            self.pool.release(WORK.get(), size)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let another part of the app answer; known keys and recent sessions go before heavy keys."""
        request = await self.processor.begin(WORK.get())
        try:
            await self.app(scope, receive, send)
        finally:
            self.processor.end(request)

    def _find_secret(self, scope: Scope) -> str | None:
        """The bearer secret of a request that this endpoint can handle: one with a short, plain JSON body."""
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in _HEADERS:
                if name in headers:
                    return None
                headers[name] = value
        length = headers.get(b"content-length", b"")
        if (
            b"content-encoding" in headers
            or headers.get(b"content-type", b"").lower()
            not in (b"application/json", b"application/json; charset=utf-8")
            or not length.isdigit()
            or int(length) > self.max_bytes
        ):
            return None
        scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
        return secret.decode("latin-1") if scheme.lower() == b"bearer" else None


async def _answer_error(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    problem = problems.problem_of(error)
    await problems.answer(problem, scope["path"])(scope, receive, send)


def read(body: bytes) -> tuple[PostedObservation, ...] | None:
    """The observations of a batch that can be decoded completely; None for any other."""
    try:
        batch = _decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    points = batch.observations
    # The decoder takes the last of duplicate names. Then a name occurs more often than there are observations. So it
    # does when a metric has a field's name or a field is null: the FastAPI route distinguishes these cases.
    count, stderrs, times = body.count, body.count(b'"stderr"'), body.count(b'"time"')
    if (
        b"\\" in body
        or count(b'"observations"') != 1
        or not count(b'"metric"') == count(b'"step"') == count(b'"value"') == len(points)
        or (stderrs and stderrs != sum(point.stderr is not None for point in points))
        or (times and times != sum(point.time is not None for point in points))
    ):
        return None
    return tuple(points)


def replay_body(body: bytes, receive: Receive, next_event: Event | None = None) -> Receive:
    """A `receive` that replays what was already read, then continues."""
    waiting: list[Event] = [{"type": "http.request", "body": body, "more_body": next_event is not None}]
    if next_event is not None:
        waiting.append(next_event)

    async def replayed() -> Event:
        return waiting.pop(0) if waiting else await receive()

    return replayed
