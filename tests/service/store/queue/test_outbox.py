"""The outbox: events and their deliveries are added and cancelled in the transaction that causes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.domain.event_types import EventType
from evalstop_service.store import endpoints, tables
from evalstop_service.store.database import WAKEUP_CHANNEL, Database, read_now, wake_workers
from evalstop_service.store.queue import deliveries, outbox
from evalstop_service.store.queue.attempts import Dead
from evalstop_service.store.queue.outbox import StopReach

from tests.fixtures.postgres_server import open_connection
from tests.service.webhooks.delivery.fakes import (
    EPOCH,
    SeededProject,
    claim_deliveries,
    seed_project,
    settle_delivery,
)

REASON = "the run went on in a new attempt"


def test_claim_carries_the_stored_body(database: Database, project: SeededProject) -> None:
    """A claim carries the exact text stored with the event: type, timestamp and data, in ASCII."""
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        event = outbox.add_event(
            tx,
            project_id=project.id,
            run_id=project.run_id,
            event_type=EventType("run.stopped"),
            data={"né": "\ud800"},
            now=EPOCH,
        )
        claimed = claim_deliveries(tx, EPOCH, 10, 1)
    assert claimed[0].event_id == event
    assert claimed[0].body.isascii()
    assert json.loads(claimed[0].body) == {
        "type": "run.stopped",
        "timestamp": "2026-01-01T00:00:00Z",
        "data": {"né": "\ud800"},
    }


def test_nan_in_an_event_is_refused(database: Database, project: SeededProject) -> None:
    """NaN in an event raises an error and aborts the transaction: JSON has no NaN."""
    with pytest.raises(ValueError, match="JSON"), database.transaction() as tx:
        outbox.add_event(
            tx,
            project_id=project.id,
            run_id=project.run_id,
            event_type=EventType("run.stopped"),
            data={"x": float("nan")},
            now=EPOCH,
        )


def test_event_goes_to_subscribed_endpoints(database: Database, project: SeededProject) -> None:
    """An event goes to the project's enabled endpoints that subscribe to its type."""
    all_types = project.add_endpoint(database, "http://all.example")
    two_types = project.add_endpoint(database, "http://this.example", ("run.stopped", "run.suspected"))
    project.add_endpoint(database, "http://another.example", ("run.stopped",))
    disabled = project.add_endpoint(database, "http://off.example")
    deleted = project.add_endpoint(database, "http://gone.example")
    seed_project(database).add_endpoint(database, "http://stranger.example")
    with database.transaction() as tx:
        endpoints.update_endpoint(tx, project.id, disabled.id, enabled=False)
        endpoints.delete_endpoint(tx, project.id, deleted.id, now=EPOCH)
        project.add_event(tx)
        assert {delivery.endpoint_id for delivery in project.list_deliveries(tx)} == {all_types.id, two_types.id}


def test_cancelling_a_stop_cancels_only_its_deliveries(database: Database, project: SeededProject) -> None:
    """Cancelling cancels a decision's waiting stop requests, not its other events nor another decision's stop."""
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        first, second = project.insert_decision(tx, attempt=1), project.insert_decision(tx, attempt=2)
        stop = project.add_event(tx, 1, event_type=EventType("run.stop_requested"), decision_id=first.id)
        failure_event = project.add_event(tx, 2, event_type=EventType("run.stop_failed"), decision_id=first.id)
        other_stop = project.add_event(tx, 3, event_type=EventType("run.stop_requested"), decision_id=second.id)
        assert outbox.cancel_stop(tx, project.run_id, first.id, EPOCH, REASON) == 1
        assert outbox.cancel_stop(tx, project.run_id, first.id, EPOCH, REASON) == 0
        results = {delivery.event_id: (delivery.state, delivery.last_error) for delivery in project.list_deliveries(tx)}
        assert results == {
            stop: ("cancelled", REASON),
            failure_event: ("waiting", None),
            other_stop: ("waiting", None),
        }
        assert {delivery.event_id for delivery in claim_deliveries(tx, EPOCH, 10, 10)} == {failure_event, other_stop}


def test_new_stop_request_replaces_the_previous(database: Database, project: SeededProject) -> None:
    """Each endpoint has at most one waiting stop of a decision: the last type that it subscribes to."""
    both_types = project.add_endpoint(database, "http://x.example", ("run.stop_requested", "run.stop_escalated"))
    requests_only = project.add_endpoint(database, "http://y.example", ("run.stop_requested",))
    with database.transaction() as tx:
        decision = project.insert_decision(tx)
        for event_type in ("run.stop_requested", "run.stop_requested", "run.stop_escalated"):
            project.add_event(tx, event_type=event_type, decision_id=decision.id)
        waiting = {
            (delivery.endpoint_id, delivery.event_type) for delivery in project.list_deliveries(tx, state="waiting")
        }
        assert waiting == {(both_types.id, "run.stop_escalated"), (requests_only.id, "run.stop_requested")}
        assert len(project.list_deliveries(tx, state="cancelled")) == 3


