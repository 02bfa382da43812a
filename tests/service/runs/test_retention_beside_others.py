"""Pruning stands in the way of nobody who works on the database at the same time, and is not kept up by any."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import sqlalchemy as sa
from evalstop_service.errors import Conflict
from evalstop_service.runs import retention
from evalstop_service.runs.retention import Pace
from evalstop_service.store import retention as rows
from evalstop_service.store import tables
from evalstop_service.store.database import Database

from tests.service import project_fixture
from tests.service.aged import (
    AT_ONCE,
    KEEP_DAYS,
    NOW,
    a_scene,
    end,
    ended,
    is_empty,
    is_marked,
    name_of,
)


def test_a_run_that_goes_on_is_left_alone(database: Database) -> None:
    """A run that was resumed after it was found, and before it was marked, keeps everything."""
    project = a_scene(database)
    run = ended(project, 100)
    with database.reading() as tx:
        found = rows.list_expired_runs(tx, project.id, NOW - timedelta(days=KEEP_DAYS), 10)
    assert found == [run.id]
    with database.transaction() as tx:
        end(tx, run, None)
    with database.transaction() as tx:
        assert rows.mark_runs(tx, found, NOW - timedelta(days=KEEP_DAYS), NOW) == 0
    assert not is_marked(project, run)


def test_a_run_that_is_held_is_not_waited_for(postgres_database: Database) -> None:
    """A run that somebody has locked is passed over, and its turn comes with the next pass."""
    project = a_scene(postgres_database)
    busy, free = ended(project, 200), ended(project, 100)
    with impatient(postgres_database), postgres_database.transaction() as tx:
        tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == busy.id).with_for_update())
        done = retention.prune_runs(postgres_database, NOW, pace=AT_ONCE)
        assert done.runs == {name_of(project): 1}
    assert not is_marked(project, busy)
    assert is_empty(postgres_database, free)
    assert retention.prune_runs(postgres_database, NOW, pace=AT_ONCE).runs == {name_of(project): 1}
    assert is_empty(postgres_database, busy)


def test_it_stands_in_nobodys_way(postgres_database: Database) -> None:
    """While transactions that mark and that empty are open, others post and open runs without waiting for any lock."""
    project = a_scene(postgres_database)
    old, live = ended(project, 100), project.open_run()
    points = iter(range(100))

    def others_work() -> None:
        project.open_run()
        assert project.post_observations(live, project_fixture.evals(0.1, start=next(points))).accepted == 1
        with postgres_database.reading() as tx:
            assert tx.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar_one() == 0

    with impatient(postgres_database):
        with postgres_database.transaction() as tx:
            assert rows.mark_runs(tx, [old.id], NOW, NOW) == 1
            others_work()
        position = None
        for _ in range(3):
            with postgres_database.transaction() as tx:
                position = rows.delete_details(tx, 10, position).position
                others_work()
    assert not is_marked(project, live)


@contextmanager
def impatient(database: Database) -> Iterator[None]:
    """From now on whoever waits for a lock in this database fails at once."""
    with database.transaction() as tx:
        name = tx.exec_driver_sql("SELECT current_database()").scalar_one()
        tx.exec_driver_sql(f'ALTER DATABASE "{name}" SET lock_timeout = 100')
    database.close()  # the setting is for connections that are made from now on
    yield


def test_writers_have_their_turn(database: Database) -> None:
    """Between two transactions anybody may write, on the embedded database with its one writer, too."""
    project = a_scene(database)
    ended(project, 100)
    live = project.open_run()
    turns = 0

    def write(_seconds: float) -> bool:
        nonlocal turns
        writer = threading.Thread(
            target=project.post_observations, args=(live, project_fixture.evals(0.1, start=turns))
        )
        writer.start()
        writer.join()
        turns += 1
        return False

    retention.prune_runs(database, NOW, pace=AT_ONCE, pause=write)
    assert turns > 5
    assert len(project.load_rows(tables.observations, live)) == turns


def test_a_writer_beside_it_loses_nothing(database: Database) -> None:
    """A run that is posted to all the while comes to the verdict that it comes to alone, and keeps every point."""
    project = a_scene(database)
    alone, beside = project.open_run(policy="watch-all-roles"), project.open_run(policy="watch-all-roles")
    values = [0.1, 0.2, 0.5, 0.4, 0.3, 0.35, 0.2, 0.1]
    for step, value in enumerate(values):
        project.post_observations(alone, project_fixture.evals(value, start=step))
    for _ in range(4):
        ended(project, 100, points=30)
    failures: list[BaseException] = []

    def prune() -> None:
        try:
            retention.prune_runs(database, NOW, pace=Pace(rows=5, pause_seconds=0))
        except BaseException as error:
            failures.append(error)

    pruner = threading.Thread(target=prune)
    pruner.start()
    for step, value in enumerate(values):
        project.post_observations(beside, project_fixture.evals(value, start=step))
    pruner.join()
    assert failures == []
    assert project.load_run(beside).verdict == project.load_run(alone).verdict
    assert len(project.load_rows(tables.observations, beside)) == len(values)
    assert len(project.load_rows(tables.verdicts, beside)) == len(project.load_rows(tables.verdicts, alone))


def test_one_process_at_a_time(postgres_database: Database) -> None:
    """While one prunes another says so and leaves it to that; afterwards it may."""
    project = a_scene(postgres_database)
    run = ended(project, 100)
    with rows.hold_retention_lock(postgres_database) as alone:
        assert alone
        with pytest.raises(Conflict, match="another process"):
            retention.prune_runs(postgres_database, NOW)
    assert not is_marked(project, run)
    assert retention.prune_runs(postgres_database, NOW, pace=AT_ONCE).runs
