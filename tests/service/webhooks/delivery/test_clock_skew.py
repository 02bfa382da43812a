"""Workers go by the database's clock, whatever theirs shows."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from functools import partial

from evalstop_service.clock import Clock, utc_now
from evalstop_service.store.database import Database
from evalstop_service.store.queue.outbox import Delivery
from evalstop_service.webhooks.delivery.worker import WorkerLimits

from tests.service.webhooks.delivery.fakes import (
    FakeEndpoint,
    Reply,
    SeededProject,
    claim_deliveries,
    run_worker,
    seed_project,
    wait_until,
)

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
