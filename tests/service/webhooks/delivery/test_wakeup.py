"""Workers are woken by PostgreSQL notifications or within the process, and poll where neither works."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial

import pytest
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.store.database import WAKEUP_CHANNEL, Database
from evalstop_service.webhooks.delivery.notification_listener import NotificationListener, Wakeup
from evalstop_service.webhooks.delivery.worker import WorkerLimits

from tests.fixtures.postgres_server import open_connection
from tests.service.webhooks.delivery.fake_pooler import run_fake_pooler
from tests.service.webhooks.delivery.fakes import (
    FakeEndpoint,
    Reply,
    SeededProject,
    announce_events,
    run_worker,
    seed_project,
    wait_until,
)

NEVER = 3600.0
"""A poll interval longer than any test."""

ONLY_WOKEN = WorkerLimits(poll_seconds=NEVER, woken_poll_seconds=NEVER)
"""A worker with these limits acts only because it was woken."""


def has_listener(database: Database) -> bool:
    """Whether a connection listens on this database."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN {}'"
    with database.reading() as tx:
        return bool(tx.exec_driver_sql(query.format(WAKEUP_CHANNEL)).scalar_one())


def test_commit_wakes_the_worker(database: Database, project: SeededProject) -> None:
    """A worker that polls once an hour sends each event as soon as it is committed."""
    with FakeEndpoint(Reply(200)) as fake:
        project.add_endpoint(database, fake.url)

        async def announce_and_wait() -> None:
            async with run_worker(database, limits=ONLY_WOKEN) as running:
                if not database.embedded:
                    await wait_until(lambda: has_listener(database), running)
                for number in range(3):
                    await asyncio.to_thread(announce_events, database, project)
                    await wait_until(partial(fake.has_received, number + 1), running)

        asyncio.run(announce_and_wait())


def test_worker_wakes_when_a_delivery_is_due(database: Database, project: SeededProject) -> None:
    """A worker that polls once an hour sends what comes due meanwhile, and retries what failed."""
    with FakeEndpoint(lambda _request, number: Reply(503 if number == 0 else 200)) as fake:
        project.add_endpoint(database, fake.url)

        async def announce_and_wait() -> None:
            async with run_worker(database, limits=ONLY_WOKEN) as running:
                now = utc_now()
                with database.transaction() as tx:
                    project.add_event(tx, now=now, due_at=now + timedelta(seconds=0.4))
                await wait_until(lambda: len(fake.received) == 2, running)

        asyncio.run(announce_and_wait())


@pytest.mark.parametrize("pooled", [False, True])
def test_worker_polls_behind_a_pooler(postgres_database: Database, pooled: bool) -> None:
    """Behind a pooler that drops notifications, the worker notices that and polls."""
    database = postgres_database
    project = seed_project(database)
    url = database.url
    if "host" not in url.query:
        pytest.skip("the fake pooler reaches only a server on a local socket")

    def open_route() -> AbstractContextManager[sa.URL]:
        return run_fake_pooler(url) if pooled else nullcontext(url)

    with open_route() as url_used:
        wakeup = Wakeup()
        listener = NotificationListener(url_used, wakeup.wake, answer_seconds=2.0 if pooled else 20.0)

        async def receives_notification() -> bool:
            listening = asyncio.create_task(listener.run())
            try:
                woken = await wakeup.wait(5.0 if pooled else 60.0)
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
            return woken

        assert asyncio.run(receives_notification()) is not pooled

    with open_route() as url_used, FakeEndpoint(Reply(200)) as fake:
        project.add_endpoint(database, fake.url)
        database_behind_pooler = Database(url_used.render_as_string(hide_password=False))

        async def announce_and_wait() -> None:
            limits = WorkerLimits(poll_seconds=0.1, woken_poll_seconds=NEVER)
            async with run_worker(database_behind_pooler, limits=limits) as running:
                await asyncio.to_thread(announce_events, database, project)
                await wait_until(lambda: len(fake.received) == 1, running)

        asyncio.run(announce_and_wait())
        database_behind_pooler.close()


def test_worker_listens_again_after_disconnect(postgres_database: Database, postgres_url: str) -> None:
    """When the listening connection is cut, the worker opens another and finds what was added meanwhile."""
    database = postgres_database
    project = seed_project(database)

    def terminate_listener() -> int:
        with open_connection(postgres_url) as server:
            cursor = server.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = %s AND query = %s",
                (database.url.database, f"LISTEN {WAKEUP_CHANNEL}"),
            )
            row = cursor.fetchone()
            assert row is not None
            return int(row[0])

    with FakeEndpoint(Reply(200)) as fake:
        project.add_endpoint(database, fake.url)

        async def announce_and_wait() -> None:
            async with run_worker(database, limits=ONLY_WOKEN) as running:
                for number in range(3):
                    await wait_until(lambda: has_listener(database), running)
                    assert terminate_listener() == 1
                    announce_events(database, project)
                    await wait_until(partial(fake.has_received, number + 1), running)

        asyncio.run(announce_and_wait())
