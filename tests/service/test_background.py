"""Chores are seen to again and again, whatever becomes of one of them."""

from __future__ import annotations

import logging
import threading

import pytest
from evalstop_service import background
from evalstop_service.background import PeriodicJob, Wait
from evalstop_service.store.database import Database


class Counted:
    """A chore that counts, and after its second time tells who waits."""

    def __init__(self, name: str, *failures: Exception) -> None:
        self.twice = threading.Event()
        self.chore = PeriodicJob(name, self.do)
        self._failures = list(failures)
        self._done = 0

    def do(self, _pause: Wait) -> float:
        if self._failures:
            raise self._failures.pop(0)
        self._done += 1
        if self._done == 2:
            self.twice.set()
        return 0.0


def test_each_is_seen_to_again(caplog: pytest.LogCaptureFixture) -> None:
    """A chore that fails is logged and tried again, the others go on meanwhile, and all end with their block."""
    well, ill = Counted("well"), Counted("ill", ValueError("a fault"))
    with background.run_jobs(well.chore, ill.chore):
        assert well.twice.wait(30)
        assert ill.twice.wait(30)
    assert not {"well", "ill"} & {thread.name for thread in threading.enumerate()}
    (told,) = (record for record in caplog.records if record.name == background.__name__)
    assert told.levelno == logging.ERROR
    assert told.exc_info is not None


def test_a_database_that_is_away_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """What passes by itself is no fault: it is warned of, and tried again."""
    database, tried = Database("postgresql://nobody@127.0.0.1:1/nowhere"), threading.Event()

    def look(_pause: Wait) -> float:
        tried.set()
        with database.reading():
            raise AssertionError("nobody listens there")

    with background.run_jobs(PeriodicJob("looking", look)):
        assert tried.wait(30)
    (told,) = (record for record in caplog.records if record.name == background.__name__)
    assert (told.levelno, told.exc_info) == (logging.WARNING, None)


def test_a_long_rest_ends_with_the_block() -> None:
    """Neither a chore that rests in the middle nor one that wants to be called in a day holds anybody up."""
    begun, said = threading.Event(), list[bool]()

    def rest(pause: Wait) -> float:
        begun.set()
        said.append(pause(86_400.0))
        return 86_400.0

    with background.run_jobs(PeriodicJob("resting", rest)):
        assert begun.wait(30)
    assert said == [True]
