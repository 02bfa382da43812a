"""Ingests a stream of observations of many runs: reads ahead while the previous batch is being committed.

    parts ──> chunks ──> lines ──> grouped by run ──> committer      a batch: all that arrived during the last one
    └── full: reading pauses until a batch has made room

A stream commits one batch at a time, which preserves the order within each run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import groupby
from operator import attrgetter
from typing import Protocol
from uuid import UUID

from evalstop_service.errors import Overloaded, TooOften
from evalstop_service.ingest import Message, Observations, Receipt
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web import problems
from evalstop_service.web.api.reading.decompression import DecompressionError, Decompressor
from evalstop_service.web.api.reading.json_lines import TOO_LONG, BadLine, LineSplitter, decode_flat_lines, parse_line
from evalstop_service.web.api.reading.stream_result import StreamTotals
from evalstop_service.web.api.schemas import encode_number
from evalstop_service.web.problem_kinds import ProblemKind
from evalstop_service.web.problems import Problem

MOST_RUNS = 10_000
"""Limit per stream: the response reports on each run."""

RUNS_AT_A_TIME = 500
"""How many runs' observations are posted together: more would stop the event loop for long."""

_RUN = attrgetter("run_id")
_PAUSE_SECONDS = 0.05
_LONG_LINE_BYTES = 16 * 1024
_LINES_AT_A_TIME = 100  # lines read one by one before other requests get their turn

TOO_MANY_RUNS = BadLine("Too many runs", f"a stream may name at most {MOST_RUNS}; send the others in another stream")


@dataclass(frozen=True)
class StreamLimits:
    """How much one request may send, and how much of it is buffered.

    `stream_bytes`: compressed, and decompressed. `max_pending`: about how many observations are read ahead of the
    commits. `streams`: concurrent ones; others wait. `idle_seconds`: longest pause without a byte. `stream_seconds`:
    from the first byte to the last. `wait_seconds`: longest wait for another stream to end, and for the committer.
    """

    stream_bytes: int = 256 * 2**20
    max_pending: int = 10_000
    streams: int = 8
    idle_seconds: float = 30.0
    stream_seconds: float = 900.0
    wait_seconds: float = 30.0


def too_slow(limits: StreamLimits) -> Problem:
    """The problem for a sender that is too slow."""
    detail = f"a stream may pause for {limits.idle_seconds:g} seconds and last for {limits.stream_seconds:g}"
    return Problem(408, ProblemKind.BODY_TOO_SLOW, detail)


class MessageCommitter(Protocol):
    """A committer: answers each message once it is durable."""

    def submit(self, message: Message) -> Awaitable[Receipt]: ...


@dataclass(slots=True)
class _PendingRun:
    """The observations of one run that wait for a commit, and the line of each."""

    run_id: UUID
    points: list[PostedObservation] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


