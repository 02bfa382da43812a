"""Makes the trainer's calls durable in the background, with a bounded queue and a thread."""

from __future__ import annotations

import logging
import threading
from collections import deque

from evalstop_client.observations import LoggedValues
from evalstop_client.spool.rejections import merge_observations
from evalstop_client.spool.segment import Entry
from evalstop_client.spool.spool import Spool
from evalstop_client.spool.warnings import WarningLog

logger = logging.getLogger("evalstop_client")

BATCH_SECONDS = 0.005
"""Pause after a write: frequent calls share a wake-up and an fsync."""

CLOSE_SECONDS = 5.0
"""How long the disk may take at the end for what is still in memory."""


class Recorder:
    """Moves entries from memory to the spool; `put` costs the caller an append to a queue."""

    def __init__(self, spool: Spool, queue_entries: int, warnings: WarningLog) -> None:
        self._spool = spool
        self._queue_entries = queue_entries
        self._warnings = warnings
        self._changed = threading.Condition()
        self._queue: deque[Entry | LoggedValues] = deque()
        self._asleep = False
        self._writing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="evalstop-recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, entry: Entry | LoggedValues) -> None:
        """Queue `entry`; observations that find the queue full are dropped and counted."""
        with self._changed:
            full = len(self._queue) >= self._queue_entries and entry.observation_count > 0
            if not full:
                self._queue.append(entry)
                if self._asleep:  # waking it takes longer than everything else
                    self._asleep = False
                    self._changed.notify_all()
        if full:
            self._warnings.count_dropped(
                "queue-full", entry.observation_count, "the disk cannot keep up: observations are dropped"
            )

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until all queued entries are in the spool; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._writing, timeout_seconds)

    def close(self) -> bool:
        """End the thread once the queue is empty, and wait for that up to `CLOSE_SECONDS`; False on timeout."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed, BATCH_SECONDS)
                self._asleep = True
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                self._asleep = False
                if not self._queue:
                    return
                came = list(self._queue)
                self._queue.clear()
                self._writing = True
            try:
                self._spool.append(list(map(_entry, came)))  # one fsync for all that arrived meanwhile
            except Exception:
                logger.exception("evalstop: internal error in the recorder")
                self._warnings.count_dropped("recorder", len(came), "calls could not be recorded")


def _entry(came: Entry | LoggedValues) -> Entry:
    return came if isinstance(came, Entry) else merge_observations(came.observations())
