"""Which deliveries are due, per endpoint, what finding them costs, and how they are listed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_service.errors import NotFound
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.queue import leases, outbox
from evalstop_service.store.queue.attempts import Dead
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
