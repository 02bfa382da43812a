"""A segment of a spool: entries in order, and the position up to which they were sent.

On disk a segment is a file, `<time>-<pid>.jsonl`. Its first line is the byte offset up to which the service has
answered: without it a restart would post observations of an earlier attempt after its `resume`, where they would count
as new. The second holds the body that opens the run; a line for each entry follows.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from evalstop_client.service import Json, Refused

if sys.platform != "win32":
    import fcntl

READ_BYTES = 1 << 20
OFFSET = b"%020d\n"


@dataclass(frozen=True)
class Entry:
    """One call of the trainer: `body` is posted to `/runs/{id}/<to>`."""

    to: str
    body: Mapping[str, Any]

    @property
    def observation_count(self) -> int:
        return len(self.body["observations"]) if self.to == "observations" else 0

    @property
    def is_control(self) -> bool:
        """Whether it is never dropped, being small and rare: everything except observations."""
        return self.to != "observations"

    def line(self) -> bytes:
        """The entry as one line of a segment."""
        return json.dumps({"to": self.to, "body": self.body}, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Entry:
        """Parse an entry; raises ValueError if it is malformed."""
        fields = json.loads(line)
        if not isinstance(fields, dict) or not isinstance(fields.get("body"), dict):
            raise ValueError("no entry")
        entry = cls(str(fields.get("to")), fields["body"])
        if entry.to == "observations" and not isinstance(entry.body.get("observations"), list):
            raise ValueError("no list of observations")
        return entry


@dataclass(frozen=True)
class Batch:
    """The oldest unsent entries of a segment that fit in one request: observations, or one entry of another kind."""

    segment: Segment
    entries: tuple[Entry, ...]
    end: int  # offset of the entries after them
    damaged: int = 0  # lines among them that cannot be read


class Segment:
    """A file of entries, locked while the process that writes or sends it lives; or its content in memory."""

    def __init__(self, file: BinaryIO, path: Path | None, opening: Mapping[str, Any], sent: int, size: int) -> None:
        self._file = file
        self.path = path
        self.opening = opening
        self._sent = sent
        self._size = size

    @classmethod
    def in_memory(cls, opening: Mapping[str, Any]) -> Segment:
        """An empty segment for when the disk cannot be written; it is lost with the process."""
        return cls(io.BytesIO(), None, opening, 0, 0)

    @classmethod
    def create(cls, folder: Path, opening: Mapping[str, Any]) -> Segment:
        """Start an empty segment; its name sorts after those of earlier ones."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{time.time_ns():020d}-{os.getpid()}.jsonl"
        draft = path.with_suffix(".draft")  # renamed once it is locked, so that no other process adopts it before
        file = _open_file(draft, os.O_CREAT | os.O_EXCL)
        try:
            _lock_file(file)
            header = Entry("open", opening).line()
            begin = len(OFFSET % 0) + len(header)
            segment = cls(file, path, opening, begin, begin)
            segment._write(OFFSET % begin + header, 0)
            draft.rename(path)
            return segment
        except BaseException:
            file.close()
            draft.unlink(missing_ok=True)
            raise

    @classmethod
    def adopt(cls, path: Path) -> Segment | None:
        """Adopt the segment at `path`, unless its process still lives; raises ValueError if its head is torn."""
        try:
            file = _open_file(path)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(file.fileno())
            if not _lock_file(file, adopting=True) or status.st_nlink == 0:
                file.close()
                return None
            segment = cls(file, path, {}, 0, status.st_size)
            sent, header = segment._read_lines()[:2]
            segment.opening, segment._sent = Entry.from_line(header).body, int(sent)
            return segment
        except BaseException:
            file.close()
            raise

    @property
    def is_sent(self) -> bool:
        return self._sent >= self._size

    @property
    def byte_count(self) -> int:
        return self._size

    def append(self, entries: Sequence[Entry]) -> None:
        data = b"".join(entry.line() for entry in entries)
        self._write(data, self._size)
        self._size += len(data)  # only now: a line torn by a full disk is never read

    def head(self, batch_observations: int) -> Batch | None:
        chosen: list[Entry] = []
        damaged, end = 0, self._sent
        for line in self._read_lines():
            try:
                entry = Entry.from_line(line)
            except (ValueError, RecursionError):
                damaged += 1
            else:
                if not _fits(chosen, entry, batch_observations):
                    break
                chosen.append(entry)
            end += len(line)
        return Batch(self, tuple(chosen), end, damaged) if end > self._sent else None

    def advance(self, batch: Batch) -> None:
        self._sent = batch.end
        if self.path is not None:
            with contextlib.suppress(OSError):  # a full disk must not block sending, which frees space
                self._write(OFFSET % batch.end, 0)

    def count_unsent(self) -> int:
        return len(self._read_lines())

    def close(self) -> None:
        self._file.close()

    def delete(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.close()

    def _write(self, data: bytes, offset: int) -> None:
        self._file.seek(offset)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        if self.path is not None and offset > 0:
            os.fsync(self._file.fileno())

    def _read_lines(self) -> list[bytes]:
        """Whole lines from the first unsent one on; a last line torn by the death of its writer is left out."""
        unsent = self._size - self._sent
        for size in (min(READ_BYTES, unsent), unsent):  # all of it, if one line is longer
            self._file.seek(self._sent)
            whole, newline, _ = self._file.read(size).rpartition(b"\n")
            if newline:
                return [line + newline for line in whole.split(newline)]
        return []


def _open_file(path: Path, flags: int = 0) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDWR | flags, 0o600), "r+b", buffering=0)


def _fits(chosen: Sequence[Entry], entry: Entry, batch_observations: int) -> bool:
    if not chosen:
        return True
    if entry.is_control or chosen[-1].is_control:
        return False
    return sum(other.observation_count for other in chosen) + entry.observation_count <= batch_observations


def _lock_file(file: BinaryIO, adopting: bool = False) -> bool:
    """Lock a segment's file; the system releases the lock when the process dies."""
    if sys.platform == "win32":
        return not adopting
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by its living process, or the file system has no locks: then nothing is adopted
        return not adopting
    return True


BAD_POINT = re.compile(r"^/observations/(\d+)(/|$)")


def split_rejected(entry: Entry, refused: Refused) -> tuple[Entry | None, list[Entry]]:
    """The rejected part of a refused entry, and the entries to post again.

    The service stores nothing of a batch with a bad observation. If it names the bad ones, only they are rejected;
    otherwise the batch is halved until they are isolated.
    """
    if entry.is_control:
        return entry, []
    points = entry.body["observations"]
    bad_indices = {int(match[1]) for pointer in refused.pointers if (match := BAD_POINT.match(pointer))}
    bad = [point for index, point in enumerate(points) if index in bad_indices]
    if bad:
        good = [point for index, point in enumerate(points) if index not in bad_indices]
        return merge_observations(bad), [merge_observations(good)] if good else []
    if len(points) == 1:
        return entry, []
    half = len(points) // 2
    return None, [merge_observations(points[:half]), merge_observations(points[half:])]


def merge_observations(points: Sequence[Json]) -> Entry:
    return Entry("observations", {"observations": list(points)})
