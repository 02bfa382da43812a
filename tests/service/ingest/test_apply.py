"""News is taken in whole or not at all, however many bring it at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from evalstop_service.errors import NotFound
from evalstop_service.ingest import Observations
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation

from tests.service.project_fixture import (
    DECLINING_EVALS,
    NOW,
    ProjectFixture,
    evals,
    run_concurrently,
    set_up_project,
    submit_message,
    wait_for_blocked_process,
)


def test_rolls_back_whole(project: ProjectFixture) -> None:
    """When the decision cannot be stored, neither the points nor any event of the batch stay."""
    run = project.open_run()
    project.post_observations(run, DECLINING_EVALS[:-1])
    with project.database.transaction() as tx:  # takes the place of the decision, so that a real constraint refuses it
        tx.exec_driver_sql("CREATE UNIQUE INDEX spoiler ON decisions (project_id)")
    other = project.open_run()
    assert project.post_observations(other, DECLINING_EVALS).decision is not None
    before = (project.load_rows(tables.observations, run), project.load_rows(tables.events, run), project.load_run(run))
    with pytest.raises(sa.exc.IntegrityError):
        project.post_observations(run, DECLINING_EVALS[-1:])
    assert (
        project.load_rows(tables.observations, run),
        project.load_rows(tables.events, run),
        project.load_run(run),
    ) == before
    assert project.find_decision(run) is None
    with project.database.transaction() as tx:
        tx.exec_driver_sql("DROP INDEX spoiler")
    assert project.post_observations(run, DECLINING_EVALS[-1:]).decision is not None


def test_no_decision_without_its_event(project: ProjectFixture) -> None:
    """When the event cannot be written, there is no decision either, and no point of the batch."""
    run = project.open_run()
    with project.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE events RENAME TO events_away")
    with pytest.raises(sa.exc.DBAPIError):
        project.post_observations(run, DECLINING_EVALS)
    with project.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE events_away RENAME TO events")
    assert project.find_decision(run) is None
    assert project.load_rows(tables.observations, run) == []
    assert project.post_observations(run, DECLINING_EVALS).accepted == len(DECLINING_EVALS)
    assert len(project.load_events(run, "run.stop_requested")) == 1


def test_a_lost_connection_leaves_nothing(postgres_database: Database) -> None:
    """When the connection is cut in the middle of a transaction, nothing of it is left: the next try stores all."""
    project = set_up_project(postgres_database)
    run = project.open_run()
    with ThreadPoolExecutor(1) as thread:
        with postgres_database.transaction() as tx:  # holds up the insertion of the event, deep inside the transaction
            tx.exec_driver_sql("LOCK TABLE events IN ACCESS EXCLUSIVE MODE")
            receipt = thread.submit(project.post_observations, run, DECLINING_EVALS)
            first_try = wait_for_blocked_process(postgres_database)
            tx.exec_driver_sql(f"SELECT pg_terminate_backend({first_try})")
            while wait_for_blocked_process(postgres_database) == first_try:
                pass
            assert project.load_rows(tables.observations, run) == []
        assert receipt.result(30).accepted == len(DECLINING_EVALS)
    assert len(project.load_rows(tables.decisions, run)) == 1


def test_many_at_once(project: ProjectFixture) -> None:
    """Batches posted to one run from many threads lose nothing, count nothing twice, and decide once."""
    run = project.open_run()
    points = [PostedObservation("eval", step, 1.0 - step / 100) for step in range(48)]
    receipts = []

    def post(number: int) -> None:
        for start in range(0, 48, 8):
            batch = points[start : start + 8]
            receipts.append(project.post_observations(run, batch if number % 2 else batch[::-1]))

    failures = run_concurrently(*(lambda number=number: post(number) for number in range(6)))
    assert failures == []
    assert sum(receipt.accepted for receipt in receipts) == 48
    assert sum(receipt.duplicates for receipt in receipts) == 48 * 5
    assert len(project.load_rows(tables.observations, run)) == 48
    assert len(project.load_rows(tables.decisions, run)) == 1
    assert len(project.load_events(run, "run.stop_requested")) == 1
    alone = project.open_run()
    project.post_observations(alone, points)
    assert project.load_run(run).verdict == project.load_run(alone).verdict


def test_another_projects_run(project: ProjectFixture) -> None:
    """A run cannot be reached from another project."""
    run = project.open_run()
    stranger = set_up_project(project.database)
    with pytest.raises(NotFound):
        stranger.post_observations(run, evals(0.1))
    assert project.load_rows(tables.observations, run) == []


def test_an_unknown_run(project: ProjectFixture) -> None:
    """News of a run that was never opened is refused, with what to do."""
    with pytest.raises(NotFound, match="create one"):
        submit_message(project.database, project.id, new_id(), Observations(tuple(evals(0.1))), NOW)
