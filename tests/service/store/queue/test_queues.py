"""What is due, endpoint by endpoint, and at what price; on both databases."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.queue import queues
from evalstop_service.store.queue.attempts import Delivered, Retry
from evalstop_service.store.tables import deliveries, events, runs

from tests.service.webhooks.delivery.fakes import EPOCH, Scene, a_scene, settle, take


def test_one_endpoint_leaves_room(database: Database, scene: Scene) -> None:
    """An endpoint with a long queue gets its share and no more, less what is under way to it already."""
    busy = scene.endpoint(database, "http://busy.example", ("run.suspected",))
    with database.transaction() as tx:
        for number in range(10):
            scene.apart(tx, number)
    quiet = scene.endpoint(database, "http://quiet.example")
    with database.transaction() as tx:
        scene.announce(tx, 10, now=EPOCH + timedelta(seconds=1))
        now = EPOCH + timedelta(seconds=2)
        first = take(tx, now, 60, 8, per_endpoint=3)
        second = take(tx, now, 60, 8, per_endpoint=3, room={busy.id: 0})
        third = take(tx, now, 60, 8, per_endpoint=3, room={busy.id: 1})
    assert [one.endpoint_id for one in first] == [busy.id, busy.id, busy.id, quiet.id]
    assert second == []
    assert [one.endpoint_id for one in third] == [busy.id]


def test_costs_the_same_however_much_waits(database: Database, scene: Scene) -> None:
    """A look into the outbox, and at what comes due next, reads no more with 5,000 deliveries waiting than with 50."""
    fill(database, scene, 50, endpoints=3)
    few = cost_of_a_look(database)
    fill(database, scene, 5_000, endpoints=0)
    many = cost_of_a_look(database)
    assert many < 2 * few, (few, many)


def fill(database: Database, scene: Scene, count: int, endpoints: int) -> None:
    """Deliveries that wait in three queues, a third of them for later, beside as many that were delivered."""
    for number in range(endpoints):
        scene.endpoint(database, f"http://{number}.example")
    with database.transaction() as tx:
        event = scene.announce(tx)
        template = tx.execute(sa.select(deliveries).where(deliveries.c.event_id == event)).mappings().all()
        made = [scene.run_row() for _ in range(count)]
        event_rows = [
            {"run_id": run["id"], "id": new_id(), "project_id": scene.project_id, "type": "x", "body": ""}
            for run in made
        ]
        rows = []
        for number, row_of_event in enumerate(event_rows):
            due_at = EPOCH + timedelta(days=2 if number // 3 % 3 == 0 else 0, seconds=number)
            of_event = {"run_id": row_of_event["run_id"], "event_id": row_of_event["id"]}
            row = dict(template[number % 3]) | of_event | {"id": new_id(), "due_at": due_at}
            rows += [row, row | {"id": new_id(), "state": "delivered"}]
        tx.execute(sa.insert(runs), made)
        tx.execute(sa.insert(events).values(created_at=EPOCH), event_rows)
        tx.execute(sa.insert(deliveries), rows)
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE deliveries")


def cost_of_a_look(database: Database) -> int:
    """What a look and a claim of nothing read: pages on PostgreSQL, steps of its machine on SQLite."""
    asked: list[tuple[str, Any]] = []

    def keep(_c: object, _cursor: object, statement: str, parameters: Any, _context: object, _many: bool) -> None:
        asked.append((statement, parameters))

    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    now = EPOCH + timedelta(days=1)
    with database.transaction() as tx:
        if database.embedded:
            tx.connection.driver_connection.set_progress_handler(count, 1)  # type: ignore[union-attr]
        sa.event.listen(database.engine, "before_cursor_execute", keep)
        assert len(queues.find_due_deliveries(tx, now, 6, 2)) == 6
        assert queues.find_next_due(tx, now) is not None
        sa.event.remove(database.engine, "before_cursor_execute", keep)
        if database.embedded:
            tx.connection.driver_connection.set_progress_handler(None, 1)  # type: ignore[union-attr]
            return steps
        plans = [
            tx.exec_driver_sql("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement, parameters).scalar_one()[0]
            for statement, parameters in asked
        ]
        return sum(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] for plan in plans)


def test_tells_what_comes_due_next(database: Database, scene: Scene) -> None:
    """The next due time is that of a delivery to come or of a veto window, and none of an endpoint switched off."""
    first = scene.endpoint(database, "http://first.example")
    with database.transaction() as tx:
        assert queues.find_next_due(tx, EPOCH) is None
        scene.announce(tx)
        assert queues.find_next_due(tx, EPOCH) is None, "what is due is not to come"
        for minutes in (3, 1, 2):
            scene.announce(tx, due_at=EPOCH + timedelta(minutes=minutes))
        assert queues.find_next_due(tx, EPOCH) == EPOCH + timedelta(minutes=1)
        assert queues.find_next_due(tx, EPOCH + timedelta(minutes=1)) == EPOCH + timedelta(minutes=2)
        endpoints.update_endpoint(tx, scene.project_id, first.id, enabled=False)
        assert queues.find_next_due(tx, EPOCH) is None
        decision = scene.decision(tx, due_at=EPOCH + timedelta(minutes=5))
        assert queues.find_next_due(tx, EPOCH) == decision.due_at


def test_finds_what_the_clock_left_behind(database: Database, scene: Scene) -> None:
    """Once the clock is an hour back, what was never tried and what waits longer than any pause are found."""
    scene.endpoint(database, "http://x.example")
    later = EPOCH + timedelta(hours=1)
    with database.transaction() as tx:
        scene.apart(tx, now=later)
        (leased,) = take(tx, later, 60, 1)
        scene.apart(tx, now=later)
        (retried,) = take(tx, later, 60, 1)
        assert settle(tx, retried, Retry(later + timedelta(seconds=2), "HTTP 500"))
        scene.apart(tx, now=later)
        scene.apart(tx, now=EPOCH, due_at=later + timedelta(minutes=5))  # in grace: a promise to people
        (untried,) = (one for one in scene.all(tx) if not one.attempts and one.due_at == later)
        assert queues.find_misdated(tx, later, 900) == set()
        found = queues.find_misdated(tx, EPOCH, 900)
        assert {one.id for one in found} == {leased.id, retried.id, untried.id}
        queues.make_due(tx, found, EPOCH)
        assert {one.id for one in queues.find_due_deliveries(tx, EPOCH, 10, 10)} == {leased.id, retried.id, untried.id}


def test_hastens_only_what_is_as_found(database: Database, scene: Scene) -> None:
    """What was claimed or settled since it was found is left alone."""
    scene.endpoint(database, "http://x.example")
    later = EPOCH + timedelta(hours=1)
    with database.transaction() as tx:
        scene.announce(tx, now=later)
        found = queues.find_misdated(tx, EPOCH, 900)
        assert len(found) == 1
        (claimed,) = take(tx, later, 60, 1)
        queues.make_due(tx, found, EPOCH)
        assert queues.find_due_deliveries(tx, later, 1, 1) == []
        assert settle(tx, claimed, Delivered())
        queues.make_due(tx, queues.find_misdated(tx, EPOCH, 900) | found, EPOCH)
        assert scene.all(tx)[0].state == "delivered"


def test_passes_over_what_another_holds(postgres_database: Database) -> None:
    """Workers that look at the same time find different deliveries, without waiting for each other."""
    database = postgres_database
    scene = a_scene(database)
    scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        for number in range(6):
            scene.apart(tx, number)
    with database.transaction() as one, database.transaction() as other:
        other.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
        first, second = queues.find_due_deliveries(one, EPOCH, 4, 4), queues.find_due_deliveries(other, EPOCH, 4, 4)
    assert (len(first), len(second)) == (4, 2)
    assert {item.id for item in first}.isdisjoint(item.id for item in second)
