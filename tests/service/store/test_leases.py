"""Leases: who holds a delivery, and what one who lost it can still do; on both databases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import sqlalchemy as sa
from evalstop_service.store import deliveries, endpoints, leases, outbox
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.leases import Dead, Delivered, Ended, GivenBack, Result, Retry
from evalstop_service.store.tables import deliveries as rows

from tests.service.delivery.fakes import EPOCH, Scene, a_scene, settle, take


@pytest.fixture
def scene(database: Database) -> Scene:
    """A project with a run."""
    return a_scene(database)


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
        assert deliveries.attempts(tx, delivery) == []
        assert endpoints.find(tx, scene.project_id, endpoint.id) == endpoint
        assert settle(tx, held, Delivered(), later)
        assert not settle(tx, lost, Dead("HTTP 400"), later)
        assert scene.all(tx)[0].state == "delivered"


def test_settles_many_at_once(database: Database, scene: Scene) -> None:
    """One settlement records each end as if it came alone; what was taken over or cancelled is told and left alone."""
    endpoint = scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        for number in range(6):
            scene.announce(tx, number)
        fine, again, dead, back, lost, cancelled = take(tx, EPOCH, 10, 6)
        tx.execute(sa.update(rows).where(rows.c.id == lost.id).values(attempts=2))
        tx.execute(sa.update(rows).where(rows.c.id == cancelled.id).values(state="cancelled"))
        at = EPOCH + timedelta(seconds=1)
        later = EPOCH + timedelta(minutes=1)
        settled = leases.settle(
            tx,
            [
                Ended(fine, Delivered(), at, 1.5, 204),
                Ended(again, Retry(later, "HTTP 503"), at, 2.5, 503),
                Ended(dead, Dead("HTTP 400"), at, 3.5, 400),
                Ended(back, GivenBack(), at),
                Ended(lost, Delivered(), at, 1.0, 200),
                Ended(cancelled, Delivered(), at, 1.0, 200),
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
        logs = [[(a.number, a.status_code) for a in deliveries.attempts(tx, found[one.id])] for one in found.values()]
        assert sorted(logs) == [[], [], [], [(1, 204)], [(1, 400)], [(1, 503)]]
        assert {one.id for one in take(tx, at, 10, 6)} == {back.id}, "what was given back may be had at once"
        assert endpoints.find(tx, scene.project_id, endpoint.id) == endpoint


def test_settles_beside_deletion_and_cancellation(postgres_database: Database) -> None:
    """Settling many deliveries while their endpoint is deleted and their stops are cancelled ends in no deadlock."""
    database = postgres_database
    scene = a_scene(database)
    failures: list[BaseException] = []
    for _ in range(15):
        endpoint = scene.endpoint(database, "http://x.example")
        with database.transaction() as tx:
            decision = scene.decision(tx, attempt=None)
            for number in range(40):
                scene.announce(tx, number, decision_id=decision.id)
            held = take(tx, EPOCH, 60, 40)
        together = threading.Barrier(3)

        def go(act: Callable[[Transaction], object], barrier: threading.Barrier = together) -> None:
            try:
                barrier.wait(30)
                with database.transaction() as tx:
                    act(tx)
            except BaseException as error:
                failures.append(error)

        ends = [Ended(one, Dead("gone", gone=True) if one is held[0] else Delivered(), EPOCH) for one in reversed(held)]
        acts: list[Callable[[Transaction], object]] = [
            partial(leases.settle, ended=ends),
            partial(endpoints.delete, project_id=scene.project_id, endpoint_id=endpoint.id, now=EPOCH),
            partial(outbox.cancel, run_id=scene.run_id, decision_id=decision.id, now=EPOCH),
        ]
        threads = [threading.Thread(target=go, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
