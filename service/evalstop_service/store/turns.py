"""Whose turn it is at the database: decisions go first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Work(NamedTuple):
    """What is being worked on: a request of this key (or session) of this project, which may be a decision.

    `key` and `project` are None for the service's own work. A decision is a veto, a pause, a report and the like.
    """

    key: Hashable = None
    project: Hashable = None
    is_decision: bool = False


WORK: ContextVar[Work] = ContextVar("work", default=Work())  # noqa: B039 - a tuple
"""The work of the current task; threads that are started with its context inherit it."""


@contextmanager
def decision_lane() -> Iterator[None]:
    """Within the block, transactions of this task or thread are those of a decision and go before all others."""
    token = WORK.set(Work(is_decision=True))
    try:
        yield
    finally:
        WORK.reset(token)


class Turns:
    """A lock that serves decisions first, and among equals whoever came first. Thread-safe.

    For the one writer of SQLite. A lock of the standard library serves waiters in any order, so that a pause would wait
    for every opening of a run that another key has sent before. No project has more than half of the threads that wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._decisions, self._others = deque[threading.Lock](), deque[threading.Lock]()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn of the current `WORK`, and hold it until the block ends."""
        turn = threading.Lock()
        turn.acquire()
        with self._lock:
            if self._is_taken:
                (self._decisions if WORK.get().is_decision else self._others).append(turn)
            else:
                self._is_taken = True
                turn.release()
        # Released by the one that hands over: the turn is then taken already, and nobody can come between.
        turn.acquire()
        try:
            yield
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        with self._lock:
            waiting = self._decisions or self._others
            if waiting:
                waiting.popleft().release()
            else:
                self._is_taken = False
