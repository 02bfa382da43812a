"""Chores: duties that a process sees to again and again in the background, each in a thread of its own.

Any number of processes have the same chores at one time, so what a chore does must bear being done twice: it takes what
is due by locks, leases or conditional updates.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import sqlalchemy as sa

from evalstop_service.store.database import is_transient

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
"""Before a chore that failed is tried again."""

LEAVE_SECONDS = 10.0
"""As long is waited for what is under way when the chores end."""

Pause = Callable[[float], bool]
"""Waits for so many seconds, less if the chores end meanwhile; whether they do."""


@dataclass(frozen=True)
class Chore:
    """`do` sees to what is due and gives the seconds until it wants to be called again.

    Where it takes long it rests by the pause that it is given, and returns early when that says so.
    """

    name: str
    do: Callable[[Pause], float]


@contextmanager
def at_work(*chores: Chore) -> Iterator[None]:
    """Have the chores seen to until the block ends, which waits for what is under way."""
    stop = threading.Event()
    threads = [threading.Thread(target=_repeat, args=(chore, stop), name=chore.name, daemon=True) for chore in chores]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(LEAVE_SECONDS)


def _repeat(chore: Chore, stop: threading.Event) -> None:
    pause_seconds = FIRST_PAUSE_SECONDS
    while not stop.is_set():
        try:
            rest_seconds = chore.do(stop.wait)
        except Exception as error:
            if isinstance(error, sa.exc.TimeoutError) or (isinstance(error, sa.exc.DBAPIError) and is_transient(error)):
                log.warning("%s: the database does not answer, next try in %g s: %s", chore.name, pause_seconds, error)
            else:
                log.exception("%s failed, next try in %g s", chore.name, pause_seconds)
            stop.wait(pause_seconds)
            pause_seconds = min(pause_seconds * 2, LONGEST_PAUSE_SECONDS)
        else:
            pause_seconds = FIRST_PAUSE_SECONDS
            stop.wait(rest_seconds)
