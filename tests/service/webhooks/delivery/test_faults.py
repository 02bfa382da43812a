"""What breaks while events are delivered: PostgreSQL, connections, endpoints. Nothing is lost, and it mends itself."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any

import psycopg
import pytest
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from evalstop_service.webhooks.delivery.worker import WorkerLimits
from evalstop_service.webhooks.retry import Backoff

from tests.fixtures.postgres_server import format_conninfo, open_connection, start_postgres
from tests.service.webhooks.delivery.fakes import FakeEndpoint, Reply, Scene, a_scene, announce, deliver_until
from tests.service.webhooks.delivery.killing import worker_processes

pytestmark = pytest.mark.real

LIMITS = WorkerLimits(concurrency=4, per_endpoint=4, poll_seconds=0.05, lease_seconds=20)


def all_delivered(database: Database, scene: Scene) -> bool:
    with database.reading() as tx:
        return all(one.state == "delivered" for one in scene.all(tx))


def tolerant(condition: Callable[[], bool]) -> Callable[[], bool]:
    """The condition, which cannot hold while the database is away."""

    def holds() -> bool:
        try:
            return condition()
        except Exception:
            return False

    return holds


@pytest.fixture
def own_postgres() -> Iterator[Database]:
    """A migrated database on a PostgreSQL of the test's own, to be crashed."""
    if "TEST_DATABASE_URL" in os.environ:
        pytest.skip("a server that is given is not crashed")
    with start_postgres() as url:
        database = Database(url)
        schema.upgrade_schema(database)
        yield database
        database.close()


def crash(database: Database) -> None:
    """Kill one of the server's processes: PostgreSQL drops every connection, recovers from its log and starts anew."""
    url = format_conninfo(database.url.render_as_string(hide_password=False))
    while True:
        try:
            with psycopg.connect(url) as victim:
                os.kill(victim.info.backend_pid, signal.SIGKILL)
                victim.execute("SELECT pg_sleep(60)")
        except psycopg.OperationalError as error:
            if "server closed the connection" in str(error):
                return
            time.sleep(0.1)  # it recovers from the crash before


def test_outlives_a_crash_of_postgresql(own_postgres: Database) -> None:
    """PostgreSQL crashes and recovers amid deliveries, and again; every event arrives once and is settled."""
    database = own_postgres
    scene = a_scene(database)
    crashed: list[int] = []

    def behavior(_request: BaseHTTPRequestHandler, number: int) -> Reply:
        if number in (5, 35):
            crash(database)
            crashed.append(number)
        return Reply(200)

    with FakeEndpoint(behavior) as fake:
        scene.endpoint(database, fake.url)
        announce(database, scene, 60)
        done = tolerant(lambda: len(crashed) == 2 and all_delivered(database, scene))
        # What a commit took out that the crash cut short, nobody knows of: that waits for its lease to end.
        limits = WorkerLimits(concurrency=4, per_endpoint=4, poll_seconds=0.05, lease_seconds=25)
        asyncio.run(deliver_until(done, database, limits=limits, timeout_seconds=20))
        assert len(set(fake.ids())) == 60
        assert len(fake.received) == 60, "what was under way was settled afterwards, not sent again"


def test_outlives_cut_connections(postgres_database: Database, postgres_url: str) -> None:
    """The connections are cut again and again while attempts are settled; each event arrives once and is settled."""
    database = postgres_database
    scene = a_scene(database)

    def cut() -> None:
        with open_connection(postgres_url) as server:
            server.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (database.url.database,)
            )

    def behavior(_request: BaseHTTPRequestHandler, number: int) -> Reply:
        if number % 7 == 3:
            cut()
        return Reply(200)

    with FakeEndpoint(behavior) as fake:
        scene.endpoint(database, fake.url)
        announce(database, scene, 60)
        asyncio.run(deliver_until(tolerant(lambda: all_delivered(database, scene)), database, limits=LIMITS))
        assert len(fake.received) == 60
        assert len(set(fake.ids())) == 60


@contextmanager
def mute_port() -> Iterator[str]:
    """A URL where connections are made and nobody ever reads."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"


@contextmanager
def slow_port() -> Iterator[str]:
    """A URL where answers come byte by byte, one a second, each in time."""
    end = threading.Event()

    def drip(request: BaseHTTPRequestHandler, _number: int) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n":
            request.wfile.write(bytes([byte]))
            if end.wait(1.0):
                return

    with FakeEndpoint(drip) as slow:
        yield slow.url
        end.set()


@pytest.mark.parametrize("port", [mute_port, slow_port])
def test_an_endpoint_that_takes_for_ever_costs_its_time_alone(database: Database, port: Any) -> None:
    """An attempt at an endpoint that never reads, or answers a byte a second, ends in time; others are not held up."""
    scene = a_scene(database)
    with port() as url, FakeEndpoint(Reply(200)) as fine:
        scene.endpoint(database, url)
        with database.transaction() as tx:
            for _ in range(8):
                scene.apart(tx, data={"much": "x" * 1_000_000})
        scene.endpoint(database, fine.url, ("run.stopped",))
        with database.transaction() as tx:
            for number in range(20):
                scene.apart(tx, number, type="run.stopped")

        def over() -> bool:
            with database.reading() as tx:
                found = [one for one in scene.all(tx) if one.url == url and one.event_type == "run.suspected"]
            return len(fine.received) == 20 and all(one.state == "dead" for one in found)

        limits = WorkerLimits(concurrency=5, per_endpoint=4, poll_seconds=0.05, lease_seconds=20)
        backoff = Backoff(first_seconds=0.01, max_attempts=1)
        asyncio.run(deliver_until(over, database, limits=limits, backoff=backoff, timeout_seconds=0.7))
    with database.reading() as tx:
        errors = {one.last_error for one in scene.all(tx) if one.state == "dead"}
    assert errors == {"no answer within 0.7 s; given up after 1 attempt"}


def test_killed_at_random(database: Database, database_url: str) -> None:
    """Workers in processes of their own, killed at random: every event arrives, none is claimed while a lease holds."""
    scene = a_scene(database)
    count = 120
    chance = random.Random(7)
    with FakeEndpoint(Reply(200)) as fake:
        for _ in range(3):
            scene.endpoint(database, fake.url)
        if not database.embedded:
            watch_claims(database)
        with worker_processes(database_url, 3, lease_seconds=2.0) as workers:
            for number in range(0, count, 30):
                announce(database, scene, 30)
                workers.wait_for(partial(has_more_than, fake, number))
                workers.kill_one(chance)
            workers.wait_for(lambda: all_delivered(database, scene))
        assert len(set(fake.ids())) == count
        with database.reading() as tx:
            assert {one.state for one in scene.all(tx)} == {"delivered"}
            if not database.embedded:
                assert tx.exec_driver_sql("SELECT count(*) FROM claims_too_early").scalar_one() == 0


def has_more_than(fake: FakeEndpoint, count: int) -> bool:
    return len(set(fake.ids())) > count


def watch_claims(database: Database) -> None:
    """Have PostgreSQL itself note each claim of a delivery whose lease was not over."""
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
