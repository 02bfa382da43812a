"""What is announced and cancelled in the transaction that causes it, on both databases."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import sqlalchemy as sa
from evalstop_service.rules.event_types import EventType
from evalstop_service.store import endpoints, tables, wakeup
from evalstop_service.store.database import Database
from evalstop_service.store.queue import deliveries, leases, outbox, queues
from evalstop_service.store.queue.attempts import Dead, FinishedAttempt, Retry
from evalstop_service.store.queue.leases import Settlement
from evalstop_service.store.queue.outbox import StopReach

from tests.fixtures.postgres_server import open_connection
from tests.service.webhooks.delivery.fakes import EPOCH, Scene, a_scene, settle, take, utc_now

WHY = "the run went on in a new attempt"


def test_body_is_what_is_signed(database: Database, scene: Scene) -> None:
    """A claim carries the exact text that was written with the event: type, timestamp and data, in ASCII."""
    scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        event = outbox.add_event(
            tx,
            project_id=scene.project_id,
            run_id=scene.run_id,
            type=EventType("run.stopped"),
            data={"né": "\ud800"},
            now=EPOCH,
        )
        claimed = take(tx, EPOCH, 10, 1)
    assert claimed[0].event_id == event
    assert claimed[0].body.isascii()
    assert json.loads(claimed[0].body) == {
        "type": "run.stopped",
        "timestamp": "2026-01-01T00:00:00Z",
        "data": {"né": "\ud800"},
    }


def test_refuses_what_json_cannot_say(database: Database, scene: Scene) -> None:
    """NaN in an event is a mistake of ours and stops the transaction, since no receiver could read it."""
    with pytest.raises(ValueError, match="JSON"), database.transaction() as tx:
        outbox.add_event(
            tx,
            project_id=scene.project_id,
            run_id=scene.run_id,
            type=EventType("run.stopped"),
            data={"x": float("nan")},
            now=EPOCH,
        )


def test_rolls_back_with_its_cause(database: Database, scene: Scene) -> None:
    """An event whose transaction fails was never announced."""
    scene.endpoint(database, "http://x.example")

    def fail() -> None:
        with database.transaction() as tx:
            scene.announce(tx)
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    with database.reading() as tx:
        assert scene.all(tx) == []
        assert queues.find_due_deliveries(tx, EPOCH, 1, 1) == []


def test_goes_to_subscribers(database: Database, scene: Scene) -> None:
    """An event goes to the endpoints of its own project that subscribed to its type and are enabled."""
    all_of_them = scene.endpoint(database, "http://all.example")
    this_one = scene.endpoint(database, "http://this.example", ("run.stopped", "run.suspected"))
    scene.endpoint(database, "http://another.example", ("run.stopped",))
    off = scene.endpoint(database, "http://off.example")
    gone = scene.endpoint(database, "http://gone.example")
    a_scene(database).endpoint(database, "http://stranger.example")
    with database.transaction() as tx:
        endpoints.update_endpoint(tx, scene.project_id, off.id, enabled=False)
        endpoints.delete_endpoint(tx, scene.project_id, gone.id, now=EPOCH)
        scene.announce(tx)
        assert {one.endpoint_id for one in scene.all(tx)} == {all_of_them.id, this_one.id}


def test_a_stop_is_cancelled(database: Database, scene: Scene) -> None:
    """What waits of a decision's stop is cancelled; news of it is not, nor the stop of another decision."""
    scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        first, second = scene.decision(tx, attempt=1), scene.decision(tx, attempt=2)
        stop = scene.announce(tx, 1, type=EventType("run.stop_requested"), decision_id=first.id)
        news = scene.announce(tx, 2, type=EventType("run.stop_failed"), decision_id=first.id)
        present = scene.announce(tx, 3, type=EventType("run.stop_requested"), decision_id=second.id)
        assert outbox.cancel_stop(tx, scene.run_id, first.id, EPOCH, WHY) == 1
        assert outbox.cancel_stop(tx, scene.run_id, first.id, EPOCH, WHY) == 0
        found = {one.event_id: (one.state, one.last_error) for one in scene.all(tx)}
        assert found == {
            stop: ("cancelled", WHY),
            news: ("waiting", None),
            present: ("waiting", None),
        }
        assert {one.event_id for one in take(tx, EPOCH, 10, 10)} == {news, present}


def test_a_stop_asked_for_anew_takes_the_place_of_the_one_before(database: Database, scene: Scene) -> None:
    """Each endpoint has at most one stop of a decision to come, the last one that it wants to hear of."""
    both = scene.endpoint(database, "http://x.example", ("run.stop_requested", "run.stop_escalated"))
    first = scene.endpoint(database, "http://y.example", ("run.stop_requested",))
    with database.transaction() as tx:
        decision = scene.decision(tx)
        for event_type in ("run.stop_requested", "run.stop_requested", "run.stop_escalated"):
            scene.announce(tx, type=event_type, decision_id=decision.id)
        to_come = {(one.endpoint_id, one.event_type) for one in scene.all(tx, state="waiting")}
        assert to_come == {(both.id, "run.stop_escalated"), (first.id, "run.stop_requested")}
        assert len(scene.all(tx, state="cancelled")) == 3


