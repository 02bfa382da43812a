"""The background reporter of one run: makes the trainer's calls durable at once, and sends them in order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from evalstop_client.observations import LoggedValues
from evalstop_client.service import Json, Service
from evalstop_client.settings import Settings
from evalstop_client.spool.run_log import WarningLog
from evalstop_client.spool.segment import Entry, merge_observations
from evalstop_client.spool.sender import Sender
from evalstop_client.spool.spool import Spool

logger = logging.getLogger("evalstop_client")

BATCH_SECONDS = 0.005
"""Pause after a write: frequent calls share a wake-up and an fsync."""

CHILD_SECONDS = 1.0
"""How long a call in a forked child may wait for the disk, since such a child may be killed without notice."""

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


LONGEST_CLOSE = 6
"""A backlog is worth a wait while the service accepts it, but the job's GPUs wait too."""


class Reporter:
    """Accepts entries at any rate and sends them in order while the service is available.

    Two threads: one makes entries durable immediately, the other waits for the network.
    """

    def __init__(self, settings: Settings, warnings: WarningLog) -> None:
        assert settings.url is not None
        self._settings = settings
        self._warnings = warnings
        self._starting = threading.RLock()  # a signal handler that logs may interrupt its holder
        self._started = False
        self._is_disk_awaited = False
        self._build()

    @property
    def latest_answer(self) -> Json:
        return self._sender.latest_answer

    def start(self) -> None:
        """Start both threads, unless they are running or have ended."""
        with self._starting:
            if not self._started:
                self._started = True
                try:
                    self._recorder.start()
                    self._sender.start()
                except RuntimeError as error:  # the system has no more threads, or the interpreter is shutting down
                    self._warnings.warn_once("threads", "the run is NOT being watched; %s", error, level=logging.ERROR)

    def put(self, entry: Entry | LoggedValues) -> None:
        """Queue `entry`; never waits for the network, and for the disk only in a forked child."""
        self.start()
        self._recorder.put(entry)
        if self._is_disk_awaited and not self._recorder.wait_idle(CHILD_SECONDS):
            self._is_disk_awaited = False
            self._warnings.warn_once("slow", "the disk is slow: a forked child that is killed may lose what it logged")

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until the service has everything; False on timeout."""
        return self._flush(time.monotonic(), timeout_seconds, timeout_seconds)

    def close(self, since: float, quiet_seconds: float) -> bool:
        """Flush, then end the threads; what could not be sent stays in the spool for the next run of this name.

        Waits from `since` on until the service has accepted nothing for `quiet_seconds`, and at most
        `LONGEST_CLOSE` times as long in all. A disk that hangs is waited for up to `CLOSE_SECONDS`.
        """
        flushed = self._flush(since, quiet_seconds, LONGEST_CLOSE * quiet_seconds)
        recorded = self._recorder.close()
        self._sender.close()
        self._spool.close(CLOSE_SECONDS if recorded else 0.0)
        if not flushed and self._started:
            folder = self._settings.spool_folder
            logger.warning("evalstop: not everything was sent; the next run of this name and URL will send %s", folder)
        return flushed

    def after_fork_in_child(self) -> None:
        """Restart in a forked child: threads do not survive a fork, and the parent sends what it has queued.

        The child may end by a signal or by os._exit, so its calls return once they are on disk, where the parent
        finds them.
        """
        self._spool.abandon_in_child()
        latest_answer = self.latest_answer
        self._starting = threading.RLock()
        self._started = False
        self._is_disk_awaited = True
        self._build()
        self._sender.latest_answer = latest_answer

    def _flush(self, since: float, quiet_seconds: float, longest_seconds: float) -> bool:
        if not self._started:
            return True
        sender = self._sender
        sender.start_flush()
        recorded = self._recorder.wait_idle(since + quiet_seconds - time.monotonic())
        remaining_seconds = 0.0
        while not self._spool.wait(lambda: sender.is_idle or sender.is_unauthorized, remaining_seconds):
            # An answer that came during the last wait extends the next one.
            until = min(max(since, sender.accepted_at) + quiet_seconds, since + longest_seconds)
            remaining_seconds = until - time.monotonic()
            if remaining_seconds <= 0:
                break
        sender.end_flush()
        return recorded and sender.is_idle

    def _build(self) -> None:
        settings, limits, warnings = self._settings, self._settings.limits, self._warnings
        opening: Mapping[str, Any] = settings.opening
        assert settings.url is not None
        service = Service(settings.url, settings.key, limits.timeout_seconds)
        self._spool = Spool(settings.spool_folder, opening, limits, warnings)
        self._recorder = Recorder(self._spool, limits.queue_entries, warnings)
        self._sender = Sender(service, self._spool, opening, limits, warnings)
