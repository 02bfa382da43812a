"""The route for observations of many runs in one stream of lines, for shippers of a whole cluster's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from threading import Event
from typing import Any
from uuid import UUID

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.types import Receive

from evalstop_service.decisions.commands import tell_trainer
from evalstop_service.domain.run_results import Call
from evalstop_service.store.turns import WORK
from evalstop_service.web.api.reading.decompression import WINDOW_LOG, Decompressor, create_decompressor
from evalstop_service.web.api.reading.json_lines import LINE, MOST_LINE_BYTES
from evalstop_service.web.api.reading.stream import StreamIngestion, StreamLimits, too_slow
from evalstop_service.web.api.reading.stream_result import MOST_ERRORS, StreamTotals
from evalstop_service.web.api.schemas import Answer, BestCheckpointOut
from evalstop_service.web.context import Commit, Ctx, Ingest, Tell
from evalstop_service.web.limits import in_thread
from evalstop_service.web.problem_kinds import ProblemKind
from evalstop_service.web.problems import Problem, ProblemDetails

PATH = "/observations"
MEDIA_TYPE = "application/x-ndjson"
ENCODINGS = "gzip, zstd, identity"

_DRAIN_SECONDS = 2.0
_DRAIN_BYTES = 16 * 2**20


class LineError(Answer):
    """The error of a line. Only this line was not stored, or only its observations that conflict with stored ones."""

    line: int = Field(description="counted from 1, including blank lines")
    title: str = Field(description="the kind of problem")
    detail: str = Field(description="what is wrong with it")


class RunStanding(Answer):
    """The state of a run after the stream."""

    run_id: UUID = Field(description="id of the run, as in the lines")
    accepted: int = Field(description="number of its new observations")
    verdict: Call = Field(description="the policy's current verdict")
    should_stop: bool = Field(description="true once a stop was requested: save a checkpoint and end")
    best_checkpoint: BestCheckpointOut | None = Field(description="null until a checkpoint has an eval")


class StreamTotalsOut(Answer):
    """The result of a stream, and the state of its runs. Everything is durable."""

    lines: int = Field(
        description="number of lines, from the first on, that were stored or refused, including blank ones"
    )
    accepted: int = Field(description="number of new observations")
    duplicates: int = Field(description="observations that were already stored with the same value")
    conflict_count: int = Field(description="observations that were already stored with another value, which stands")
    error_count: int = Field(description="refused lines, and conflicting observations")
    errors: list[LineError] = Field(description=f"the first {MOST_ERRORS} errors, by line")
    runs: list[RunStanding] = Field(description="one for each run in the stream")


class StreamProblem(ProblemDetails):
    """Why a stream was refused or failed, and what was stored until then."""

    lines_stored: int | None = Field(
        None, description="number of lines, from the first on, that are stored or refused: continue after them"
    )
    totals: StreamTotalsOut | None = Field(None, description="what was stored until then")


_LINES = {
    "type": "array",
    "items": {"$ref": "#/components/schemas/Line"},
    "description": "not an array: one item per line, each ended by a line feed",
}

_REQUEST = {
    "requestBody": {
        "required": True,
        "description": "One object per line. It may be compressed with `Content-Encoding: gzip`, or `zstd` with a "
        f"window of at most {2 ** (WINDOW_LOG - 20)} MiB. A line may have at most {MOST_LINE_BYTES} bytes.",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Lines"}}},
    }
}

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": StreamProblem,
        "description": "400 cannot be decompressed or incomplete, 401 no valid key, 403 scope missing, 408 too slow, "
        "413 too large, 415 another type or encoding; continue after the first `lines_stored` lines. Sending the "
        "whole stream again is harmless",
    },
    "5XX": {
        "model": StreamProblem,
        "description": "503 the database is unavailable or the service overloaded, send the same again; 500 a bug",
    },
}


def schemas() -> dict[str, Any]:
    """The schemas of request bodies, by name, for the OpenAPI document: FastAPI adds only those of JSON bodies."""
    line = LINE.json_schema(ref_template="#/components/schemas/{model}")
    parts: dict[str, Any] = line.pop("$defs")
    return parts | {"Line": {"title": "Line"} | line, "Lines": {"title": "Lines"} | _LINES}


def routes(limits: StreamLimits) -> APIRouter:
    """The route; `limits` bounds the concurrent streams."""
    router = APIRouter(prefix=PATH, tags=["observations"])
    room = asyncio.Semaphore(limits.streams)

    @router.post("", response_model=StreamTotalsOut, openapi_extra=_REQUEST, responses=_PROBLEMS)
    async def stream_observations(
        request: Request, caller: Ingest, committer: Commit, clock: Tell, context: Ctx
    ) -> Response:
        """Store observations of many runs, sent as lines of JSON, while they arrive.

        A line holds one observation or, under `observations`, many of one run; lines of many runs may be mixed. An
        error affects only its line and is reported by line number. The response comes when everything is durable.
        """
        decompressor = _choose_decompressor(request, limits)
        body = _Body(request.receive, limits, context.shutdown)
        ingestion = StreamIngestion(committer, caller.project_id, limits, caller.key.id)
        with context.limits.streams.hold(WORK.get()):
            async with _hold_stream(room, limits.wait_seconds):
                try:
                    await ingestion.ingest(body.parts(), decompressor)
                except Problem as problem:
                    is_drained = await body.drain()
                    raise _describe_interruption(problem, ingestion.totals, keep=is_drained) from problem
        unsaid = ingestion.totals.list_decisions()
        tell = in_thread(partial(tell_trainer, context.database, clock))
        told = [decision.id for decision in unsaid if await tell(decision)]
        return Response(msgspec.json.encode(ingestion.totals.result(told)), media_type="application/json")

    return router


def _choose_decompressor(request: Request, limits: StreamLimits) -> Decompressor:
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != MEDIA_TYPE:
        raise Problem(415, ProblemKind.NOT_JSON_LINES, f"send it with the header `Content-Type: {MEDIA_TYPE}`")
    decompressor = create_decompressor(", ".join(request.headers.getlist("content-encoding")))
    if decompressor is None:
        detail = f"Content-Encoding must be one of {ENCODINGS}; nothing was stored"
        raise Problem(415, ProblemKind.UNKNOWN_ENCODING, detail, headers={"Accept-Encoding": ENCODINGS})
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.stream_bytes:
        detail = f"the limit is {limits.stream_bytes} bytes; send it in parts. Nothing was stored"
        raise Problem(413, ProblemKind.BODY_TOO_LARGE, detail, headers={"Connection": "close"})
    return decompressor


@asynccontextmanager
async def _hold_stream(room: asyncio.Semaphore, wait_seconds: float) -> AsyncIterator[None]:
    """Wait for a free place for a stream, and hold it."""
    try:
        async with asyncio.timeout(wait_seconds):
            await room.acquire()
    except TimeoutError as error:
        detail = "too many streams are in progress. Nothing was stored: send the same request again"
        headers = {"Retry-After": "5", "Connection": "close"}
        raise Problem(503, ProblemKind.OVERLOADED, detail, headers=headers) from error
    try:
        yield
    finally:
        room.release()


def _describe_interruption(problem: Problem, totals: StreamTotals, *, keep: bool) -> Problem:
    lines = totals.lines
    detail = f"{problem.detail}. The first {lines} lines were processed, see `totals`; the stream failed after them. "
    detail += "Sending the whole stream again is harmless: stored observations count as duplicates"
    headers = {**(problem.headers or {}), **({} if keep else {"Connection": "close"})}
    extra = {"lines_stored": lines, "totals": msgspec.to_builtins(totals.result(()))}
    return Problem(problem.status, problem.kind, detail, headers=headers, more=extra)


class _Body:
    """The body of a request as it arrives."""

    def __init__(self, receive: Receive, limits: StreamLimits, shutdown: Event) -> None:
        self._receive, self._limits, self._shutdown = receive, limits, shutdown
        self._ended = False

    async def parts(self) -> AsyncIterator[bytes]:
        """The parts of the body. Raises Problem when they stop arriving, and when the server shuts down."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.stream_seconds
        while not self._ended:
            seconds = min(self._limits.idle_seconds, until - loop.time())
            try:
                async with asyncio.timeout(seconds):
                    part = await self._receive_part()
            except TimeoutError as error:
                raise too_slow(self._limits) from error
            if part:
                yield part
            if self._shutdown.is_set() and not self._ended:
                detail = "the service is shutting down"
                raise Problem(503, ProblemKind.OVERLOADED, detail, headers={"Retry-After": "1"})

    async def drain(self) -> bool:
        """Read the rest, so that the sender gets the response; False if too much is left."""
        remaining_bytes = _DRAIN_BYTES
        with suppress(TimeoutError, Problem):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while not self._ended and remaining_bytes > 0:
                    remaining_bytes -= len(await self._receive_part())
        return self._ended

    async def _receive_part(self) -> bytes:
        message = await self._receive()
        self._ended = message["type"] == "http.disconnect" or not message.get("more_body", False)
        if message["type"] == "http.disconnect":
            raise Problem(400, ProblemKind.BODY_BROKE_OFF, "the connection was closed")
        part: bytes = message.get("body", b"")
        return part
