"""Waiting for SIGTERM or SIGINT."""

from __future__ import annotations

import math
import signal
import time
from queue import Empty, SimpleQueue
from types import FrameType

POLL_SECONDS = 0.5
"""A signal that arrives just before a wait starts does not interrupt it: Python runs the handler between two waits."""


class ShutdownSignal:
    """SIGTERM and SIGINT, waited for instead of died of; to be made on the main thread.

    A signal's handler runs in between two steps of whatever the main thread is at. Were that the beginning of a wait
    for a `threading.Event`, to set it there would lock up; a `SimpleQueue` may be put to at any moment.
    """

    def __init__(self) -> None:
        self._told: SimpleQueue[int] = SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)

    @property
    def is_set(self) -> bool:
        """Whether one of the signals has arrived."""
        return not self._told.empty()

    def wait(self, timeout_seconds: float = math.inf) -> bool:
        """Wait for one of the signals; False on timeout."""
        deadline = time.monotonic() + timeout_seconds
        while not self.is_set and (left := deadline - time.monotonic()) > 0:
            try:
                self._told.put(self._told.get(timeout=min(left, POLL_SECONDS)))  # for the next caller
            except Empty:
                continue
        return self.is_set

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told.put(number)
