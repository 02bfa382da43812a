"""Workers are woken by PostgreSQL where it can be heard, by this process on the embedded database, and poll else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial

import pytest
import sqlalchemy as sa
from evalstop_service.store.database import Database
from evalstop_service.store.wakeup import CHANNEL
from evalstop_service.webhooks.delivery.notification_listener import NotificationListener
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.delivery.wakeup import Wakeup
from evalstop_service.webhooks.delivery.worker import DeliveryWorker, WorkerLimits

from tests.fixtures.postgres_server import open_connection
from tests.service.webhooks.delivery.fake_pooler import fake_pooler
from tests.service.webhooks.delivery.fakes import (
    DEADLINE_SECONDS,
    LOOPBACK,
    FakeEndpoint,
    Reply,
    Scene,
    a_scene,
    announce,
    reach,
    utc_now,
)

NEVER = 3600.0
"""Longer than any test: a worker that polls no sooner acts only because it was woken."""


async def working(
    database: Database, limits: WorkerLimits, act: Callable[[asyncio.Task[None]], Awaitable[None]]
) -> None:
    """A worker with these limits, while `act` does what is to be seen."""
    stop = asyncio.Event()
    async with Sender(address_policy=LOOPBACK) as sender:
        worker = DeliveryWorker(database, sender, clock=utc_now, chance=random.Random(1), limits=limits)
        running = asyncio.create_task(worker.run(stop))
        try:
            await act(running)
        finally:
            stop.set()
            await asyncio.wait_for(running, DEADLINE_SECONDS)


def listens(database: Database) -> bool:
    """Whether anybody listens on this database."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN {}'"
    with database.reading() as tx:
        return bool(tx.exec_driver_sql(query.format(CHANNEL)).scalar_one())


def test_is_woken_by_the_commit(database: Database, scene: Scene) -> None:
    """A worker that would not look by itself for an hour sends what is announced, one event after another."""
    with FakeEndpoint(Reply(200)) as fake:
        scene.endpoint(database, fake.url)

        async def act(running: asyncio.Task[None]) -> None:
            if not database.embedded:
                await reach(lambda: listens(database), running)
            for number in range(3):
                await asyncio.to_thread(announce, database, scene)
                await reach(partial(fake.has, number + 1), running)

        asyncio.run(working(database, WorkerLimits(poll_seconds=NEVER, woken_poll_seconds=NEVER), act))


def test_sleeps_until_the_next_is_due(database: Database, scene: Scene) -> None:
    """A worker that would not look by itself for an hour sends what comes due meanwhile, and retries what failed."""
    with FakeEndpoint(lambda _request, number: Reply(503 if number == 0 else 200)) as fake:
        scene.endpoint(database, fake.url)

        async def act(running: asyncio.Task[None]) -> None:
            now = utc_now()
            with database.transaction() as tx:
                scene.announce(tx, now=now, due_at=now + timedelta(seconds=0.4))
            await reach(lambda: len(fake.received) == 2, running)

        asyncio.run(working(database, WorkerLimits(poll_seconds=NEVER, woken_poll_seconds=NEVER), act))


@pytest.mark.parametrize("pooled", [False, True])
def test_polls_where_it_cannot_hear(postgres_database: Database, pooled: bool) -> None:
    """Behind a pooler that swallows notifications the worker finds that out, and polls."""
    database = postgres_database
    scene = a_scene(database)
    url = database.url
    if "host" not in url.query:
        pytest.skip("the fake pooler knows the way to a server on a socket of this machine only")

    def way() -> AbstractContextManager[sa.URL]:
        return fake_pooler(url) if pooled else nullcontext(url)

    with way() as through:
        bell = Wakeup()
        listener = NotificationListener(through, bell.wake, answer_seconds=2.0 if pooled else 20.0)

        async def hears() -> bool:
            listening = asyncio.create_task(listener.run())
            try:
                heard = await bell.wait(5.0 if pooled else 60.0)
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
            return heard

        assert asyncio.run(hears()) is not pooled

    with way() as through, FakeEndpoint(Reply(200)) as fake:
        scene.endpoint(database, fake.url)
        behind = Database(through.render_as_string(hide_password=False))

        async def act(running: asyncio.Task[None]) -> None:
            await asyncio.to_thread(announce, database, scene)
            await reach(lambda: len(fake.received) == 1, running)

        asyncio.run(working(behind, WorkerLimits(poll_seconds=0.1, woken_poll_seconds=NEVER), act))
        behind.close()


def test_listens_again_after_a_cut(postgres_database: Database, postgres_url: str) -> None:
    """When the listening connection is cut the worker makes another, and finds what was announced meanwhile."""
    database = postgres_database
    scene = a_scene(database)

    def cut() -> int:
        with open_connection(postgres_url) as server:
            cursor = server.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = %s AND query = %s",
                (database.url.database, f"LISTEN {CHANNEL}"),
            )
            row = cursor.fetchone()
            assert row is not None
            return int(row[0])

    with FakeEndpoint(Reply(200)) as fake:
        scene.endpoint(database, fake.url)

        async def act(running: asyncio.Task[None]) -> None:
            for number in range(3):
                await reach(lambda: listens(database), running)
                assert cut() == 1
                announce(database, scene)
                await reach(partial(fake.has, number + 1), running)

        asyncio.run(working(database, WorkerLimits(poll_seconds=NEVER, woken_poll_seconds=NEVER), act))
