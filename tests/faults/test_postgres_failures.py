"""PostgreSQL restarted, its connections cut, its transactions broken off: retried with a limit, and nothing lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from evalstop_service.store.database import Database

from tests.faults.conftest import Installation
from tests.faults.retrying_clients import Trainer, batch, helpful, more, told, training, wait_until
from tests.faults.run_records import assert_nothing_lost, run_of, values
from tests.faults.servers import Restartable

pytestmark = pytest.mark.real

TRAINERS = 4
CUTS = 10
CUT_ALL = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
TRIES = 6
"""Of one transaction, before its requests are refused."""


def trainers_of(installation: Installation, end: threading.Event) -> list[Trainer]:
    return [Trainer(installation.caller(), f"run-{number}", end) for number in range(TRAINERS)]


def refused(trainers: Sequence[Trainer]) -> int:
    return sum(len(trainer.caller.refusals) for trainer in trainers)


@pytest.mark.timeout(240)
def test_restarted(own_postgres: Restartable, on_own_postgres: Installation, embedded_database: Database) -> None:
    """PostgreSQL is restarted under load, its sessions ended or dropped where they stood, and stays away for a while:
    requests wait or are refused, and the service goes on by itself with all that it acknowledged.
    """
    end = threading.Event()
    trainers = trainers_of(on_own_postgres, end)
    with training(trainers, end):
        for how in (signal.SIGINT, signal.SIGQUIT):
            more(trainers, 30)
            own_postgres.restart(how)
        more(trainers, 30)
        own_postgres.stop(signal.SIGQUIT)
        already = refused(trainers)
        wait_until(lambda: refused(trainers) > already, "requests are refused while PostgreSQL is away")
        own_postgres.start()
        more(trainers, 30)
    assert sum(trainer.caller.cut for trainer in trainers) == 0
    for trainer in trainers:
        assert_nothing_lost(on_own_postgres.project, trainer.run_id, trainer.acknowledged, embedded_database)


@pytest.mark.timeout(240)
def test_connections_are_cut(installation: Installation, embedded_database: Database) -> None:
    """All its connections are cut ten times under load: no open run notices, and every point is counted once."""
    end = threading.Event()
    trainers = trainers_of(installation, end)
    with training(trainers, end):
        wait_until(lambda: all(trainer.acknowledged for trainer in trainers), "every run is open")
        for _ in range(CUTS):
            more(trainers, 12)
            with installation.project.database.transaction() as tx:
                tx.exec_driver_sql(CUT_ALL)
        more(trainers, 12)
    assert [(trainer.caller.cut, trainer.caller.refusals) for trainer in trainers] == [(0, [])] * TRAINERS
    for trainer in trainers:
        assert_nothing_lost(installation.project, trainer.run_id, trainer.acknowledged, embedded_database)


@contextmanager
def spoiled(database: Database, sqlstate: str, times: int, *, at_commit: bool = False) -> Iterator[None]:
    """The next transactions that store observations fail with an error of PostgreSQL's, or only their commits do."""
    kind, event, each = "TRIGGER", "INSERT ON observations", "FOR EACH STATEMENT"
    if at_commit:
        kind, event = "CONSTRAINT TRIGGER", "UPDATE ON runs"
        each = "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
    with database.transaction() as tx:
        tx.exec_driver_sql("CREATE SEQUENCE tries")  # which no rollback takes back
        tx.exec_driver_sql(
            "CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" IF nextval('tries') <= {times} THEN RAISE EXCEPTION 'spoiled' USING ERRCODE = '{sqlstate}'; END IF;"
            " RETURN NULL; END $$"
        )
        tx.exec_driver_sql(f"CREATE {kind} spoiler AFTER {event} {each} EXECUTE FUNCTION spoil()")
    try:
        yield
    finally:
        with database.transaction() as tx:
            tx.exec_driver_sql("DROP FUNCTION spoil CASCADE")
            tx.exec_driver_sql("DROP SEQUENCE tries")


def tries(database: Database) -> int:
    with database.reading() as tx:
        count: int = tx.exec_driver_sql("SELECT last_value FROM tries").scalar_one()
    return count


@pytest.mark.parametrize(
    ("sqlstate", "at_commit"),
    [("40001", False), ("40P01", False), ("40001", True)],
    ids=["serialization", "deadlock", "serialization-at-commit"],
)
def test_what_passes_is_tried_again(installation: Installation, sqlstate: str, at_commit: bool) -> None:
    """A transaction that fails twice for a reason that passes is committed with the third try."""
    database = installation.project.database
    with installation.caller() as caller:
        run_id = caller.post("/runs", {"name": f"passes-{sqlstate}-{at_commit}"})["id"]
        with spoiled(database, sqlstate, times=2, at_commit=at_commit):
            assert caller.post(f"/runs/{run_id}/observations", batch(told(0)))["accepted"] == 3
            assert tries(database) == 3
        assert caller.refusals == []


def test_tries_have_an_end(installation: Installation) -> None:
    """What does not pass is refused after six tries, with what to do; when it is over the same is taken."""
    database = installation.project.database
    with installation.caller() as caller:
        run_id = caller.post("/runs", {"name": "does-not-pass"})["id"]
        with spoiled(database, "40001", times=TRIES):
            problem = helpful(caller.try_once(f"/runs/{run_id}/observations", batch(told(0))))
            assert problem["title"] == "The database does not answer"
            assert tries(database) == TRIES
            assert values(installation.project, run_of(installation.project, run_id)) == []
            assert caller.post(f"/runs/{run_id}/observations", batch(told(0)))["accepted"] == 3


@pytest.mark.parametrize("sqlstate", ["22012", "P0001", "42P01"], ids=["division", "raised", "no-such-table"])
def test_a_fault_is_not_tried_again(installation: Installation, sqlstate: str) -> None:
    """An error that lies in what was asked is answered at once: trying again would only hide it."""
    database = installation.project.database
    with installation.caller() as caller:
        run_id = caller.post("/runs", {"name": f"fault-{sqlstate}"})["id"]
        with spoiled(database, sqlstate, times=1):
            response = caller.try_once(f"/runs/{run_id}/observations", batch(told(0)))
            assert response.status_code == 500
            assert "log" in response.json()["detail"]
            assert tries(database) == 1
            assert caller.post(f"/runs/{run_id}/observations", batch(told(0)))["accepted"] == 3
