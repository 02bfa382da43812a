"""The key cache authenticates without the database for a limited time; the first start creates one key."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from anyio import CapacityLimiter
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.projects.key_cache import THREADS, KeyCache
from evalstop_service.store import keys
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database

from tests.faults.retrying_clients import wait_until
from tests.service.project_fixture import NOW, ProjectFixture


def test_key_is_cached_until_it_is_revoked(database: Database, project: ProjectFixture) -> None:
    """An authenticated key is cached; revoked in this process it stops working at once."""
    cache = KeyCache(database, 60.0)
    key, secret = api_keys.create_key(database, project.id, "test", "trainers", ["ingest"], NOW)
    assert cache.get(secret) is None
    assert cache.authenticate(secret, "") == cache.get(secret) == key
    assert cache.authenticate("esk_wrong", "") is None
    api_keys.revoke_key(database, cache, Author(project.id, "test", NOW), key.id)
    assert cache.get(secret) is None
    assert cache.authenticate(secret, "") is None


def test_zero_seconds_disable_the_cache(database: Database, project: ProjectFixture) -> None:
    """With 0 seconds, a key revoked by another process stops working with the next request."""
    cache = KeyCache(database, 0.0)
    key, secret = api_keys.create_key(database, project.id, "test", "trainers", ["ingest"], NOW)
    assert cache.authenticate(secret, "") == key
    assert cache.get(secret) is None
    with database.transaction() as tx:
        keys.revoke_key(tx, project.id, key.id, NOW)
    assert cache.authenticate(secret, "") is None


def test_key_is_read_again_on_a_new_connection(database: Database, project: ProjectFixture) -> None:
    """A connection that was closed while it was idle, as by a restart of PostgreSQL, refuses nobody."""
    cache = KeyCache(database, 0.0)
    key, secret = api_keys.create_key(database, project.id, "test", "trainers", ["ingest"], NOW)
    assert cache.authenticate(secret, "") == key
    if not database.embedded:
        with database.transaction() as tx:
            tx.exec_driver_sql(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid()"
            )
            pid = tx.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        other = sa.create_engine(database.url)
        with other.begin() as connection:
            connection.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")
        other.dispose()
    assert cache.authenticate(secret, "") == key


@contextmanager
def call_after_each_read(database: Database, call: Callable[[], None]) -> Iterator[None]:
    def after(*event: Any) -> None:
        if event[2].startswith("SELECT"):
            call()

    sa.event.listen(database.engine, "after_cursor_execute", after)
    try:
        yield
    finally:
        sa.event.remove(database.engine, "after_cursor_execute", after)


def test_concurrent_requests_read_a_key_a_few_times(database: Database, project: ProjectFixture) -> None:
    """Of many concurrent requests with one key, valid or not, only those in the first threads read the database."""
    cache = KeyCache(database, 60.0)
    key, secret = api_keys.create_key(database, project.id, "test", "trainers", ["ingest"], NOW)
    reads: list[None] = []
    wrong = keys.generate_secret()

    async def authenticate(*secrets: str) -> list[keys.Key | None]:
        return await asyncio.gather(*(cache.authenticate_in_thread(secret, "") for secret in secrets))

    with call_after_each_read(database, lambda: reads.append(None)):
        assert asyncio.run(authenticate(*[secret] * 64)) == [key] * 64
        assert 1 <= len(reads) <= THREADS
        before = len(reads)
        assert asyncio.run(authenticate(*[wrong] * 64, secret)) == [None] * 64 + [key]
        assert 1 <= len(reads) - before <= THREADS


def test_known_wrong_key_takes_no_thread(database: Database) -> None:
    """A key that was found wrong is refused while all threads are taken."""
    cache, wrong = KeyCache(database, 5.0), keys.generate_secret()
    assert cache.authenticate(wrong, "") is None

    async def authenticate(secret: str) -> keys.Key | None:
        threads = CapacityLimiter(1)
        await threads.acquire()
        async with asyncio.timeout(1):
            return await cache.authenticate_in_thread(secret, "", threads=threads)

    assert asyncio.run(authenticate(wrong)) is None


def test_request_after_a_revocation_reads_again(database: Database, project: ProjectFixture) -> None:
    """A read that started before a revocation admits only the request that it was for."""
    cache = KeyCache(database, 60.0)
    key, secret = api_keys.create_key(database, project.id, "test", "trainers", ["ingest"], NOW)
    was_read, may_return = threading.Event(), threading.Event()

    def block_first_read() -> None:
        if not was_read.is_set():
            was_read.set()
            may_return.wait(30)

    async def authenticate() -> list[keys.Key | None]:
        with call_after_each_read(database, block_first_read):
            before = asyncio.create_task(cache.authenticate_in_thread(secret, ""))
            assert await asyncio.to_thread(was_read.wait, 30)
            author = Author(project.id, "test", NOW)
            await asyncio.to_thread(api_keys.revoke_key, database, cache, author, key.id)
            after = asyncio.create_task(cache.authenticate_in_thread(secret, ""))
            await asyncio.sleep(0)  # the second request starts before the first is answered
            may_return.set()
            return [await before, await after]

    assert asyncio.run(authenticate()) == [key, None]
    assert cache.get(secret) is None


COUNT_WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


def test_processes_that_start_together_create_one_key(postgres_database: Database) -> None:
    """Of two processes that start at the same moment, one creates the first key, and the other starts without."""
    database = postgres_database

    def count_waiting() -> int:
        with database.reading() as tx:
            count: int = tx.exec_driver_sql(COUNT_WAITING).scalar_one()
        return count

    with ThreadPoolExecutor(2) as threads:
        with database.transaction() as tx:
            tx.exec_driver_sql("LOCK TABLE keys IN SHARE ROW EXCLUSIVE MODE")
            starts = [threads.submit(api_keys.create_first_key, database, utc_now()) for _ in range(2)]
            wait_until(lambda: count_waiting() == 2, "both wait")
        created = [start.result() for start in starts]
    assert [secret is None for secret in created] in ([True, False], [False, True])
