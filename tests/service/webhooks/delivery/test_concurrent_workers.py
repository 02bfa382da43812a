"""Several workers on one outbox: no delivery is claimed twice, and none is lost with a worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from uuid import UUID

from evalstop_service.store.database import Database
from evalstop_service.store.queue import outbox

from tests.service.concurrency import run_concurrently
from tests.service.webhooks.delivery.fakes import (
    EPOCH,
    FakeEndpoint,
    Reply,
    SeededProject,
    all_settled,
    announce_events,
    claim_deliveries,
    count_deliveries_by_state,
    deliver_until,
)
from tests.service.webhooks.delivery.killable_workers import run_worker_processes


def test_attempt_of_a_killed_worker_is_repeated(database: Database, database_url: str, project: SeededProject) -> None:
    """What a worker was sending when it was killed is sent again by another, under the same id."""
    with FakeEndpoint(Reply()) as fake:
        fake.behavior = lambda _request, number: Reply(200, after=fake.released if number == 0 else None)
        project.add_endpoint(database, fake.url)
        announce_events(database, project)
        with run_worker_processes(database_url, 1, lease_seconds=3.0) as workers:
            workers.wait_for(lambda: len(fake.received) == 1)
        asyncio.run(deliver_until(all_settled(database, project), database))
        with database.reading() as tx:
            (delivery,) = project.list_deliveries(tx)
            attempts = outbox.list_attempts(tx, delivery)
    assert (delivery.state, delivery.attempts) == ("delivered", 2)
    assert [attempt.number for attempt in attempts] == [2], "only the second attempt was recorded"
    assert len(fake.received) == 2
    assert len(set(fake.webhook_ids())) == 1


def test_two_workers_deliver_each_event_once(database: Database, project: SeededProject) -> None:
    """Two workers on one outbox deliver everything, and no event twice while leases hold."""
    with FakeEndpoint(Reply(200)) as fake:
        project.add_endpoint(database, fake.url)
        announce_events(database, project, 60)

        async def run_both_workers() -> None:
            await asyncio.gather(*(deliver_until(all_settled(database, project), database) for _ in range(2)))

        asyncio.run(run_both_workers())
    assert len(fake.received) == 60
    assert set(Counter(fake.webhook_ids()).values()) == {1}
    assert count_deliveries_by_state(database, project) == {"delivered": 60}


def test_claims_are_disjoint(database: Database, project: SeededProject) -> None:
    """Workers that claim at the same time never claim the same delivery."""
    project.add_endpoint(database, "http://x.example")
    announce_events(database, project, 120)
    claimed: list[UUID] = []

    def claim() -> None:
        for _ in range(10):
            with database.transaction() as tx:
                batch = claim_deliveries(tx, EPOCH, 60, 4, per_endpoint=16)
            claimed.extend(delivery.id for delivery in batch)

    assert run_concurrently(*[claim] * 4) == []
    assert claimed
    assert len(claimed) == len(set(claimed))
