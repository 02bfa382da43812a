"""Waiting for SIGTERM or SIGINT."""

from __future__ import annotations

import math
import signal
import time
from queue import Empty, SimpleQueue

POLL_SECONDS = 0.5
"""A signal that arrives just before a wait starts does not interrupt it: Python runs the handler between two waits."""


class ShutdownSignal:
    """Waits for SIGTERM and SIGINT instead of exiting; create it on the main thread.

    A signal handler runs between two steps of the main thread. If that thread is just starting to wait for a
    `threading.Event`, setting it in the handler would deadlock; `SimpleQueue.put` is reentrant.
    """

    def __init__(self) -> None:
        self._signals: SimpleQueue[int] = SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda signaled, _frame: self._signals.put(signaled))

    @property
    def is_set(self) -> bool:
        """Whether one of the signals has arrived."""
        return not self._signals.empty()

    def wait(self, timeout_seconds: float = math.inf) -> bool:
        """Wait for one of the signals; False on timeout."""
        deadline = time.monotonic() + timeout_seconds
        while not self.is_set and (remaining_seconds := deadline - time.monotonic()) > 0:
            try:
                # Put back for the next caller.
                self._signals.put(self._signals.get(timeout=min(remaining_seconds, POLL_SECONDS)))
            except Empty:
                continue
        return self.is_set
