"""Events of one run reach one endpoint in the order in which they were made, however it fails."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from evalstop_service.store.database import Database
from evalstop_service.store.queue import leases, pull, queues
from evalstop_service.store.queue.attempts import Dead, Delivered, Retry
from evalstop_service.webhooks.retry import Backoff
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.webhooks.delivery.fakes import (
    EPOCH,
    FakeEndpoint,
    Reply,
    Scene,
    a_scene,
    deliver_until,
    settle,
    settled,
    take,
)

LATER = EPOCH + timedelta(minutes=1)


def test_a_later_event_waits_for_an_earlier_one(database: Database, scene: Scene) -> None:
    """While one is in a worker's hands or between two attempts, the next of its run waits, and no other run's."""
    scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        first, second = scene.announce(tx, 1), scene.announce(tx, 2)
        other = scene.apart(tx, 3)
        held, beside = take(tx, EPOCH, 60, 10)
        assert [held.event_id, beside.event_id] == [first, other]
        assert take(tx, EPOCH, 60, 10) == [], "the first is in a worker's hands"
        assert settle(tx, held, Retry(LATER, "HTTP 500"))
        assert take(tx, EPOCH, 60, 10) == [], "the first is tried again later"
        assert queues.find_next_due(tx, EPOCH) == min(LATER, beside.lease_until)
        (again,) = take(tx, LATER, 60, 1)
        assert again.event_id == first
        assert settle(tx, again, Delivered())
        assert [one.event_id for one in take(tx, LATER, 60, 1)] == [second]


def test_what_is_given_up_holds_up_nothing(database: Database, scene: Scene) -> None:
    """A dead or cancelled delivery does not stand in the way of what comes after it."""
    scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        scene.announce(tx, 1)
        second = scene.announce(tx, 2)
        (held,) = take(tx, EPOCH, 60, 10)
        assert settle(tx, held, Dead("HTTP 400"))
        assert [one.event_id for one in take(tx, EPOCH, 60, 10)] == [second]


def test_what_is_urgent_overtakes_news(database: Database, scene: Scene) -> None:
    """A stop waits for no news, but for a stop before it; news wait for the stop."""
    scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        news = scene.announce(tx, 1)
        (held,) = take(tx, EPOCH, 60, 10)
        assert settle(tx, held, Retry(LATER, "HTTP 500"))
        stop = scene.announce(tx, 2, type="run.stop_requested")
        harder = scene.announce(tx, 3, type="run.stop_escalated")
        stopped = scene.announce(tx, 4, type="run.stopped")
        order = []
        for _ in range(4):
            for one in take(tx, LATER, 60, 10):
                order.append(one.event_id)
                assert settle(tx, one, Delivered())
    assert order.index(stop) < order.index(harder) < order.index(stopped)
    assert order.index(news) < order.index(stopped)


def test_a_grace_period_holds_up_nothing(database: Database, scene: Scene) -> None:
    """What waits for the end of its veto window was not handed out yet, and lets news pass."""
    scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        stop = scene.announce(tx, 1, type="run.stop_requested", due_at=LATER)
        news = scene.announce(tx, 2)
        assert [one.event_id for one in take(tx, EPOCH, 60, 10)] == [news]
        assert [one.event_id for one in take(tx, LATER, 60, 10) if one.event_id != news] == [stop]


def test_each_endpoint_has_an_order_of_its_own(database: Database, scene: Scene) -> None:
    """What one endpoint does not take is not waited for by another."""
    scene.endpoint(database, "http://fails.example")
    fine = scene.endpoint(database, "http://fine.example")
    with database.transaction() as tx:
        scene.announce(tx, 1)
        second = scene.announce(tx, 2)
        for one in take(tx, EPOCH, 60, 10):
            settle(tx, one, Delivered() if one.endpoint_id == fine.id else Retry(LATER, "HTTP 500"))
        assert [(one.endpoint_id, one.event_id) for one in take(tx, EPOCH, 60, 10)] == [(fine.id, second)]


def test_what_is_fetched_comes_in_order_too(database: Database, scene: Scene) -> None:
    """A pull endpoint is given one event of a run at a time."""
    with database.transaction() as tx:
        endpoint = pull.add_pull_endpoint(tx, scene.project_id, name="node", event_types=EVERY_EVENT, now=EPOCH)
        first, second, other = scene.announce(tx, 1), scene.announce(tx, 2), scene.apart(tx, 3)
        claimed = pull.claim_deliveries(tx, endpoint, EPOCH, 60, 10)
        assert [one.event_id for one in claimed] == [first, other]
        assert not pull.is_any_due(tx, endpoint.id, EPOCH)
        assert pull.settle_delivery(tx, endpoint, claimed[0].id, 1, Delivered(), 200, EPOCH)
        assert pull.is_any_due(tx, endpoint.id, EPOCH)
        assert [one.event_id for one in pull.claim_deliveries(tx, endpoint, EPOCH, 60, 10)] == [second]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers=st.lists(st.sampled_from([200, 200, 500, 503, 400, 401]), max_size=25), runs=st.integers(1, 3))
def test_order_survives_an_endpoint_that_fails(migrated: Database, answers: Sequence[int], runs: int) -> None:
    """Whatever an endpoint answers, the events of each run are first tried, and are taken, in their order."""
    scene = a_scene(migrated)
    with migrated.transaction() as tx:
        ids = [scene.another_run(tx) for _ in range(runs)]
        made: dict[UUID, list[int]] = {key: [] for key in ids}
        scripted = [random.Random(len(answers)).choice(ids) for _ in range(8)]
    with FakeEndpoint(lambda _request, number: Reply(answers[number] if number < len(answers) else 200)) as fake:
        scene.endpoint(migrated, fake.url)
        with migrated.transaction() as tx:
            for number, run_id in enumerate(scripted):
                scene.announce(tx, number, run_id=run_id, data={"number": number, "run": str(run_id)})
                made[run_id].append(number)
        patient = Backoff(first_seconds=0.001, cap_seconds=0.002)
        asyncio.run(deliver_until(settled(migrated, scene), migrated, backoff=patient))
    for run_id, numbers in made.items():
        told = [json.loads(one.body)["data"] for one in fake.received]
        seen = [one["number"] for one in told if one["run"] == str(run_id)]
        firsts = list(dict.fromkeys(seen))
        assert firsts == numbers
        assert seen == sorted(seen), "none was tried again after a later one"


def test_two_workers_at_once_keep_the_order(postgres_database: Database) -> None:
    """A second worker passes over what waits for a delivery that the first is just taking."""
    scene = a_scene(postgres_database)
    scene.endpoint(postgres_database, "http://x.example")
    with postgres_database.transaction() as tx:
        scene.announce(tx, 1)
        scene.announce(tx, 2)
    with postgres_database.transaction() as one, postgres_database.transaction() as other:
        other.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
        assert len(leases.claim_deliveries(one, EPOCH, 60, 8, 8)) == 1
        assert leases.claim_deliveries(other, EPOCH, 60, 8, 8) == []
