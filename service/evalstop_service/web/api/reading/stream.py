"""Ingests a stream of observations of many runs: reads ahead while the previous batch is being committed.

    parts ──> chunks ──> lines ──> gathered by run ──> committer      a batch: everything gathered during the last one
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
from evalstop_service.web.api.reading.decompression import Damaged, Unpacker
from evalstop_service.web.api.reading.json_lines import TOO_LONG, BadLine, Cutter, flat, read
from evalstop_service.web.api.reading.stream_result import StreamTotals
from evalstop_service.web.api.schemas import encode_number
from evalstop_service.web.problem_kinds import ProblemKind
from evalstop_service.web.problems import Problem

MOST_RUNS = 10_000
"""Limit per stream: the response reports on each run."""

_RUN = attrgetter("run_id")
_PAUSE_SECONDS = 0.05
_LONG_LINE_BYTES = 16 * 1024
_LINES_AT_A_TIME = 100  # lines read one by one before other requests get their turn

TOO_MANY_RUNS = BadLine("Too many runs", f"a stream may name at most {MOST_RUNS}; send the others in another stream")


@dataclass(frozen=True)
class StreamLimits:
    """How much one request may send, and how much of it is buffered.

    `stream_bytes`: compressed, and decompressed. `gathered`: about how many observations are read ahead of the
    commits. `streams`: concurrent ones; others wait. `idle_seconds`: longest pause without a byte. `stream_seconds`:
    from the first byte to the last. `wait_seconds`: longest wait for another stream to end, and for the committer.
    """

    stream_bytes: int = 256 * 2**20
    gathered: int = 10_000
    streams: int = 8
    idle_seconds: float = 30.0
    stream_seconds: float = 900.0
    wait_seconds: float = 30.0


def too_slow(limits: StreamLimits) -> Problem:
    """The problem for a sender that is too slow."""
    detail = f"a stream may pause for {limits.idle_seconds:g} seconds and last for {limits.stream_seconds:g}"
    return Problem(408, ProblemKind.BODY_TOO_SLOW, detail)


class Taking(Protocol):
    """A committer: answers each message once it is durable."""

    def submit(self, message: Message) -> Awaitable[Receipt]: ...


@dataclass(slots=True)
class _Part:
    """The gathered observations of one run, and the line of each."""

    run_id: UUID
    points: list[PostedObservation] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


class Intake:
    """Ingests one stream and counts its results."""

    def __init__(self, committer: Taking, project_id: UUID, limits: StreamLimits, sender: UUID | None = None) -> None:
        self._committer, self._project_id, self._limits, self._sender = committer, project_id, limits, sender
        self._until = time.monotonic() + limits.stream_seconds
        self.tally = StreamTotals()
        self._line = 0  # the number of the last line read
        self._named: set[str] = set()
        self._gathered: dict[str, _Part] = {}
        self._size = 0
        self._ended = self._stopped = False
        self._more, self._room = asyncio.Event(), asyncio.Event()

    async def take(self, body: AsyncIterator[bytes], unpacker: Unpacker) -> None:
        """Ingest a stream to its end; raises Problem if it fails. The tally counts the complete lines until then."""
        storing = asyncio.create_task(self._store_all())
        broken: Problem | None = None
        try:
            try:
                await self._read_all(body, unpacker)
            except Problem as problem:
                broken = problem
            self._ended = True
            self._more.set()
            await storing
        finally:
            storing.cancel()
        if broken is not None:
            raise broken

    async def _read_all(self, body: AsyncIterator[bytes], unpacker: Unpacker) -> None:
        cutter, packed, unpacked = Cutter(), 0, 0
        try:
            async for part in body:
                packed += len(part)
                self._refuse_over(packed)
                for piece in unpacker.pieces(part):
                    unpacked += len(piece)
                    self._refuse_over(unpacked)
                    for block in cutter.blocks(piece):
                        await self._read_block(block)
                    await self._give_way()
                    if self._stopped:
                        return
            unpacker.end()
        except Damaged as error:
            raise Problem(
                400, ProblemKind.UNREADABLE_ENCODING, f"{error}, after {unpacked} decompressed bytes"
            ) from error
        rest = cutter.rest()
        if rest != b"":
            await self._read_block(rest)

    def _refuse_over(self, count: int) -> None:
        most = self._limits.stream_bytes
        if count > most:
            detail = f"the limit is {most} bytes, compressed and decompressed; send the rest in another request"
            raise Problem(413, ProblemKind.BODY_TOO_LARGE, detail)

    async def _give_way(self) -> None:
        """Yield to other tasks, and wait while the gathered observations are at their limit."""
        if time.monotonic() > self._until:
            raise too_slow(self._limits)
        await asyncio.sleep(0)
        while self._size >= self._limits.gathered and not self._stopped:
            self._room.clear()
            await self._room.wait()

    async def _read_block(self, block: bytes | None) -> None:
        if block is None:
            self._refuse(TOO_LONG)
            return
        found = flat(block)
        if found is not None:
            for run_id, points in groupby(found, key=_RUN):
                self._gather(run_id, list(points))
            return
        for count, line in enumerate(block.split(b"\n"), start=1):
            if line.isspace() or not line:
                self._line += 1
            else:
                try:
                    result = read(line) if len(line) < _LONG_LINE_BYTES else await asyncio.to_thread(read, line)
                except BadLine as bad:
                    self._refuse(bad)
                else:
                    self._gather(result.run_id, result.points, lines=1)
            if count % _LINES_AT_A_TIME == 0 or self._size >= self._limits.gathered:
                await self._give_way()

    def _refuse(self, bad: BadLine, lines: int = 1) -> None:
        for _ in range(lines):
            self._line += 1
            self.tally.wrong(self._line, bad.title, bad.detail)

    def _gather(self, run_id: str, points: Sequence[PostedObservation], lines: int | None = None) -> None:
        """Add the observations of the next lines about a run: one per line, or all from one line."""
        part = self._gathered.get(run_id)
        if part is None:
            if run_id not in self._named:
                if len(self._named) == MOST_RUNS:
                    self._refuse(TOO_MANY_RUNS, lines or len(points))
                    return
                self._named.add(run_id)
            part = self._gathered[run_id] = _Part(UUID(run_id))
        # A batch is identified by its last line: nothing is awaited between gathering a line and counting it.
        first = self._line + 1
        self._line += lines or len(points)
        part.points += points
        part.lines += range(first, self._line + 1) if lines is None else [first] * len(points)
        self._size += len(points)
        self._more.set()

    async def _store_all(self) -> None:
        try:
            while True:
                while not self._gathered:
                    if self._ended:
                        self.tally.lines = self._line
                        return
                    self._more.clear()
                    await self._more.wait()
                batch, line = self._gathered, self._line
                self._gathered, self._size = {}, 0
                self._room.set()
                answers = await asyncio.gather(*map(self._stored, batch.values()))
                away = self._count_all(batch.values(), answers)
                if away is not None:
                    raise Problem(away.status, away.kind, "the rest could not be stored", headers=away.headers)
                self.tally.lines = line
        finally:
            self._stopped = True
            self._room.set()

    async def _stored(self, part: _Part) -> Receipt | Exception:
        try:
            found = Observations(tuple(part.points))
            return await self._submit(Message(self._project_id, part.run_id, found, self._sender))
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

    def _count_all(self, parts: Iterable[_Part], answers: Iterable[Receipt | Exception]) -> Problem | None:
        """Count the results of a batch; returns the problem if something could not be stored for a fault of the
        service."""
        away = None
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, Receipt):
                self.tally.stored(part.run_id, answer)
                if answer.conflicts:
                    self._count_contradictions(part, answer)
            elif away is None:
                problem = problems.problem_of(answer)
                if problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    away = problem
                else:
                    for line in dict.fromkeys(part.lines):
                        self.tally.wrong(line, problem.title, problem.detail)
        return away

    def _count_contradictions(self, part: _Part, receipt: Receipt) -> None:
        lines = {id(point): line for point, line in zip(part.points, part.lines, strict=True)}
        for found in receipt.conflicts:
            point, stored = found.point, encode_number(found.stored_value)
            detail = f"{point.metric!r} at step {point.step} is already stored as {stored}, which stands"
            self.tally.conflict_count += 1
            self.tally.wrong(lines[id(point)], "Conflict with what is recorded", detail)
