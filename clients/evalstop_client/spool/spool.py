"""The on-disk queue of a run's unsent entries: it survives the process and outages of the service.

Each run name has a folder. Each process writes its own segments there; the next process of that name adopts those
whose process has died. It sends them first if they may belong to its own run, else whenever it has nothing else to
send. A segment is deleted once all of it is sent.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evalstop_client.settings import Limits
from evalstop_client.spool.run_log import WarningLog
from evalstop_client.spool.segment import Batch, Entry, Segment


class Spool:
    """The queue between the recording thread and the sending thread."""

    def __init__(self, folder: Path, opening: Mapping[str, Any], limits: Limits, warnings: WarningLog) -> None:
        self._folder = folder
        self._opening = opening
        self._limits = limits
        self._warnings = warnings
        self._disk = threading.Lock()  # held while the segments are read or written, which may hang
        self._changed = threading.Condition()
        self._segments: deque[Segment] = deque()
        self._owned: Segment | None = None  # the segment that this process writes, always the last one
        self._left: set[Path] = set()  # to a process whose key may send them
        self._closed = False

    def adopt(self) -> int:
        """Adopt the segments of dead processes of this run name, oldest first; returns how many."""
        with self._disk:
            adopted: list[Segment] = []
            for path in [] if self._closed else sorted({*self._folder.glob("*.jsonl")} - self._left):
                try:
                    segment = Segment.adopt(path)
                except (OSError, ValueError) as error:
                    self._warnings.warn_once("adopt", "%s cannot be read and is left in place: %s", path, error)
                    continue
                if segment is not None:
                    adopted.append(segment)
            self._segments.extendleft(reversed(adopted))
        self.wake()
        return len(adopted)

    def append(self, entries: Sequence[Entry]) -> None:
        """Make `entries` durable; if the disk fails, keep them in memory; if that is full, drop observations."""
        with self._disk:
            storable = [entry for entry in entries if entry.is_control] if self._is_full() else list(entries)
            lost = sum(entry.observation_count for entry in entries) - sum(
                entry.observation_count for entry in storable
            )
            if lost:
                self._warnings.count_dropped(
                    "spool-full", lost, "the spool %s is full: observations are dropped", self._folder
                )
            if storable and self._closed:
                count = sum(max(1, entry.observation_count) for entry in storable)
                self._warnings.count_dropped("closed", count, "the disk was too slow at the end: entries are lost")
            elif storable:
                self._write_entries(storable)
        self.wake()

    def head(self) -> Batch | None:
        """The next entries that fit in one request, or None if everything was sent."""
        with self._disk:
            # The sort is stable: what earlier runs left comes last, everything else stays in the order of recording.
            for segment in [] if self._closed else sorted(self._segments, key=self._is_of_earlier_run):
                batch = segment.head(self._limits.batch_observations)
                if batch is not None:
                    return batch
                if segment is not self._owned:
                    self._segments.remove(segment)
                    segment.delete()
            return None

    def list_earlier_openings(self) -> list[Mapping[str, Any]]:
        """The requests that open the earlier runs, oldest first; their entries are sent last."""
        return [segment.opening for segment in list(self._segments) if self._is_of_earlier_run(segment)]

    def _is_of_earlier_run(self, segment: Segment) -> bool:
        """Whether the service keeps the segment's run apart: only a resumed run, or one of the same job, goes on."""
        return "resume" not in self._opening and segment.opening.get("job") != self._opening.get("job")

    def advance(self, batch: Batch) -> None:
        with self._disk:
            if not self._closed:
                batch.segment.advance(batch)
                if batch.damaged:
                    self._warnings.count_dropped(
                        "damaged", batch.damaged, "damaged lines in %s are skipped", self._folder
                    )
        self.wake()

    def leave(self, opening: Mapping[str, Any]) -> None:
        """Leave the adopted segments of a run to a process whose key may send them."""
        with self._disk:
            for segment in [] if self._closed else [item for item in self._segments if item.opening == opening]:
                self._segments.remove(segment)
                segment.close()
                if segment.path is not None:
                    self._left.add(segment.path)
        self.wake()

    def wait(self, until: Callable[[], bool], timeout_seconds: float) -> bool:
        """Wait until `until()` is true; it is evaluated after every change of the spool."""
        with self._changed:
            return self._changed.wait_for(until, timeout_seconds)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def is_empty(self) -> bool:
        """Whether all appended entries were sent or rejected."""
        return all(segment.is_sent for segment in list(self._segments))

    def close(self, wait_seconds: float) -> None:
        """Close the files: sent ones are deleted, the rest waits for the next process.

        If the disk hangs for longer than `wait_seconds`, they are left as they are.
        """
        if not self._disk.acquire(timeout=wait_seconds):
            self._warnings.warn_once("hangs", "the disk hangs: what is not yet in %s may be lost", self._folder)
            return
        try:
            self._close_segments()
        finally:
            self._disk.release()
        self.wake()

    def abandon_in_child(self) -> None:
        """After a fork: close the child's copies of the files, which the parent writes and deletes."""
        for segment in self._segments:
            segment.close()

    def _close_segments(self) -> None:
        if self._closed:
            return
        self._closed = True
        for segment in self._segments:
            if segment.path is None and not segment.is_sent:
                lost = segment.count_unsent()
                text = "entries that could be neither written to disk nor sent are lost"
                self._warnings.count_dropped("memory", lost, text)
            if segment.is_sent:
                segment.delete()
            else:
                segment.close()
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # succeeds only if it is empty

    def _is_full(self) -> bool:
        stored = sum(segment.byte_count for segment in self._segments)
        return stored >= (self._limits.segment_bytes if self._is_in_memory() else self._limits.spool_bytes)

    def _is_in_memory(self) -> bool:
        """Whether entries that the disk refused are still to be sent: later ones must not overtake them."""
        return self._owned is not None and self._owned.path is None and not self._owned.is_sent

    def _write_entries(self, entries: Sequence[Entry]) -> None:
        owned = self._owned
        try:
            is_done = owned is None or owned.path is None or owned.byte_count >= self._limits.segment_bytes
            if owned is None or (is_done and not self._is_in_memory()):
                owned = self._own_segment(Segment.create(self._folder, self._opening))
            owned.append(entries)
            if owned.path is not None:
                self._warnings.reset("disk")
        except OSError as error:
            self._warnings.warn_once("disk", "cannot write the spool %s, kept in memory only: %s", self._folder, error)
            self._own_segment(Segment.in_memory(self._opening)).append(entries)

    def _own_segment(self, segment: Segment) -> Segment:
        self._owned = segment
        self._segments.append(segment)
        return segment
