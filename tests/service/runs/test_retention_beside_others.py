"""Pruning beside other processes: it blocks nobody, and is blocked by nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from evalstop_service.runs import retention
from evalstop_service.store import retention as rows
from evalstop_service.store import tables
from evalstop_service.store.database import Database

from tests.service import project_fixture
from tests.service.concurrency import run_concurrently
from tests.service.ended_runs import (
    FEW_ROWS,
    NOW,
    add_ended_run,
    has_no_details,
    is_marked_pruned,
    load_project_name,
    set_up_project_with_retention,
)


def test_locked_run_is_skipped(postgres_database: Database) -> None:
    """A locked run is skipped and pruned by the next pass."""
    project = set_up_project_with_retention(postgres_database)
    locked_run, free_run = add_ended_run(project, 200), add_ended_run(project, 100)
    with set_short_lock_timeout(postgres_database), postgres_database.transaction() as tx:
        tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == locked_run.id).with_for_update())
        result = retention.prune_runs(postgres_database, NOW, rows=FEW_ROWS)
        assert result.runs == {load_project_name(project): 1}
    assert not is_marked_pruned(project, locked_run)
    assert has_no_details(postgres_database, free_run)
    assert retention.prune_runs(postgres_database, NOW, rows=FEW_ROWS).runs == {load_project_name(project): 1}
    assert has_no_details(postgres_database, locked_run)


def test_pruning_blocks_no_writer(postgres_database: Database) -> None:
    """While transactions that mark or delete are open, others post and open runs without waiting for a lock."""
    project = set_up_project_with_retention(postgres_database)
    add_ended_run(project, 100)
    live = project.open_run()
    steps = iter(range(100))

    def post_and_open_run() -> None:
        project.open_run()
        assert project.post_observations(live, project_fixture.evals(0.1, start=next(steps))).accepted == 1
        with postgres_database.reading() as tx:
            assert tx.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar_one() == 0

    with set_short_lock_timeout(postgres_database):
        with postgres_database.transaction() as tx:
            assert rows.mark_runs(tx, project.id, NOW, NOW, 10) == 1
            post_and_open_run()
        for _ in range(3):
            with postgres_database.transaction() as tx:
                rows.delete_details(tx, 10)
                post_and_open_run()
    assert not is_marked_pruned(project, live)


@contextmanager
def set_short_lock_timeout(database: Database) -> Iterator[None]:
    """Make every wait for a lock in this database fail at once."""
    with database.transaction() as tx:
        name = tx.exec_driver_sql("SELECT current_database()").scalar_one()
        tx.exec_driver_sql(f'ALTER DATABASE "{name}" SET lock_timeout = 100')
    database.close()  # the setting applies to new connections
    yield


@pytest.mark.nightly
def test_writers_get_a_turn_between_transactions(database: Database) -> None:
    """Between two transactions anyone can write, also on SQLite with its single writer."""
    project = set_up_project_with_retention(database)
    add_ended_run(project, 100)
    live = project.open_run()
    writes = 0

    def write_observation(_seconds: float) -> bool:
        nonlocal writes
        writer = threading.Thread(
            target=project.post_observations, args=(live, project_fixture.evals(0.1, start=writes))
        )
        writer.start()
        writer.join()
        writes += 1
        return False

    retention.prune_runs(database, NOW, rows=FEW_ROWS, pause=write_observation)
    assert writes > 5
    assert len(project.load_rows(tables.observations, live)) == writes


def test_writer_beside_pruning_loses_nothing(database: Database) -> None:
    """A run that is posted to during pruning keeps every observation and gets its usual verdict."""
    project = set_up_project_with_retention(database)
    reference, posted_meanwhile = project.open_run(policy="watch-all-roles"), project.open_run(policy="watch-all-roles")
    values = [0.1, 0.2, 0.5, 0.4, 0.3, 0.35, 0.2, 0.1]
    for step, value in enumerate(values):
        project.post_observations(reference, project_fixture.evals(value, start=step))
    for _ in range(4):
        add_ended_run(project, 100, observation_count=30)

    def prune() -> None:
        retention.prune_runs(database, NOW, rows=5)

    def post() -> None:
        for step, value in enumerate(values):
            project.post_observations(posted_meanwhile, project_fixture.evals(value, start=step))

    assert run_concurrently(prune, post) == []
    assert project.load_run(posted_meanwhile).verdict == project.load_run(reference).verdict
    assert len(project.load_rows(tables.observations, posted_meanwhile)) == len(values)
    assert len(project.load_rows(tables.verdicts, posted_meanwhile)) == len(
        project.load_rows(tables.verdicts, reference)
    )


def test_processes_prune_together(database: Database) -> None:
    """Several processes that prune at the same time remove everything once."""
    project = set_up_project_with_retention(database)
    ended = [add_ended_run(project, 100, observation_count=30) for _ in range(4)]
    results: list[retention.PruneResult] = []

    def prune() -> None:
        results.append(retention.prune_runs(database, NOW, rows=5))

    assert run_concurrently(prune, prune, prune) == []
    assert sum(sum(result.runs.values()) for result in results) == len(ended)
    assert all(has_no_details(database, run) for run in ended)
