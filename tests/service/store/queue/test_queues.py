"""The outbox: events are added and cancelled with what causes them; which deliveries are due, and at what cost."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.domain.event_types import EventType
from evalstop_service.errors import NotFound
from evalstop_service.store import endpoints, tables
from evalstop_service.store.database import Database, read_now
from evalstop_service.store.ids import new_id
from evalstop_service.store.queue import leases, outbox
from evalstop_service.store.queue.attempts import Dead
from evalstop_service.store.queue.outbox import StopReach
from evalstop_service.store.tables import deliveries, events, runs

from tests.service.webhooks.delivery.fakes import EPOCH, SeededProject, claim_deliveries, seed_project, settle_delivery


def test_claims_are_limited_per_endpoint(database: Database, project: SeededProject) -> None:
    """An endpoint with a long queue gets its limit, and nothing while it is busy, which leaves room for others."""
    busy = project.add_endpoint(database, "http://busy.example", ("run.suspected",))
    with database.transaction() as tx:
        for number in range(10):
            project.add_event_of_new_run(tx, number)
    quiet = project.add_endpoint(database, "http://quiet.example")
    with database.transaction() as tx:
        project.add_event(tx, 10, now=EPOCH + timedelta(seconds=1))
        now = EPOCH + timedelta(seconds=2)
        first = claim_deliveries(tx, now, 60, 8, per_endpoint=3)
        second = claim_deliveries(tx, now, 60, 8, per_endpoint=3, busy=[busy.id])
        third = claim_deliveries(tx, now, 60, 8, per_endpoint=1)
    assert [delivery.endpoint_id for delivery in first] == [busy.id, busy.id, busy.id, quiet.id]
    assert second == []
    assert [delivery.endpoint_id for delivery in third] == [busy.id]


def test_cost_does_not_grow_with_waiting_deliveries(database: Database, project: SeededProject) -> None:
    """Finding due deliveries, and the next due time, reads no more with 5,000 waiting than with 50."""
    insert_waiting_deliveries(database, project, 50, endpoints=3)
    cost_of_50 = measure_cost(database)
    insert_waiting_deliveries(database, project, 5_000, endpoints=0)
    cost_of_5000 = measure_cost(database)
    assert cost_of_5000 < 2 * cost_of_50, (cost_of_50, cost_of_5000)


def insert_waiting_deliveries(database: Database, project: SeededProject, count: int, endpoints: int) -> None:
    """Insert waiting deliveries in three queues, a third due later, and as many delivered ones."""
    for number in range(endpoints):
        project.add_endpoint(database, f"http://{number}.example")
    with database.transaction() as tx:
        event = project.add_event(tx)
        template = tx.execute(sa.select(deliveries).where(deliveries.c.event_id == event)).mappings().all()
        run_rows = [project.build_run_row() for _ in range(count)]
        event_rows = [
            {"run_id": run["id"], "id": new_id(), "project_id": project.id, "type": "x", "body": ""} for run in run_rows
        ]
        rows = []
        for number, row_of_event in enumerate(event_rows):
            due_at = EPOCH + timedelta(days=2 if number // 3 % 3 == 0 else 0, seconds=number)
            of_event = {"run_id": row_of_event["run_id"], "event_id": row_of_event["id"]}
            row = dict(template[number % 3]) | of_event | {"id": new_id(), "due_at": due_at}
            rows += [row, row | {"id": new_id(), "state": "delivered"}]
        tx.execute(sa.insert(runs), run_rows)
        tx.execute(sa.insert(events).values(created_at=EPOCH), event_rows)
        tx.execute(sa.insert(deliveries), rows)
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE deliveries")


def measure_cost(database: Database) -> int:
    """Count what two queries read: buffer pages on PostgreSQL, virtual machine steps on SQLite."""
    statements: list[tuple[str, Any]] = []

    def record_statement(
        _c: object, _cursor: object, statement: str, parameters: Any, _context: object, _many: bool
    ) -> None:
        statements.append((statement, parameters))

    steps = 0

    def count_step() -> int:
        nonlocal steps
        steps += 1
        return 0

    now = EPOCH + timedelta(days=1)
    with database.transaction() as tx:
        if database.embedded:
            tx.connection.driver_connection.set_progress_handler(count_step, 1)  # type: ignore[union-attr]
        sa.event.listen(database.engine, "before_cursor_execute", record_statement)
        assert len(leases.find_due_deliveries(tx, now, 6, 2)) == 6
        sa.event.remove(database.engine, "before_cursor_execute", record_statement)
        if database.embedded:
            tx.connection.driver_connection.set_progress_handler(None, 1)  # type: ignore[union-attr]
            return steps
        plans = [
            tx.exec_driver_sql("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement, parameters).scalar_one()[0]
            for statement, parameters in statements
        ]
        return sum(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] for plan in plans)


def test_claiming_skips_locked_deliveries(postgres_database: Database) -> None:
    """Workers that look at the same time find different deliveries, without waiting for each other."""
    database = postgres_database
    project = seed_project(database)
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        for number in range(6):
            project.add_event_of_new_run(tx, number)
    with database.transaction() as first_tx, database.transaction() as second_tx:
        second_tx.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
        first = leases.find_due_deliveries(first_tx, EPOCH, 4, 4)
        second = leases.find_due_deliveries(second_tx, EPOCH, 4, 4)
    assert (len(first), len(second)) == (4, 2)
    assert {item.id for item in first}.isdisjoint(item.id for item in second)


def test_deliveries_are_listed_by_page(database: Database, project: SeededProject) -> None:
    """Deliveries of the project are listed newest first, by page, each once, and by filter."""
    endpoint = project.add_endpoint(database, "http://x.example")
    other_project = seed_project(database)
    other_project.add_endpoint(database, "http://stranger.example")
    with database.transaction() as tx:
        for number in range(7):
            project.add_event(tx, number)
            other_project.add_event(tx, number)
        claimed = claim_deliveries(tx, EPOCH, 10, 100)
        dead = next(delivery for delivery in claimed if delivery.endpoint_id == endpoint.id)
        settle_delivery(tx, dead, Dead("HTTP 400: no"), EPOCH, duration_ms=3.5, status_code=400)
    pages: list[UUID] = []
    with database.reading() as tx:
        before = None
        while page := outbox.list_deliveries(tx, project.id, before=before, limit=3):
            pages += [delivery.id for delivery in page]
            before = pages[-1]
        assert [delivery.id for delivery in project.list_deliveries(tx)] == pages == sorted(pages, reverse=True)
        assert len(pages) == 7
        dead_deliveries = project.list_deliveries(tx, state="dead", endpoint_id=endpoint.id)
        assert [delivery.id for delivery in dead_deliveries] == [dead.id]
        assert project.list_deliveries(tx, endpoint_id=new_id()) == []
        with pytest.raises(NotFound):
            outbox.load_delivery(tx, other_project.id, dead.id)
        assert [
            (a.number, a.status_code, a.error, a.duration_ms) for a in outbox.list_attempts(tx, dead_deliveries[0])
        ] == [(1, 400, "HTTP 400: no", 3.5)]


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
