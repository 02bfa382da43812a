"""Several workers on one outbox, and faults beside them: no delivery is claimed twice or early, and none is lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler
from multiprocessing.context import ForkServerProcess
from uuid import UUID

import psycopg
import pytest
from evalstop_service.clock import Clock, utc_now
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from evalstop_service.store.queue import outbox
from evalstop_service.store.queue.outbox import Delivery
from evalstop_service.webhooks.delivery.worker import WorkerLimits

from tests.fixtures.forked_commands import FORKSERVER
from tests.fixtures.postgres_server import format_conninfo, open_connection, start_postgres
from tests.service.concurrency import run_concurrently
from tests.service.webhooks.delivery import worker_process
from tests.service.webhooks.delivery.fakes import (
    DEADLINE_SECONDS,
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


LIMITS = WorkerLimits(concurrency=4, per_endpoint=4, poll_seconds=0.05, lease_seconds=20)


def all_delivered(database: Database, project: SeededProject) -> bool:
    with database.reading() as tx:
        return all(delivery.state == "delivered" for delivery in project.list_deliveries(tx))


def ignore_errors(condition: Callable[[], bool]) -> Callable[[], bool]:
    """Wrap a condition: it is false while the database is unavailable."""

    def condition_holds() -> bool:
        try:
            return condition()
        except Exception:
            return False

    return condition_holds


@pytest.fixture
def own_postgres() -> Iterator[Database]:
    """A migrated database on a PostgreSQL server of its own, which the test crashes."""
    if "TEST_DATABASE_URL" in os.environ:
        pytest.skip("the test does not crash a server given by TEST_DATABASE_URL")
    with start_postgres() as url:
        database = Database(url)
        schema.upgrade_schema(database)
        yield database
        database.close()


def crash_postgres(database: Database) -> None:
    """Kill a backend: PostgreSQL closes all connections, recovers from its log and restarts."""
    url = format_conninfo(database.url.render_as_string(hide_password=False))
    while True:
        try:
            with psycopg.connect(url) as connection:
                os.kill(connection.info.backend_pid, signal.SIGKILL)
                connection.execute("SELECT pg_sleep(60)")
        except psycopg.OperationalError as error:
            if "server closed the connection" in str(error):
                return
            time.sleep(0.1)  # still recovering from the previous crash


@pytest.mark.real
@pytest.mark.nightly
def test_worker_survives_postgresql_crashes(own_postgres: Database) -> None:
    """PostgreSQL crashes twice during deliveries; every event arrives once and is settled."""
    database = own_postgres
    project = seed_project(database)
    crashed: list[int] = []

    def behavior(_request: BaseHTTPRequestHandler, number: int) -> Reply:
        if number in (5, 35):
            crash_postgres(database)
            crashed.append(number)
        return Reply(200)

    with FakeEndpoint(behavior) as fake:
        project.add_endpoint(database, fake.url)
        announce_events(database, project, 60)
        all_done = ignore_errors(lambda: len(crashed) == 2 and all_delivered(database, project))
        # If a crash interrupts the commit of a claim, its outcome is unknown: the delivery waits for its lease to end.
        limits = WorkerLimits(concurrency=4, per_endpoint=4, poll_seconds=0.05, lease_seconds=25)
        asyncio.run(deliver_until(all_done, database, limits=limits, timeout_seconds=20))
        assert len(set(fake.webhook_ids())) == 60
        assert len(fake.received) == 60, "running attempts were settled afterwards, not sent again"


@pytest.mark.real
def test_worker_survives_cut_connections(postgres_database: Database, postgres_url: str) -> None:
    """Connections are cut repeatedly while attempts are settled; each event arrives once and is settled."""
    database = postgres_database
    project = seed_project(database)

    def terminate_connections() -> None:
        with open_connection(postgres_url) as server:
            server.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (database.url.database,)
            )

    def behavior(_request: BaseHTTPRequestHandler, number: int) -> Reply:
        if number % 7 == 3:
            terminate_connections()
        return Reply(200)

    with FakeEndpoint(behavior) as fake:
        project.add_endpoint(database, fake.url)
        announce_events(database, project, 60)
        asyncio.run(deliver_until(ignore_errors(lambda: all_delivered(database, project)), database, limits=LIMITS))
        assert len(fake.received) == 60
        assert len(set(fake.webhook_ids())) == 60


@pytest.mark.real
@pytest.mark.nightly
def test_randomly_killed_workers_lose_nothing(database: Database, database_url: str) -> None:
    """When workers are killed at random, every event arrives and none is claimed while its lease holds."""
    project = seed_project(database)
    count = 120
    chance = random.Random(7)
    with FakeEndpoint(Reply(200)) as fake:
        for _ in range(3):
            project.add_endpoint(database, fake.url)
        if not database.embedded:
            record_early_claims(database)
        with run_worker_processes(database_url, 3, lease_seconds=2.0) as workers:
            for number in range(0, count, 30):
                announce_events(database, project, 30)
                workers.wait_for(partial(has_received_more_than, fake, number))
                workers.kill_random_worker(chance)
            workers.wait_for(lambda: all_delivered(database, project))
        assert len(set(fake.webhook_ids())) == count
        with database.reading() as tx:
            assert {delivery.state for delivery in project.list_deliveries(tx)} == {"delivered"}
            if not database.embedded:
                assert tx.exec_driver_sql("SELECT count(*) FROM claims_too_early").scalar_one() == 0


def has_received_more_than(fake: FakeEndpoint, count: int) -> bool:
    return len(set(fake.webhook_ids())) > count


def record_early_claims(database: Database) -> None:
    """Install a trigger that records each claim of a delivery whose lease had not ended."""
    with database.transaction() as tx:
        tx.exec_driver_sql("CREATE TABLE claims_too_early (id uuid, due_at timestamptz, at timestamptz)")
        tx.exec_driver_sql(
            "CREATE FUNCTION watch_claim() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF NEW.attempts > OLD.attempts AND OLD.due_at > clock_timestamp() THEN "
            "INSERT INTO claims_too_early VALUES (OLD.id, OLD.due_at, clock_timestamp()); END IF; RETURN NEW; END $$"
        )
        tx.exec_driver_sql(
            "CREATE TRIGGER watch_claim BEFORE UPDATE ON deliveries FOR EACH ROW EXECUTE FUNCTION watch_claim()"
        )


class WorkerProcesses:
    """Several workers on one database; a killed worker is replaced."""

    def __init__(self, url: str, count: int, lease_seconds: float) -> None:
        self._arguments = (url, lease_seconds)
        self._processes = [self._start() for _ in range(count)]
        self.killed = 0

    def kill_random_worker(self, random_source: random.Random) -> None:
        """Kill a random worker with SIGKILL and start another."""
        index = random_source.randrange(len(self._processes))
        self._processes[index].kill()
        self._processes[index].join()
        self._processes[index] = self._start()
        self.killed += 1

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition; fail after the deadline, or when a worker exits on its own."""
        deadline = time.monotonic() + 2 * DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "the condition was not reached in time"
            assert all(process.is_alive() for process in self._processes), "a worker exited on its own"
            time.sleep(0.02)

    def kill_all(self) -> None:
        """Kill all workers."""
        for process in self._processes:
            process.kill()
            process.join()

    def _start(self) -> ForkServerProcess:
        process: ForkServerProcess = FORKSERVER.Process(target=worker_process.run_worker, args=self._arguments)
        process.start()
        return process


@contextmanager
def run_worker_processes(url: str, count: int, lease_seconds: float) -> Iterator[WorkerProcesses]:
    """Run workers until the block ends."""
    workers = WorkerProcesses(url, count, lease_seconds)
    try:
        yield workers
    finally:
        workers.kill_all()
