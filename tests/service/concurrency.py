"""Runs calls at the same time, and waits for conditions and for blocked transactions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from evalstop_service.store.database import Database, Turns


def run_concurrently(*calls: Callable[[], object]) -> list[BaseException]:
    """Run calls in threads that start together; return the exceptions they raised."""
    barrier, failures = threading.Barrier(len(calls)), list[BaseException]()

    def run(call: Callable[[], object]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 60.0) -> None:
    """Wait for the condition; fail after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {timeout_seconds:g} s"
        time.sleep(0.005)


def count_waiting(turns: Turns) -> int:
    """How many transactions wait for their turn to write."""
    return len(turns._decisions) + len(turns._others)


def wait_for_blocked_process(database: Database) -> int:
    """Wait until a PostgreSQL process waits for a lock in this database; return its id."""
    query = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with database.reading() as tx:
            pid: int | None = tx.exec_driver_sql(query).scalar()
        if pid is not None:
            return pid
    raise AssertionError("no process waited for a lock within 60 s")
