"""Leases of deliveries: what a worker can do with its lease, and after it lost it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import sqlalchemy as sa
from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.queue import leases, outbox
from evalstop_service.store.queue.attempts import (
    ClaimedDelivery,
    Dead,
    Delivered,
    FinishedAttempt,
    Result,
    Retry,
)
from evalstop_service.store.tables import deliveries as delivery_table
from evalstop_service.store.tables import events

from tests.service.concurrency import wait_for_blocked_process
from tests.service.webhooks.delivery.fakes import EPOCH, SeededProject, claim_deliveries, seed_project, settle_delivery


@pytest.mark.parametrize(
    "late_result", [Delivered(), Dead("HTTP 400"), Retry(EPOCH, "HTTP 500"), Dead("gone", gone=True)]
)
def test_lost_lease_settles_nothing(database: Database, project: SeededProject, late_result: Result) -> None:
    """A worker whose lease was taken over can neither settle the delivery nor disable its endpoint."""
    endpoint = project.add_endpoint(database, "http://x.example")
    later = EPOCH + timedelta(seconds=11)
    with database.transaction() as tx:
        project.add_event(tx)
        (lost,) = claim_deliveries(tx, EPOCH, 10, 1)
        assert claim_deliveries(tx, later - timedelta(seconds=2), 10, 1) == []
        (reclaimed,) = claim_deliveries(tx, later, 10, 1)
        assert not settle_delivery(tx, lost, late_result, later)
        (delivery,) = project.list_deliveries(tx)
        assert (delivery.state, delivery.due_at, delivery.attempts) == ("waiting", reclaimed.lease_until, 2)
        assert outbox.list_attempts(tx, delivery) == []
        assert endpoints.find_endpoint(tx, project.id, endpoint.id) == endpoint
        assert settle_delivery(tx, reclaimed, Delivered(), later)
        assert not settle_delivery(tx, lost, Dead("HTTP 400"), later)
        assert project.list_deliveries(tx)[0].state == "delivered"


def test_deliveries_of_one_run_are_settled_apart(database: Database, project: SeededProject) -> None:
    """What one endpoint answered is not recorded for another that has the same event, and was cancelled meanwhile."""
    for url in ("http://x.example", "http://y.example"):
        project.add_endpoint(database, url)
    with database.transaction() as tx:
        project.add_event(tx)
        (cancelled,), (held,) = claim_deliveries(tx, EPOCH, 10, 1), claim_deliveries(tx, EPOCH, 10, 1)
        is_cancelled = delivery_table.c.id == cancelled.id
        tx.execute(sa.update(delivery_table).where(is_cancelled).values(state="cancelled"))
        leases.settle_deliveries(tx, [FinishedAttempt(claimed, Delivered(), EPOCH) for claimed in (cancelled, held)])
        states = {delivery.id: delivery.state for delivery in project.list_deliveries(tx)}
    assert states == {cancelled.id: "cancelled", held.id: "delivered"}


def test_batch_settles_each_attempt(database: Database, project: SeededProject) -> None:
    """A batch records each result as if settled alone; lost leases and cancelled deliveries are reported and
    skipped."""
    endpoint = project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        for number in range(6):
            project.add_event_of_new_run(tx, number)
        delivered, retried, dead, lost, cancelled = claim_deliveries(tx, EPOCH, 10, 5)
        tx.execute(sa.update(delivery_table).where(delivery_table.c.id == lost.id).values(attempts=2))
        tx.execute(sa.update(delivery_table).where(delivery_table.c.id == cancelled.id).values(state="cancelled"))
        at = EPOCH + timedelta(seconds=1)
        later = EPOCH + timedelta(minutes=1)
        settled = leases.settle_deliveries(
            tx,
            [
                FinishedAttempt(delivered, Delivered(), at, 1.5, 204),
                FinishedAttempt(retried, Retry(later, "HTTP 503"), at, 2.5, 503),
                FinishedAttempt(dead, Dead("HTTP 400"), at, 3.5, 400),
                FinishedAttempt(lost, Delivered(), at, 1.0, 200),
                FinishedAttempt(cancelled, Delivered(), at, 1.0, 200),
            ],
        )
        held = dict.fromkeys((delivered.id, retried.id, dead.id), DeliveryState.WAITING)
        assert settled == held | {cancelled.id: DeliveryState.CANCELLED}
        stored = {delivery.id: delivery for delivery in project.list_deliveries(tx)}
        assert [
            (stored[delivery.id].state, stored[delivery.id].last_error) for delivery in (delivered, retried, dead, lost)
        ] == [
            ("delivered", None),
            ("waiting", "HTTP 503"),
            ("dead", "HTTP 400"),
            ("waiting", None),
        ]
        assert stored[retried.id].due_at == later
        attempt_logs = [
            [(a.number, a.status_code) for a in outbox.list_attempts(tx, stored[delivery.id])]
            for delivery in stored.values()
        ]
        assert sorted(attempt_logs) == [[], [], [], [(1, 204)], [(1, 400)], [(1, 503)]]
        assert endpoints.find_endpoint(tx, project.id, endpoint.id) == endpoint


def test_stop_claimed_while_its_cancellation_waits_is_cancelled(postgres_database: Database) -> None:
    """A stop that a worker claims while its cancellation waits for the row is cancelled, and not sent again."""
    database = postgres_database
    project = seed_project(database)
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        decision = project.insert_decision(tx)
        project.add_event(tx, event_type=EventType("run.stop_requested"), decision_id=decision.id)

    def cancel() -> int:
        with database.transaction() as tx:
            return outbox.cancel_stop(tx, project.run_id, decision.id, EPOCH, "vetoed")

    with ThreadPoolExecutor(1) as threads:
        with database.transaction() as tx:
            assert len(claim_deliveries(tx, EPOCH, 60, 1)) == 1
            cancelling = threads.submit(cancel)
            wait_for_blocked_process(database)
        assert cancelling.result(30) == 1
    with database.transaction() as tx:
        assert claim_deliveries(tx, EPOCH + timedelta(hours=1), 60, 1) == []


@pytest.mark.parametrize("name", ["settle", "delete", "cancel"])
def test_deliveries_are_locked_in_one_order(postgres_database: Database, name: str) -> None:
    """Batch changes lock deliveries in the order of ids, so they cannot deadlock."""
    database = postgres_database
    project = seed_project(database)
    endpoint = project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        decision = project.insert_decision(tx)
        for number in range(20):
            project.add_event(tx, number, decision_id=decision.id)
        tx.execute(sa.update(events).values(type="run.stop_requested"))  # as if the stop had been requested 20 times
        claimed = sorted(claim_deliveries(tx, EPOCH, 60, 20), key=lambda delivery: delivery.id)
        for number, delivery in enumerate(reversed(claimed)):  # so that no index happens to have the order of the ids
            tx.execute(
                sa.update(delivery_table)
                .where(delivery_table.c.id == delivery.id)
                .values(due_at=EPOCH + timedelta(seconds=number))
            )
    ends = [FinishedAttempt(delivery, Delivered(), EPOCH) for delivery in reversed(claimed)]
    calls: dict[str, Callable[[Transaction], object]] = {
        "settle": partial(leases.settle_deliveries, ended=ends),
        "delete": partial(endpoints.delete_endpoint, project_id=project.id, endpoint_id=endpoint.id, now=EPOCH),
        "cancel": partial(
            outbox.cancel_stop, run_id=project.run_id, decision_id=decision.id, now=EPOCH, reason="vetoed"
        ),
    }

    def run_call() -> None:
        with database.transaction() as tx:
            calls[name](tx)

    def lock_delivery(tx: Transaction, delivery: ClaimedDelivery) -> object:
        return tx.execute(
            sa.select(delivery_table.c.id).where(delivery_table.c.id == delivery.id).with_for_update(nowait=True)
        ).all()

    with ThreadPoolExecutor(1) as threads, database.transaction() as tx:
        lock_delivery(tx, claimed[0])
        blocked_call = threads.submit(run_call)
        wait_for_blocked_process(database)
        lock_delivery(tx, claimed[-1])
        tx.commit()
        blocked_call.result(30)
