"""Splits a stream into lines of JSON and parses them; each is about one run, and a bad one raises its own error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any
from uuid import UUID

import msgspec
from pydantic import Field, TypeAdapter, ValidationError

from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.api.reading import json_body
from evalstop_service.web.api.reading.batch import UNREADABLE, BatchIn, ObservationIn, SentObservation
from evalstop_service.web.api.schemas import MAX_POINTS

MOST_LINE_BYTES = 2**20

RunId = Annotated[UUID, Field(strict=False, examples=["0199aa10-7c3e-7b51-9d3f-5a0d6f2c8e11"])]


class ObservationLine(ObservationIn):
    """A line with one observation."""

    run_id: RunId = Field(description="the run of the observation")


class BatchLine(BatchIn):
    """A line with many observations of one run. If one of them is malformed, the whole line is refused."""

    run_id: RunId = Field(description="the run of the observations")


LINE = TypeAdapter[ObservationLine | BatchLine](ObservationLine | BatchLine)


class FlatLine(PostedObservation, frozen=True, gc=False, forbid_unknown_fields=True, kw_only=True):
    """An observation with the id of its run."""

    run_id: str


class _SentLine(SentObservation, forbid_unknown_fields=True, kw_only=True):
    run_id: UUID


class _SentBatchLine(msgspec.Struct, forbid_unknown_fields=True):
    run_id: UUID
    observations: Annotated[list[SentObservation], msgspec.Meta(min_length=1, max_length=MAX_POINTS)]


@dataclass(frozen=True, slots=True)
class RunObservations:
    """The observations of one line, and their run."""

    run_id: str
    points: tuple[PostedObservation, ...]


class BadLine(Exception):
    """A line is refused."""

    def __init__(self, title: str, detail: str) -> None:
        super().__init__(f"{title}: {detail}")
        self.title, self.detail = title, detail


TOO_LONG = BadLine("The line is too long", f"the limit is {MOST_LINE_BYTES} bytes; send fewer observations per line")


class LineSplitter:
    """Splits a stream into blocks of whole lines, and buffers the beginning of the next line.

    Chunks must be shorter than the longest line allowed. Nothing is buffered of a line that is too long.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._overlong = False

    def split(self, piece: bytes) -> Iterator[bytes | None]:
        """The lines that end in this chunk, as blocks without the last line feed; None stands for a line that was too
        long."""
        first, last = piece.find(b"\n"), piece.rfind(b"\n")
        if last < 0:
            self._append_part(piece)
            return
        at = 0
        if self._buffer or self._overlong:
            self._append_part(piece[:first])
            yield self.rest()
            at = first + 1
        if at <= last:
            yield piece[at:last]
        self._append_part(piece[last + 1 :])

    def rest(self) -> bytes | None:
        """The buffer: after the end of the stream, its last line, which may lack a line feed."""
        line = None if self._overlong else bytes(self._buffer)
        self._buffer.clear()
        self._overlong = False
        return line

    def _append_part(self, part: bytes) -> None:
        if self._overlong or len(self._buffer) + len(part) > MOST_LINE_BYTES:
            self._overlong = True
            self._buffer.clear()
        else:
            self._buffer += part


_decode_lines = msgspec.json.Decoder(FlatLine).decode_lines
_decode_line = msgspec.json.Decoder(_SentLine).decode
_decode_batch = msgspec.json.Decoder(_SentBatchLine).decode

# In a line without duplicate names and escapes, each name and each string has two quotation marks.
_MARKS, _MARKS_OF_STDERR, _MARKS_OF_TIME = 12, 2, 4
_MARKS_OF_BATCH, _MARKS_IN_BATCH = 6, 8


def decode_flat_lines(block: bytes) -> list[FlatLine] | None:
    """Decode lines that are all plain and valid, at a tenth of the cost of decoding each; None for others."""
    # The decoder treats line feeds like any whitespace. In flat objects, the text between a closing and an opening
    # brace ends an object, so equal numbers of objects and lines mean one object per line.
    count = block.count(b"\n") + 1
    if block[:1] != b"{" or block[-1:] != b"}" or block.count(b"}\n{") != count - 1 or b"\\" in block:
        return None
    try:
        lines = _decode_lines(block)
    except UNREADABLE:
        return None
    if len(lines) != count or not all(map(_is_canonical, {line.run_id for line in lines})):
        return None
    return lines if _has_unique_names(block, _MARKS * count, lines) else None


def parse_line(line: bytes) -> RunObservations:
    """Parse a line. Raises BadLine."""
    try:
        if b'"observations"' in line:
            batch = _decode_batch(line)
            run_id, points, marks = batch.run_id, batch.observations, _MARKS_OF_BATCH
            marks += _MARKS_IN_BATCH * len(points)
        else:
            point = _decode_line(line)
            run_id, points, marks = point.run_id, [point], _MARKS
        result = RunObservations(str(run_id), tuple([point.to_observation() for point in points]))
    except UNREADABLE as error:
        _refuse_line(line)
        raise BadLine("The line is not valid", str(error)[:200]) from error
    if b"\\" in line or not _has_unique_names(line, marks, points):
        _refuse_line(line)
    return result


def _has_unique_names(text: bytes, marks: int, points: Any) -> bool:
    """Whether a text has no duplicate names: the decoder takes the last of them."""
    mark_count = text.count(b'"')
    if mark_count == marks:
        return True
    for point in points:
        if point.stderr is not None:
            marks += _MARKS_OF_STDERR
        if point.time is not None:
            marks += _MARKS_OF_TIME
    return mark_count == marks


_CANONICAL = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


@lru_cache(maxsize=10_000)
def _is_canonical(run_id: str) -> bool:
    return len(run_id) == 36 and _CANONICAL.fullmatch(run_id) is not None


def _refuse_line(line: bytes) -> None:
    """Find what is wrong with a line with the slower parser. Raises BadLine, or returns if it finds nothing."""
    try:
        document = json_body.load(line)
    except json_body.NotJson as error:
        raise BadLine("The line is not valid JSON", str(error).replace("at line 1, ", "at ")) from error
    model = BatchLine if isinstance(document, dict) and "observations" in document else ObservationLine
    try:
        model.model_validate(document)
    except ValidationError as error:
        raise BadLine("The line is not valid", _describe_errors(error)) from error


def _describe_errors(error: ValidationError) -> str:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = [f"{_format_place(item['loc'])}{item['msg'].removeprefix('Value error, ')}"[:200] for item in errors[:3]]
    omitted = f"; and {len(errors) - len(first)} more" if len(errors) > len(first) else ""
    return "; ".join(first) + omitted


def _format_place(location: tuple[int | str, ...]) -> str:
    return "".join(f"/{part}" for part in location) + ": " if location else ""
