"""Combines recorder, spool and sender into the background reporter of one run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from evalstop_client.latest_answer import LatestAnswer
from evalstop_client.observations import LoggedValues
from evalstop_client.service import Service
from evalstop_client.settings import Settings
from evalstop_client.spool.recorder import CLOSE_SECONDS, Recorder
from evalstop_client.spool.segment import Entry
from evalstop_client.spool.sender import Sender
from evalstop_client.spool.spool import Spool
from evalstop_client.spool.warnings import WarningLog

logger = logging.getLogger("evalstop_client")

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
        self._build()

    @property
    def latest_answer(self) -> LatestAnswer:
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
                    self._warnings.say_error_once("threads", "the run is NOT being watched; %s", error)

    def put(self, entry: Entry | LoggedValues) -> None:
        """Queue `entry`; never waits for disk or network."""
        self.start()
        self._recorder.put(entry)

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
        """Restart in a forked child: threads do not survive a fork, and the parent sends what it has queued."""
        self._spool.abandon_in_child()
        latest_answer = self.latest_answer
        self._starting = threading.RLock()
        self._started = False
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
