"""Leases: who holds a delivery, and what one who lost it can still do; on both databases."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import sqlalchemy as sa
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.queue import deliveries, leases, outbox
from evalstop_service.store.queue.attempts import (
    ClaimedDelivery,
    Dead,
    Delivered,
    FinishedAttempt,
    Released,
    Result,
    Retry,
)
from evalstop_service.store.tables import deliveries as rows
from evalstop_service.store.tables import events

from tests.service.webhooks.delivery.fakes import EPOCH, Scene, a_scene, settle, take


@pytest.mark.parametrize("late", [Delivered(), Dead("HTTP 400"), Retry(EPOCH, "HTTP 500"), Dead("gone", gone=True)])
def test_a_lost_lease_changes_nothing(database: Database, scene: Scene, late: Result) -> None:
    """A worker that comes back after its lease was taken over can neither settle, record nor disable anything."""
    endpoint = scene.endpoint(database, "http://x.example")
    later = EPOCH + timedelta(seconds=11)
    with database.transaction() as tx:
        scene.announce(tx)
        (lost,) = take(tx, EPOCH, 10, 1)
        assert take(tx, later - timedelta(seconds=2), 10, 1) == []
        (held,) = take(tx, later, 10, 1)
        assert not settle(tx, lost, late, later)
        (delivery,) = scene.all(tx)
        assert (delivery.state, delivery.due_at, delivery.attempts) == ("waiting", held.lease_until, 2)
        assert deliveries.list_attempts(tx, delivery) == []
        assert endpoints.find_endpoint(tx, scene.project_id, endpoint.id) == endpoint
        assert settle(tx, held, Delivered(), later)
        assert not settle(tx, lost, Dead("HTTP 400"), later)
        assert scene.all(tx)[0].state == "delivered"


def test_settles_many_at_once(database: Database, scene: Scene) -> None:
    """One settlement records each end as if it came alone; what was taken over or cancelled is told and left alone."""
    endpoint = scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        for number in range(6):
            scene.apart(tx, number)
        fine, again, dead, back, lost, cancelled = take(tx, EPOCH, 10, 6)
        tx.execute(sa.update(rows).where(rows.c.id == lost.id).values(attempts=2))
        tx.execute(sa.update(rows).where(rows.c.id == cancelled.id).values(state="cancelled"))
        at = EPOCH + timedelta(seconds=1)
        later = EPOCH + timedelta(minutes=1)
        settled = leases.settle_deliveries(
            tx,
            [
                FinishedAttempt(fine, Delivered(), at, 1.5, 204),
                FinishedAttempt(again, Retry(later, "HTTP 503"), at, 2.5, 503),
                FinishedAttempt(dead, Dead("HTTP 400"), at, 3.5, 400),
                FinishedAttempt(back, Released(), at),
                FinishedAttempt(lost, Delivered(), at, 1.0, 200),
                FinishedAttempt(cancelled, Delivered(), at, 1.0, 200),
            ],
        )
        assert settled.kept == {fine.id, again.id, dead.id, back.id}
        assert settled.cancelled == {cancelled.id}
        found = {one.id: one for one in scene.all(tx)}
        assert [(found[one.id].state, found[one.id].last_error) for one in (fine, again, dead, back, lost)] == [
            ("delivered", None),
            ("waiting", "HTTP 503"),
            ("dead", "HTTP 400"),
            ("waiting", None),
            ("waiting", None),
        ]
        assert found[again.id].due_at == later
        logs = [
            [(a.number, a.status_code) for a in deliveries.list_attempts(tx, found[one.id])] for one in found.values()
        ]
        assert sorted(logs) == [[], [], [], [(1, 204)], [(1, 400)], [(1, 503)]]
        assert {one.id for one in take(tx, at, 10, 6)} == {back.id}, "what was given back may be had at once"
        assert endpoints.find_endpoint(tx, scene.project_id, endpoint.id) == endpoint


@pytest.mark.parametrize("act", ["settle", "delete", "cancel"])
def test_locks_in_one_order(postgres_database: Database, act: str) -> None:
    """Whoever changes many deliveries waits for the first one before it takes any other, so that no two can wait in a
    ring."""
    database = postgres_database
    scene = a_scene(database)
    endpoint = scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        decision = scene.decision(tx)
        for number in range(20):
            scene.announce(tx, number, decision_id=decision.id)
        tx.execute(sa.update(events).values(type="run.stop_requested"))  # as if it had been asked for so many times
        held = sorted(take(tx, EPOCH, 60, 20), key=lambda one: one.id)
        for number, one in enumerate(reversed(held)):  # so that no index has them in the order of their keys by chance
            tx.execute(sa.update(rows).where(rows.c.id == one.id).values(due_at=EPOCH + timedelta(seconds=number)))
    ends = [FinishedAttempt(one, Delivered(), EPOCH) for one in reversed(held)]
    acts: dict[str, Callable[[Transaction], object]] = {
        "settle": partial(leases.settle_deliveries, ended=ends),
        "delete": partial(endpoints.delete_endpoint, project_id=scene.project_id, endpoint_id=endpoint.id, now=EPOCH),
        "cancel": partial(outbox.cancel_stop, run_id=scene.run_id, decision_id=decision.id, now=EPOCH, why="vetoed"),
    }

    def go() -> None:
        with database.transaction() as tx:
            acts[act](tx)

    def lock(tx: Transaction, which: ClaimedDelivery) -> object:
        return tx.execute(sa.select(rows.c.id).where(rows.c.id == which.id).with_for_update(nowait=True)).all()

    with ThreadPoolExecutor(1) as threads, database.transaction() as tx:
        lock(tx, held[0])
        going = threads.submit(go)
        while not tx.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar_one():
            assert not going.done(), "it did not wait"
        lock(tx, held[-1])
        tx.commit()
        going.result(30)