class StreamIngestion:
    """Ingests one stream and counts its results."""

    def __init__(
        self, committer: MessageCommitter, project_id: UUID, limits: StreamLimits, sender: UUID | None = None
    ) -> None:
        self._committer, self._project_id, self._limits, self._sender = committer, project_id, limits, sender
        self._deadline = time.monotonic() + limits.stream_seconds
        self.totals = StreamTotals()
        self._line = 0  # the number of the last line read
        self._run_ids: set[str] = set()
        self._pending: dict[str, _PendingRun] = {}
        self._size = 0
        self._ended = self._stopped = False
        self._has_pending, self._has_room = asyncio.Event(), asyncio.Event()

    async def ingest(self, body: AsyncIterator[bytes], decompressor: Decompressor) -> None:
        """Ingest a stream to its end; raises Problem if it fails. `totals` counts the complete lines until then."""
        storing = asyncio.create_task(self._store_all())
        failure: Problem | None = None
        try:
            try:
                await self._read_all(body, decompressor)
            except Problem as problem:
                failure = problem
            self._ended = True
            self._has_pending.set()
            await storing
        finally:
            storing.cancel()
        if failure is not None:
            raise failure

    async def _read_all(self, body: AsyncIterator[bytes], decompressor: Decompressor) -> None:
        splitter, packed, unpacked = LineSplitter(), 0, 0
        try:
            async for part in body:
                packed += len(part)
                self._check_size(packed)
                for piece in decompressor.feed(part):
                    unpacked += len(piece)
                    self._check_size(unpacked)
                    for block in splitter.split(piece):
                        await self._read_block(block)
                    await self._yield_to_others()
                    if self._stopped:
                        return
            decompressor.end()
        except DecompressionError as error:
            raise Problem(
                400, ProblemKind.UNREADABLE_ENCODING, f"{error}, after {unpacked} decompressed bytes"
            ) from error
        last_line = splitter.rest()
        if last_line != b"":
            await self._read_block(last_line)

    def _check_size(self, count: int) -> None:
        most = self._limits.stream_bytes
        if count > most:
            detail = f"the limit is {most} bytes, compressed and decompressed; send the rest in another request"
            raise Problem(413, ProblemKind.BODY_TOO_LARGE, detail)

    async def _yield_to_others(self) -> None:
        """Yield to other tasks, and wait while `max_pending` observations wait."""
        if time.monotonic() > self._deadline:
            raise too_slow(self._limits)
        await asyncio.sleep(0)
        while self._size >= self._limits.max_pending and not self._stopped:
            self._has_room.clear()
            await self._has_room.wait()

    async def _read_block(self, block: bytes | None) -> None:
        if block is None:
            self._refuse(TOO_LONG)
            return
        observations = decode_flat_lines(block)
        if observations is not None:
            for run_id, points in groupby(observations, key=_RUN):
                self._add_observations(run_id, list(points))
            return
        for count, line in enumerate(block.split(b"\n"), start=1):
            if line.isspace() or not line:
                self._line += 1
            else:
                try:
                    is_short = len(line) < _LONG_LINE_BYTES
                    result = parse_line(line) if is_short else await asyncio.to_thread(parse_line, line)
                except BadLine as bad:
                    self._refuse(bad)
                else:
                    self._add_observations(result.run_id, result.points, lines=1)
            if count % _LINES_AT_A_TIME == 0 or self._size >= self._limits.max_pending:
                await self._yield_to_others()

    def _refuse(self, bad: BadLine, lines: int = 1) -> None:
        for _ in range(lines):
            self._line += 1
            self.totals.add_error(self._line, bad.title, bad.detail)

    def _add_observations(self, run_id: str, points: Sequence[PostedObservation], lines: int | None = None) -> None:
        """Add the observations of the next lines about a run: one per line, or all from one line."""
        pending = self._pending.get(run_id)
        if pending is None:
            if run_id not in self._run_ids:
                if len(self._run_ids) == MOST_RUNS:
                    self._refuse(TOO_MANY_RUNS, lines or len(points))
                    return
                self._run_ids.add(run_id)
            pending = self._pending[run_id] = _PendingRun(UUID(run_id))
        # A batch is identified by its last line: nothing is awaited between adding a line and counting it.
        first = self._line + 1
        self._line += lines or len(points)
        pending.points += points
        pending.lines += range(first, self._line + 1) if lines is None else [first] * len(points)
        self._size += len(points)
        self._has_pending.set()

    async def _store_all(self) -> None:
        try:
            while True:
                while not self._pending:
                    if self._ended:
                        self.totals.lines = self._line
                        return
                    self._has_pending.clear()
                    await self._has_pending.wait()
                batch, line = self._pending, self._line
                self._pending, self._size = {}, 0
                self._has_room.set()
                answers: list[Receipt | Exception] = []
                waiting = list(batch.values())
                for first in range(0, len(waiting), RUNS_AT_A_TIME):
                    some = waiting[first : first + RUNS_AT_A_TIME]
                    answers += await asyncio.gather(*map(self._commit_run, some))
                outage = self._count_all(batch.values(), answers)
                if outage is not None:
                    raise Problem(outage.status, outage.kind, "the rest could not be stored", headers=outage.headers)
                self.totals.lines = line
        finally:
            self._stopped = True
            self._has_room.set()

    async def _commit_run(self, pending: _PendingRun) -> Receipt | Exception:
        try:
            content = Observations(tuple(pending.points))
            return await self._submit(Message(self._project_id, pending.run_id, content, self._sender))
        except Exception as error:
            return error

    async def _submit(self, message: Message) -> Receipt:
        """Submit to the committer; when its queue is full, wait for a while."""
        until = time.monotonic() + self._limits.wait_seconds
        while True:
            try:
                return await self._committer.submit(message)
            except (Overloaded, TooOften):
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)

    def _count_all(self, pending_runs: Iterable[_PendingRun], answers: Iterable[Receipt | Exception]) -> Problem | None:
        """Count the results of a batch; returns the problem if something could not be stored for a fault of the
        service."""
        outage = None
        for pending, answer in zip(pending_runs, answers, strict=True):
            if isinstance(answer, Receipt):
                self.totals.add_receipt(pending.run_id, answer)
                if answer.conflicts:
                    self._add_conflicts(pending, answer)
            elif outage is None:
                problem = problems.problem_of(answer)
                if problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    outage = problem
                else:
                    for line in dict.fromkeys(pending.lines):
                        self.totals.add_error(line, problem.title, problem.detail)
        return outage

    def _add_conflicts(self, pending: _PendingRun, receipt: Receipt) -> None:
        lines = {id(point): line for point, line in zip(pending.points, pending.lines, strict=True)}
        for conflict in receipt.conflicts:
            point, stored = conflict.point, encode_number(conflict.stored_value)
            detail = f"{point.metric!r} at step {point.step} is already stored as {stored}, which stands"
            self.totals.conflict_count += 1
            self.totals.add_error(lines[id(point)], "Conflict with what is recorded", detail)
