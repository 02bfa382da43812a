"""Background jobs repeat, whatever happens to one of them."""

from __future__ import annotations

import logging
import threading

import pytest
from evalstop_service import background
from evalstop_service.background import PeriodicJob, Wait
from evalstop_service.store.database import Database


class CountingJob:
    """A job that counts its runs and sets an event after the second."""

    def __init__(self, name: str, *failures: Exception) -> None:
        self.ran_twice = threading.Event()
        self.job = PeriodicJob(name, self.run)
        self._failures = list(failures)
        self._done = 0

    def run(self, _pause: Wait) -> float:
        if self._failures:
            raise self._failures.pop(0)
        self._done += 1
        if self._done == 2:
            self.ran_twice.set()
        return 0.0


def test_failing_job_is_logged_and_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """A failing job is logged and run again, other jobs go on meanwhile, and all end with the block."""
    healthy, failing = CountingJob("healthy"), CountingJob("failing", ValueError("a fault"))
    with background.run_jobs(healthy.job, failing.job):
        assert healthy.ran_twice.wait(60)
        assert failing.ran_twice.wait(60)
    assert not {"healthy", "failing"} & {thread.name for thread in threading.enumerate()}
    (record,) = (record for record in caplog.records if record.name == background.__name__)
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


def test_unavailable_database_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A job that cannot reach the database logs a warning without a traceback, not an error."""
    database, called = Database("postgresql://nobody@127.0.0.1:1/nowhere"), threading.Event()

    def read(_pause: Wait) -> float:
        called.set()
        with database.reading():
            raise AssertionError("the connection must be refused")

    with background.run_jobs(PeriodicJob("looking", read)):
        assert called.wait(60)
    (record,) = (record for record in caplog.records if record.name == background.__name__)
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)


def test_long_pause_ends_with_the_block() -> None:
    """Neither a job in a long pause nor one with a long interval delays the end of the block."""
    started, pause_results = threading.Event(), list[bool]()

    def run_job(pause: Wait) -> float:
        started.set()
        pause_results.append(pause(86_400.0))
        return 86_400.0

    with background.run_jobs(PeriodicJob("resting", run_job)):
        assert started.wait(60)
    assert pause_results == [True]


def test_error_with_one_item_does_not_delay_the_others() -> None:
    """All items are handled, and the error is raised at the end, with the item that caused it."""
    handled: list[int] = []

    def handle(item: int) -> None:
        if item == 1:
            raise ValueError("a fault")
        handled.append(item)

    with pytest.raises(ValueError, match="a fault") as raised:
        background.handle_each([0, 1, 2], handle)
    assert handled == [0, 2]
    assert raised.value.__notes__ == ["while handling 1"]
