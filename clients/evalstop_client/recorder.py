"""Takes the trainer's calls off its hands: a bounded queue, and a thread that makes them durable."""

from __future__ import annotations

import logging
import threading
from collections import deque

from evalstop_client.notices import Notices
from evalstop_client.segment import Entry
from evalstop_client.spool import Spool

logger = logging.getLogger("evalstop_client")


class Recorder:
    """Moves entries from memory to the spool; `put` costs the caller an append to a list."""

    def __init__(self, spool: Spool, queue_entries: int, notices: Notices) -> None:
        self._spool = spool
        self._queue_entries = queue_entries
        self._notices = notices
        self._changed = threading.Condition()
        self._queue: deque[Entry] = deque()
        self._writing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="evalstop-recorder", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Queue `entry`; observations that find the queue full are dropped and counted."""
        with self._changed:
            full = len(self._queue) >= self._queue_entries and not entry.is_control
            if not full:
                self._queue.append(entry)
                self._changed.notify()
        if full:
            self._notices.drop("queue-full", entry.points, "the disk cannot keep up: observations are dropped")

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until all that was put is in the spool; False when that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._writing, timeout_seconds)

    def close(self) -> None:
        """End the thread once the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if not self._queue:
                    return
                entries = list(self._queue)
                self._queue.clear()
                self._writing = True
            try:
                self._spool.append(entries)  # one append, one fsync, for all that came meanwhile
            except Exception:
                logger.exception("evalstop: the recorder met a fault of its own")
                self._notices.drop("recorder", len(entries), "calls could not be recorded")
