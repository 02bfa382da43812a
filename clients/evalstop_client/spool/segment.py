"""A segment of a spool: entries in order, and the position up to which they were sent.

On disk a segment is two files. `<time>-<pid>.jsonl` holds one line with the body that opens the run, then one line per
entry. `<time>-<pid>.sent` holds the byte offset up to which the service has answered: without it a restart would post
observations of an earlier attempt after its `resume`, where they would count as new.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalstop_client.service import Json, Refused

if sys.platform != "win32":
    import fcntl

READ_BYTES = 1 << 20


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
    opening: Mapping[str, Any]
    entries: tuple[Entry, ...]
    end: int  # offset of the entries after them
    unreadable: int = 0  # damaged lines skipped


class MemorySegment:
    """A segment in memory, used when the disk cannot be written; lost with the process."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        self.opening = opening
        self._entries: deque[Entry] = deque()

    @property
    def is_sent(self) -> bool:
        return not self._entries

    @property
    def byte_count(self) -> int:
        return 0

    @property
    def entry_count(self) -> int:
        return len(self._entries)

    def append(self, entries: Sequence[Entry]) -> None:
        self._entries.extend(entries)

    def head(self, batch_observations: int) -> Batch | None:
        chosen: list[Entry] = []
        for entry in self._entries:
            if not _fits(chosen, entry, batch_observations):
                break
            chosen.append(entry)
        return Batch(self, self.opening, tuple(chosen), end=len(chosen)) if chosen else None

    def advance(self, batch: Batch) -> None:
        for _ in range(batch.end):
            self._entries.popleft()

    def close(self) -> None:
        self._entries.clear()

    def delete(self) -> None:
        self._entries.clear()


class FileSegment:
    """A segment on disk, locked while the process that writes or sends it lives."""

    def __init__(self, path: Path, descriptor: int, opening: Mapping[str, Any], sent: int, size: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._marker = os.open(path.with_suffix(".sent"), os.O_RDWR | os.O_CREAT, 0o600)
        self.opening = opening
        self._sent = sent
        self._size = size

    @classmethod
    def create(cls, folder: Path, opening: Mapping[str, Any]) -> FileSegment:
        """Start an empty segment; its name sorts after those of earlier ones."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{time.time_ns():020d}-{os.getpid()}.jsonl"
        draft = path.with_suffix(".draft")  # renamed once it is locked, so that no other process adopts it before
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _lock_file(descriptor)
            header = Entry("open", opening).line()
            _write_all(descriptor, header, 0)
            os.fsync(descriptor)
            draft.rename(path)
            return cls(path, descriptor, opening, len(header), len(header))
        except BaseException:
            os.close(descriptor)
            draft.unlink(missing_ok=True)
            raise

    @classmethod
    def adopt(cls, path: Path) -> FileSegment | None:
        """Adopt the segment at `path`, unless its process still lives; raises ValueError if it has no first line."""
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            if not _lock_file(descriptor, adopting=True) or os.fstat(descriptor).st_nlink == 0:
                os.close(descriptor)
                return None
            size = os.fstat(descriptor).st_size
            header = _first_line(descriptor, size)
            sent = min(max(_sent_in(path.with_suffix(".sent")), len(header)), size)
            return cls(path, descriptor, Entry.from_line(header).body, sent, size)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def is_sent(self) -> bool:
        return self._sent >= self._size

    @property
    def byte_count(self) -> int:
        return self._size

    def append(self, entries: Sequence[Entry]) -> None:
        data = b"".join(entry.line() for entry in entries)
        _write_all(self._descriptor, data, self._size)
        os.fsync(self._descriptor)
        self._size += len(data)  # only now: a line torn by a full disk is never read

    def head(self, batch_observations: int) -> Batch | None:
        chosen: list[Entry] = []
        unreadable, end = 0, self._sent
        for line in self._read_lines():
            try:
                entry = Entry.from_line(line)
            except (ValueError, RecursionError):
                unreadable += 1
                end += len(line)
                continue
            if not _fits(chosen, entry, batch_observations):
                break
            chosen.append(entry)
            end += len(line)
        return Batch(self, self.opening, tuple(chosen), end, unreadable) if end > self._sent else None

    def advance(self, batch: Batch) -> None:
        self._sent = batch.end
        with contextlib.suppress(OSError):  # a full disk must not block sending, which frees space
            os.pwrite(self._marker, b"%020d" % batch.end, 0)

    def close(self) -> None:
        for descriptor in (self._descriptor, self._marker):
            os.close(descriptor)

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(".sent").unlink(missing_ok=True)
        self.close()

    def _read_lines(self) -> list[bytes]:
        """Complete lines from the first unsent one on; a last line torn by the death of its writer is left out."""
        read_bytes = READ_BYTES
        while True:
            data = os.pread(self._descriptor, min(read_bytes, self._size - self._sent), self._sent)
            whole = data[: data.rfind(b"\n") + 1]
            if whole or self._sent + read_bytes >= self._size:
                return [line + b"\n" for line in whole.split(b"\n")[:-1]]
            read_bytes *= 2


Segment = MemorySegment | FileSegment


def _fits(chosen: Sequence[Entry], entry: Entry, batch_observations: int) -> bool:
    if not chosen:
        return True
    if entry.is_control or chosen[-1].is_control:
        return False
    return sum(other.observation_count for other in chosen) + entry.observation_count <= batch_observations


def _lock_file(descriptor: int, adopting: bool = False) -> bool:
    """Lock a segment's file; the system releases the lock when the process dies."""
    if sys.platform == "win32":
        return not adopting
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by its living process, or the file system has no locks: then nothing is adopted
        return not adopting
    return True


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _first_line(descriptor: int, size: int) -> bytes:
    read_bytes = READ_BYTES
    while True:
        line, newline, _ = os.pread(descriptor, read_bytes, 0).partition(b"\n")
        if newline:
            return line + newline
        if read_bytes >= size:
            raise ValueError("its first line, which opens the run, is torn")
        read_bytes *= 2


def _sent_in(marker: Path) -> int:
    try:
        return int(marker.read_bytes())
    except (OSError, ValueError):
        return 0


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
