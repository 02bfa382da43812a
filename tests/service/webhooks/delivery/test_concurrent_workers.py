"""Several workers on one outbox: no delivery is claimed twice or early, and none is lost with a worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime, timedelta
from functools import partial
from uuid import UUID

from evalstop_service.clock import Clock, utc_now
from evalstop_service.store.database import Database
from evalstop_service.store.queue import outbox
from evalstop_service.store.queue.outbox import Delivery
from evalstop_service.webhooks.delivery.worker import WorkerLimits

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
    run_worker,
    seed_project,
    wait_until,
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


HOUR = timedelta(hours=1)


def test_worker_clocks_do_not_matter(postgres_database: Database) -> None:
    """A worker whose clock is an hour off claims no leased delivery early and no due one late."""
    database = postgres_database
    project = seed_project(database)
    with FakeEndpoint(Reply(200)) as fake:
        project.add_endpoint(database, fake.url)
        for offset in (HOUR, -HOUR):
            with database.transaction() as tx:
                project.add_event_of_new_run(tx, now=utc_now())
                (claimed,) = claim_deliveries(tx, utc_now(), 600, 1)
                project.add_event_of_new_run(tx, now=utc_now())
            asyncio.run(deliver_one_event(database, partial(read_shifted_clock, offset), fake))
            listed = {delivery.id: delivery for delivery in list_deliveries(database, project)}
            assert (listed[claimed.id].state, listed[claimed.id].attempts) == ("waiting", 1)


def read_shifted_clock(offset: timedelta) -> datetime:
    return utc_now() + offset


async def deliver_one_event(database: Database, clock: Clock, fake: FakeEndpoint) -> None:
    before = len(fake.received)
    limits = WorkerLimits(poll_seconds=0.02)
    async with run_worker(database, timeout_seconds=5, clock=clock, limits=limits) as running:
        await wait_until(lambda: len(fake.received) == before + 1, running)


def list_deliveries(database: Database, project: SeededProject) -> list[Delivery]:
    with database.reading() as tx:
        return project.list_deliveries(tx)
