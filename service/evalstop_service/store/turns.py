"""Whose turn it is at the database: decisions first, then each sender in turn."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
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
    """A lock whose waiters are served in this order: decisions, then the others; among each, projects take turns.

    For the one writer of SQLite. A lock of the standard library serves waiters in any order, so that a pause would wait
    for every opening of a run that another key has sent before. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._decisions, self._others = _Waiters(), _Waiters()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn of the current `WORK`, and hold it until the block ends."""
        self._begin(WORK.get())
        try:
            yield
        finally:
            self._end()

    def _begin(self, work: Work) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            (self._decisions if work.is_decision else self._others).add(work.project, turn)
        # Released by the one that hands over: the turn is then taken already, and nobody can come between.
        turn.acquire()

    def _end(self) -> None:
        with self._lock:
            turn = self._decisions.take_next() or self._others.take_next()
            if turn is None:
                self._is_taken = False
            else:
                turn.release()


class _Waiters:
    """Those who wait, by project; the project that was served last comes last."""

    def __init__(self) -> None:
        self._by_project: OrderedDict[Hashable, deque[threading.Lock]] = OrderedDict()

    def add(self, project: Hashable, turn: threading.Lock) -> None:
        self._by_project.setdefault(project, deque()).append(turn)

    def take_next(self) -> threading.Lock | None:
        if not self._by_project:
            return None
        project, turns = self._by_project.popitem(last=False)
        turn = turns.popleft()
        if turns:
            self._by_project[project] = turns
        return turn
