"""The fast path for plain batches of observations: an ASGI endpoint in front of FastAPI.

Nearly all requests of a busy service are alike: a known key, one JSON object, finite numbers. msgspec decodes them at a
tenth of the cost of the route. Any other request is passed on, including its body, to the FastAPI route of the same
path, which validates it with pydantic. This endpoint refuses nothing, and a test
checks that the route gives the same answer to everything that is accepted here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
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
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web import problems
from evalstop_service.web.api.observations import MAX_POINTS, receipt_json
from evalstop_service.web.limits import MAX_BODY_BYTES, ROUTE_MS, Limits, in_thread, set_sender

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
    """ASGI middleware in front of the app."""

    path: ClassVar = "/api/v1/runs/{run_id}/observations"

    app: ASGIApp
    committer: Committer
    key_cache: KeyCache
    clock: Clock
    tell_trainer: Callable[[Decision], bool]
    offer_exploit: Callable[[Run], Exploit | None]
    limits: Limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        sent = _read_headers(scope) if path is not None else None
        if path is None or sent is None:
            await self._pass_on(scope, receive, send)
            return
        secret, length = sent
        try:
            client = scope.get("client")
            key = await self.key_cache.authenticate_in_thread(secret, client[0] if client else "")
        except Exception as error:
            await _answer_error(error, scope, receive, send)
            return
        if (
            key is None
            or key.project_id is None
            or key.networks  # the route compares them with the address
            or not ("ingest" in key.scopes or "admin" in key.scopes)
        ):
            await self._pass_on(scope, receive, send)
            return
        set_sender(key.id, key.project_id)
        sender = WORK.get()
        await self.limits.processor.wait_for_share(sender)
        began = self.limits.processor.begin_post(sender)
        try:
            events = await self._receive_body(receive, length)
            has_arrived = events[-1]["type"] == "http.request" and not events[-1].get("more_body", False)
            points = read(b"".join(event.get("body", b"") for event in events)) if has_arrived else None
            if points is None:
                await self.app(scope, replay(events, receive), send)
            else:
                message = Message(key.project_id, _parse_id(path[1]), Observations(points), key.id)
                await self._answer_request(scope, receive, send, message, path[1])
        finally:
            self.limits.processor.end_post(sender, began)

    async def _answer_request(self, scope: Scope, receive: Receive, send: Send, message: Message, run_id: str) -> None:
        scope["endpoint"], scope["path_params"] = self, {"run_id": run_id}
        logs.add_log_context(run_id=run_id, project_id=message.project_id)
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

    async def _receive_body(self, receive: Receive, length: int) -> list[Event]:
        """The events of a body, all of them unless it does not arrive, or too much of such bodies arrives at once."""
        events = [await receive()]
        if events[0].get("more_body", False):
            with suppress(Overloaded, TooOften), self.limits.bodies.hold(WORK.get(), length):
                while events[-1].get("more_body", False):
                    events.append(await receive())
        return events

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let another part of the app answer, at the expense of the sender that it finds."""
        try:
            await self.app(scope, receive, send)
        finally:
            self.limits.processor.charge(WORK.get(), ROUTE_MS)


def _read_headers(scope: Scope) -> tuple[str, int] | None:
    """The bearer secret and the length of the body, if it is a plain one of JSON that is not too long."""
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in _HEADERS:
            if name in headers:
                return None
            headers[name] = value
    length = headers.get(b"content-length", b"")
    if (
        b"content-encoding" in headers
        or headers.get(b"content-type", b"").lower() not in (b"application/json", b"application/json; charset=utf-8")
        or not length.isdigit()
        or int(length) > MAX_BODY_BYTES
    ):
        return None
    scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
    return (secret.decode("latin-1"), int(length)) if scheme.lower() == b"bearer" else None


async def _answer_error(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    problem = problems.problem_of(error)
    await problems.answer(problem, scope["path"])(scope, receive, send)


def read(body: bytes) -> tuple[PostedObservation, ...] | None:
    """The observations of a body that can be decoded completely; None for any other."""
    try:
        return tuple(_decode(body).observations)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def replay(events: list[Event], receive: Receive) -> Receive:
    """A `receive` that replays the events that were already received, then continues."""
    waiting = iter(events)

    async def replayed() -> Event:
        return next(waiting, None) or await receive()

    return replayed
