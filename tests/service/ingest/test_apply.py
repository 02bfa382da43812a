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

from tests.service.scenes import (
    FALLING,
    NOW,
    Scene,
    at_once,
    evals,
    set_up,
    take,
    waiting_for_a_lock,
)


def test_rolls_back_whole(scene: Scene) -> None:
    """When the decision cannot be stored, neither the points nor any event of the batch stay."""
    run = scene.open()
    scene.post(run, FALLING[:-1])
    with scene.database.transaction() as tx:  # takes the place of the decision, so that a real constraint refuses it
        tx.exec_driver_sql("CREATE UNIQUE INDEX spoiler ON decisions (project_id)")
    other = scene.open()
    assert scene.post(other, FALLING).decision is not None
    before = (scene.rows(tables.observations, run), scene.rows(tables.events, run), scene.read(run))
    with pytest.raises(sa.exc.IntegrityError):
        scene.post(run, FALLING[-1:])
    assert (scene.rows(tables.observations, run), scene.rows(tables.events, run), scene.read(run)) == before
    assert scene.decision(run) is None
    with scene.database.transaction() as tx:
        tx.exec_driver_sql("DROP INDEX spoiler")
    assert scene.post(run, FALLING[-1:]).decision is not None


def test_no_decision_without_its_event(scene: Scene) -> None:
    """When the event cannot be written, there is no decision either, and no point of the batch."""
    run = scene.open()
    with scene.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE events RENAME TO events_away")
    with pytest.raises(sa.exc.DBAPIError):
        scene.post(run, FALLING)
    with scene.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE events_away RENAME TO events")
    assert scene.decision(run) is None
    assert scene.rows(tables.observations, run) == []
    assert scene.post(run, FALLING).accepted == len(FALLING)
    assert len(scene.events(run, "run.stop_requested")) == 1


def test_a_lost_connection_leaves_nothing(postgres_database: Database) -> None:
    """When the connection is cut in the middle of a transaction, nothing of it is left: the next try stores all."""
    scene = set_up(postgres_database)
    run = scene.open()
    with ThreadPoolExecutor(1) as thread:
        with postgres_database.transaction() as tx:  # holds up the insertion of the event, deep inside the transaction
            tx.exec_driver_sql("LOCK TABLE events IN ACCESS EXCLUSIVE MODE")
            receipt = thread.submit(scene.post, run, FALLING)
            first_try = waiting_for_a_lock(postgres_database)
            tx.exec_driver_sql(f"SELECT pg_terminate_backend({first_try})")
            while waiting_for_a_lock(postgres_database) == first_try:
                pass
            assert scene.rows(tables.observations, run) == []
        assert receipt.result(30).accepted == len(FALLING)
    assert len(scene.rows(tables.decisions, run)) == 1


def test_many_at_once(scene: Scene) -> None:
    """Batches posted to one run from many threads lose nothing, count nothing twice, and decide once."""
    run = scene.open()
    points = [PostedObservation("eval", step, 1.0 - step / 100) for step in range(48)]
    receipts = []

    def post(number: int) -> None:
        for start in range(0, 48, 8):
            batch = points[start : start + 8]
            receipts.append(scene.post(run, batch if number % 2 else batch[::-1]))

    failures = at_once(*(lambda number=number: post(number) for number in range(6)))
    assert failures == []
    assert sum(receipt.accepted for receipt in receipts) == 48
    assert sum(receipt.duplicates for receipt in receipts) == 48 * 5
    assert len(scene.rows(tables.observations, run)) == 48
    assert len(scene.rows(tables.decisions, run)) == 1
    assert len(scene.events(run, "run.stop_requested")) == 1
    alone = scene.open()
    scene.post(alone, points)
    assert scene.read(run).verdict == scene.read(alone).verdict


def test_another_projects_run(scene: Scene) -> None:
    """A run cannot be reached from another project."""
    run = scene.open()
    stranger = set_up(scene.database)
    with pytest.raises(NotFound):
        stranger.post(run, evals(0.1))
    assert scene.rows(tables.observations, run) == []


def test_an_unknown_run(scene: Scene) -> None:
    """News of a run that was never opened is refused, with what to do."""
    with pytest.raises(NotFound, match="create one"):
        take(scene.database, scene.project_id, new_id(), Observations(tuple(evals(0.1))), NOW)
