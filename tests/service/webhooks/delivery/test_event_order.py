"""One endpoint gets the events of one run in the order in which they were made, however it fails."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.queue import leases
from evalstop_service.store.queue.attempts import Dead, Delivered, Retry
from evalstop_service.webhooks.retry import Backoff
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.projects import EVERY_EVENT
from tests.service.webhooks.delivery.fakes import (
    EPOCH,
    FakeEndpoint,
    Reply,
    SeededProject,
    all_settled,
    claim_deliveries,
    deliver_until,
    seed_project,
    settle_delivery,
)

LATER = EPOCH + timedelta(minutes=1)


def test_later_event_waits_for_the_earlier_one(database: Database, project: SeededProject) -> None:
    """While an event is claimed or between two attempts, the next event of its run waits; other runs' events do not."""
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        first, second = project.add_event(tx, 1), project.add_event(tx, 2)
        other = project.add_event_of_new_run(tx, 3)
        claimed, beside = claim_deliveries(tx, EPOCH, 60, 10)
        assert [claimed.event_id, beside.event_id] == [first, other]
        assert claim_deliveries(tx, EPOCH, 60, 10) == [], "the first event is claimed"
        assert settle_delivery(tx, claimed, Retry(LATER, "HTTP 500"))
        assert claim_deliveries(tx, EPOCH, 60, 10) == [], "the first event waits for its retry"
        (again,) = claim_deliveries(tx, LATER, 60, 1)
        assert again.event_id == first
        assert settle_delivery(tx, again, Delivered())
        assert [delivery.event_id for delivery in claim_deliveries(tx, LATER, 60, 1)] == [second]


def test_dead_delivery_does_not_block_later_events(database: Database, project: SeededProject) -> None:
    """A delivery that is dead does not hold up the events after it."""
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        project.add_event(tx, 1)
        second = project.add_event(tx, 2)
        (claimed,) = claim_deliveries(tx, EPOCH, 60, 10)
        assert settle_delivery(tx, claimed, Dead("HTTP 400"))
        assert [delivery.event_id for delivery in claim_deliveries(tx, EPOCH, 60, 10)] == [second]


def test_stop_overtakes_waiting_events(database: Database, project: SeededProject) -> None:
    """A stop waits for an earlier stop only; events of other types wait for the stop."""
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        notice = project.add_event(tx, 1)
        (claimed,) = claim_deliveries(tx, EPOCH, 60, 10)
        assert settle_delivery(tx, claimed, Retry(LATER, "HTTP 500"))
        stop = project.add_event(tx, 2, event_type="run.stop_requested")
        escalation = project.add_event(tx, 3, event_type="run.stop_escalated")
        stopped = project.add_event(tx, 4, event_type="run.stopped")
        order = []
        for _ in range(4):
            for delivery in claim_deliveries(tx, LATER, 60, 10):
                order.append(delivery.event_id)
                assert settle_delivery(tx, delivery, Delivered())
    assert order.index(stop) < order.index(escalation) < order.index(stopped)
    assert order.index(notice) < order.index(stopped)


def test_veto_window_does_not_block_later_events(database: Database, project: SeededProject) -> None:
    """A stop within its veto window does not hold up later events."""
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        stop = project.add_event(tx, 1, event_type="run.stop_requested", due_at=LATER)
        notice = project.add_event(tx, 2)
        assert [delivery.event_id for delivery in claim_deliveries(tx, EPOCH, 60, 10)] == [notice]
        assert [
            delivery.event_id for delivery in claim_deliveries(tx, LATER, 60, 10) if delivery.event_id != notice
        ] == [stop]