def test_stop_reach_follows_the_delivery(database: Database, project: SeededProject) -> None:
    """A stop cancelled before its first attempt reached nobody; one that a worker claimed may have arrived."""
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        decision = project.insert_decision(tx)
        assert outbox.read_stop_reach(tx, project.run_id, decision.id) == StopReach(addressed=False, tried=False)
        project.add_event(tx, event_type=EventType("run.stop_on_hold"), decision_id=decision.id)
        assert outbox.read_stop_reach(tx, project.run_id, decision.id) == StopReach(addressed=False, tried=False)
        project.add_event(tx, event_type=EventType("run.stop_requested"), decision_id=decision.id)
        assert outbox.read_stop_reach(tx, project.run_id, decision.id) == StopReach(addressed=True, tried=False)
        outbox.cancel_stop(tx, project.run_id, decision.id, EPOCH, REASON)
        assert outbox.read_stop_reach(tx, project.run_id, decision.id) == StopReach(addressed=False, tried=False)
        project.add_event(tx, event_type=EventType("run.stop_requested"), decision_id=decision.id)
        claim_deliveries(tx, EPOCH, 60, 2)
        outbox.cancel_stop(tx, project.run_id, decision.id, EPOCH, REASON)
        assert outbox.read_stop_reach(tx, project.run_id, decision.id) == StopReach(addressed=True, tried=True)


def test_chat_endpoint_is_no_receiver(database: Database, project: SeededProject) -> None:
    """A stop sent only to a chat channel is addressed to no receiver that could end the job."""
    chat = project.add_endpoint(database, "http://chat.example")
    with database.transaction() as tx:
        tx.execute(sa.update(tables.endpoints).where(tables.endpoints.c.id == chat.id).values(format="slack"))
        decision = project.insert_decision(tx)
        project.add_event(tx, event_type=EventType("run.stop_requested"), decision_id=decision.id)
        claim_deliveries(tx, EPOCH, 60, 1)
        assert outbox.read_stop_reach(tx, project.run_id, decision.id) == StopReach(addressed=False, tried=False)


def test_event_is_due_despite_clock_skew(postgres_database: Database) -> None:
    """An event without a delay is due at once, even if the writer's clock is ahead of the database's; no other is."""
    project = seed_project(postgres_database)
    project.add_endpoint(postgres_database, "http://x.example")
    with postgres_database.transaction() as tx:
        project.add_event(tx, now=utc_now() + timedelta(minutes=10))
        project.add_event_of_new_run(tx, now=utc_now(), due_at=utc_now() + timedelta(minutes=10))
    with postgres_database.transaction() as tx:
        assert len(claim_deliveries(tx, read_now(tx, utc_now), 60, 2)) == 1


def test_a_worker_may_end_while_a_connection_returns(embedded_database: Database) -> None:
    """A worker that ends while a connection returns to the pool does not keep it from returning."""
    with ExitStack() as worker:
        worker.enter_context(embedded_database.calling_on_commit(worker.close))
        with embedded_database.transaction() as tx:
            wake_workers(tx)
    pool = embedded_database.engine.pool
    assert isinstance(pool, sa.QueuePool)
    assert pool.checkedout() == 0


def test_commit_wakes_the_workers(database: Database, project: SeededProject) -> None:
    """A subscribed event, an enabled endpoint and a manual retry each wake the workers on commit."""
    database.close()  # its connections may still carry earlier tests' marks, which nobody took
    wakeups: list[str] = []
    with (
        database.calling_on_commit(lambda: wakeups.append("called")),
        listen_for_wakeups(database) as read_notifications,
    ):

        def has_woken() -> bool:
            wakeups.extend(read_notifications())
            was_woken = bool(wakeups)
            wakeups.clear()
            return was_woken

        with database.transaction() as tx:
            project.add_event(tx)
        assert not has_woken(), "no endpoint subscribes"
        endpoint = project.add_endpoint(database, "http://x.example")
        assert not has_woken()
        with database.transaction() as tx:
            project.add_event(tx)
            assert not has_woken(), "not committed yet"
        assert has_woken()
        with database.transaction() as tx:
            endpoints.update_endpoint(tx, project.id, endpoint.id, enabled=True)
        assert has_woken()
        with database.transaction() as tx:
            (claimed,) = claim_deliveries(tx, EPOCH, 10, 1)
            settle_delivery(tx, claimed, Dead("HTTP 400"))
        assert not has_woken()
        with database.transaction() as tx:
            assert deliveries.retry_delivery(tx, project.id, claimed.id, EPOCH)
        assert has_woken()


LAST = "last"
"""The payload of the test's own notification."""


@contextmanager
def listen_for_wakeups(database: Database) -> Iterator[Callable[[], list[str]]]:
    """Yield a function that returns the PostgreSQL notifications since its last call; always none on SQLite."""
    if database.embedded:
        yield list
        return
    with open_connection(database.url.render_as_string(hide_password=False)) as connection:
        payloads: list[str] = []
        connection.add_notify_handler(lambda notification: payloads.append(notification.payload))
        connection.execute(f"LISTEN {WAKEUP_CHANNEL}".encode())

        def read_notifications() -> list[str]:
            # They arrive in the order of the commits, hence all earlier ones before this one.
            connection.execute(f"NOTIFY {WAKEUP_CHANNEL}, '{LAST}'".encode())
            while LAST not in payloads:
                connection.execute("SELECT 1")
            earlier = payloads[: payloads.index(LAST)]
            payloads.clear()
            return earlier

        yield read_notifications