def test_how_far_a_stop_has_come(database: Database, scene: Scene) -> None:
    """A stop that was cancelled untried is addressed to nobody; one that a worker took may have arrived."""
    scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        decision = scene.decision(tx)
        assert outbox.read_stop_reach(tx, scene.run_id, decision.id) == StopReach(addressed=False, tried=False)
        scene.announce(tx, type=EventType("run.stop_requested"), decision_id=decision.id)
        assert outbox.read_stop_reach(tx, scene.run_id, decision.id) == StopReach(addressed=True, tried=False)
        outbox.cancel_stop(tx, scene.run_id, decision.id, EPOCH, WHY)
        assert outbox.read_stop_reach(tx, scene.run_id, decision.id) == StopReach(addressed=False, tried=False)
        scene.announce(tx, type=EventType("run.stop_requested"), decision_id=decision.id)
        take(tx, EPOCH, 60, 1)
        outbox.cancel_stop(tx, scene.run_id, decision.id, EPOCH, WHY)
        assert outbox.read_stop_reach(tx, scene.run_id, decision.id) == StopReach(addressed=True, tried=True)


def test_who_reads_messages_is_no_receiver(database: Database, scene: Scene) -> None:
    """A stop that only a chat was told of is addressed to nobody who could end the job."""
    chat = scene.endpoint(database, "http://chat.example")
    with database.transaction() as tx:
        tx.execute(sa.update(tables.endpoints).where(tables.endpoints.c.id == chat.id).values(format="slack"))
        decision = scene.decision(tx)
        scene.announce(tx, type=EventType("run.stop_requested"), decision_id=decision.id)
        take(tx, EPOCH, 60, 1)
        assert outbox.read_stop_reach(tx, scene.run_id, decision.id) == StopReach(addressed=False, tried=False)


def test_a_stop_under_way_is_cancelled_too(database: Database, scene: Scene) -> None:
    """A stop that a worker holds and has to retry is not retried once it was cancelled."""
    scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        decision = scene.decision(tx)
        scene.announce(tx, type=EventType("run.stop_requested"), decision_id=decision.id)
        (held,) = take(tx, EPOCH, 60, 1)
        assert outbox.cancel_stop(tx, scene.run_id, decision.id, EPOCH, WHY) == 1
        settled = leases.settle_deliveries(tx, [FinishedAttempt(held, Retry(EPOCH, "HTTP 503"), EPOCH)])
        assert settled == Settlement(frozenset(), frozenset({held.id}))
        assert take(tx, EPOCH + timedelta(hours=1), 60, 1) == []


def test_is_due_whatever_the_clock_says(postgres_database: Database) -> None:
    """What is to go out at once is due at once, even if the clock that announced it is ahead of the database's."""
    scene = a_scene(postgres_database)
    scene.endpoint(postgres_database, "http://x.example")
    with postgres_database.transaction() as tx:
        scene.announce(tx, now=utc_now() + timedelta(minutes=10))
    with postgres_database.transaction() as tx:
        assert len(take(tx, queues.read_clock(tx, EPOCH)[0], 60, 1)) == 1


def test_wakes_workers_on_commit(database: Database, scene: Scene) -> None:
    """An event that somebody subscribed to, an endpoint switched on and a retry by hand each wake the workers."""
    woken: list[str] = []
    listening = connected_to(database)
    with wakeup.calling_on_commit(database, lambda: woken.append("rung")), listening as heard:

        def wakes() -> bool:
            woken.extend(heard())
            found = bool(woken)
            woken.clear()
            return found

        with database.transaction() as tx:
            scene.announce(tx)
        assert not wakes(), "nobody subscribed"
        endpoint = scene.endpoint(database, "http://x.example")
        assert not wakes()
        with database.transaction() as tx:
            scene.announce(tx)
            assert not wakes(), "it is not committed"
        assert wakes()
        with database.transaction() as tx:
            endpoints.update_endpoint(tx, scene.project_id, endpoint.id, enabled=True)
        assert wakes()
        with database.transaction() as tx:
            (claimed,) = take(tx, EPOCH, 10, 1)
            settle(tx, claimed, Dead("HTTP 400"))
        assert not wakes()
        with database.transaction() as tx:
            assert deliveries.retry_delivery(tx, scene.project_id, claimed.id, EPOCH)
        assert wakes()


@contextmanager
def connected_to(database: Database) -> Iterator[Callable[[], list[str]]]:
    """Gives the notifications of PostgreSQL that came since it was asked last; none of the embedded database."""
    if database.embedded:
        yield list
        return
    with open_connection(database.url.render_as_string(hide_password=False)) as connection:
        connection.execute(f"LISTEN {wakeup.CHANNEL}".encode())
        yield lambda: [one.channel for one in connection.notifies(timeout=0.2)]