def test_order_is_kept_per_endpoint(database: Database, project: SeededProject) -> None:
    """A failing endpoint does not hold up another endpoint's events."""
    project.add_endpoint(database, "http://fails.example")
    healthy = project.add_endpoint(database, "http://fine.example")
    with database.transaction() as tx:
        project.add_event(tx, 1)
        second = project.add_event(tx, 2)
        for delivery in claim_deliveries(tx, EPOCH, 60, 10):
            settle_delivery(
                tx, delivery, Delivered() if delivery.endpoint_id == healthy.id else Retry(LATER, "HTTP 500")
            )
        assert [(delivery.endpoint_id, delivery.event_id) for delivery in claim_deliveries(tx, EPOCH, 60, 10)] == [
            (healthy.id, second)
        ]


def test_pull_endpoint_gets_events_in_order(database: Database, project: SeededProject) -> None:
    """A pull endpoint is given one event of a run at a time."""
    with database.transaction() as tx:
        endpoint = endpoints.add_endpoint(tx, project.id, url="pull:node", event_types=EVERY_EVENT, now=EPOCH)
        first, second, other = project.add_event(tx, 1), project.add_event(tx, 2), project.add_event_of_new_run(tx, 3)
        claimed = leases.pull_deliveries(tx, endpoint, EPOCH, 60, 10)
        assert [delivery.event_id for delivery in claimed] == [first, other]
        assert not leases.find_endpoints_with_due(tx, [endpoint.id], EPOCH)
        assert leases.settle_pulled(tx, endpoint, claimed[0].id, 1, Delivered(), 200, EPOCH)
        assert leases.find_endpoints_with_due(tx, [endpoint.id], EPOCH) == {endpoint.id}
        assert [delivery.event_id for delivery in leases.pull_deliveries(tx, endpoint, EPOCH, 60, 10)] == [second]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers=st.lists(st.sampled_from([200, 200, 500, 503, 400, 401]), max_size=25), runs=st.integers(1, 3))
def test_order_holds_whatever_the_endpoint_answers(migrated: Database, answers: Sequence[int], runs: int) -> None:
    """Whatever an endpoint answers, each run's events are first tried, and delivered, in their order."""
    project = seed_project(migrated)
    with migrated.transaction() as tx:
        ids = [project.insert_run(tx) for _ in range(runs)]
        numbers_by_run: dict[UUID, list[int]] = {key: [] for key in ids}
        run_of_event = [random.Random(len(answers)).choice(ids) for _ in range(8)]
    with FakeEndpoint(lambda _request, number: Reply(answers[number] if number < len(answers) else 200)) as fake:
        project.add_endpoint(migrated, fake.url)
        with migrated.transaction() as tx:
            for number, run_id in enumerate(run_of_event):
                project.add_event(tx, number, run_id=run_id, data={"number": number, "run": str(run_id)})
                numbers_by_run[run_id].append(number)
        short_backoff = Backoff(first_seconds=0.001, cap_seconds=0.002)
        asyncio.run(deliver_until(all_settled(migrated, project), migrated, backoff=short_backoff))
    for run_id, numbers in numbers_by_run.items():
        payloads = [json.loads(request.body)["data"] for request in fake.received]
        received_numbers = [payload["number"] for payload in payloads if payload["run"] == str(run_id)]
        first_attempts = list(dict.fromkeys(received_numbers))
        assert first_attempts == numbers
        assert received_numbers == sorted(received_numbers), "no event was retried after a later one"


def test_concurrent_claims_keep_the_order(postgres_database: Database) -> None:
    """A second worker skips an event that waits for one the first worker is claiming in an open transaction."""
    project = seed_project(postgres_database)
    project.add_endpoint(postgres_database, "http://x.example")
    with postgres_database.transaction() as tx:
        project.add_event(tx, 1)
        project.add_event(tx, 2)
    with postgres_database.transaction() as first_tx, postgres_database.transaction() as second_tx:
        second_tx.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
        assert len(leases.claim_deliveries(first_tx, EPOCH, 60, 8, 8)) == 1
        assert leases.claim_deliveries(second_tx, EPOCH, 60, 8, 8) == []
