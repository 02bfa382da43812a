"""Periodic jobs: work that a process repeats in the background, each job in its own thread.

Any number of processes run the same jobs concurrently, so a job must tolerate being run twice: it claims due work with
locks, leases or conditional updates.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from evalstop_service.store.faults import Fault, find_fault

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
"""Pauses before a failed job is retried; the pause doubles from the first to the longest."""

SHUTDOWN_SECONDS = 10.0
"""How long all running jobs together may take to return when the process stops."""

Wait = Callable[[float], bool]
"""Waits for this many seconds, or until the jobs are asked to stop; returns whether they are."""


@dataclass(frozen=True)
class PeriodicJob:
    """`do` handles due work and returns the seconds until it should be called again; None: `every_seconds`.

    A long job pauses with the `Wait` that it is given, and returns early when that returns True.
    """

    name: str
    do: Callable[[Wait], float | None]
    every_seconds: float = 0.0


Item = TypeVar("Item")


def handle_each(items: Iterable[Item], handle: Callable[[Item], object]) -> None:
    """Handle items that are independent of each other. An error does not delay the others; it is raised at the end."""
    failure: Exception | None = None
    for item in items:
        try:
            handle(item)
        except Exception as error:
            if find_fault(error) is not Fault.BUG:  # such as a database out of reach: the others would fail as well
                raise
            error.add_note(f"while handling {item}")
            failure = error
    if failure is not None:
        raise failure


@contextmanager
def run_jobs(*jobs: PeriodicJob) -> Iterator[None]:
    """Run the jobs until the block ends, then wait for running ones."""
    stop = threading.Event()
    threads = [threading.Thread(target=_repeat_job, args=(job, stop), name=job.name, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _repeat_job(job: PeriodicJob, stop: threading.Event) -> None:
    pause_seconds = FIRST_PAUSE_SECONDS
    while not stop.is_set():
        try:
            next_seconds = job.do(stop.wait)
        except Exception as error:
            if (fault := find_fault(error)) is not Fault.BUG:
                log.warning("%s: %s, retrying in %g s: %s", job.name, fault.value, pause_seconds, error)
            else:
                log.exception("%s failed, retrying in %g s", job.name, pause_seconds)
            stop.wait(pause_seconds)
            pause_seconds = min(pause_seconds * 2, LONGEST_PAUSE_SECONDS)
        else:
            pause_seconds = FIRST_PAUSE_SECONDS
            stop.wait(job.every_seconds if next_seconds is None else next_seconds)
