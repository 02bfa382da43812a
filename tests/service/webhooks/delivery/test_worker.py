"""The delivery worker with real endpoints and real databases: at least once, and no failure blocks or ends it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
import standardwebhooks
from evalstop_client.signature import verify
from evalstop_service.clock import utc_now
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import endpoints, tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.queue import outbox
from evalstop_service.store.tables import endpoints as endpoint_rows
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.delivery.worker import DeliveryWorker, WorkerLimits
from evalstop_service.webhooks.retry import Answer, Backoff
from standardwebhooks import Webhook

from tests.fixtures.postgres_server import open_connection
from tests.service.webhooks.delivery.fakes import (
    LOOPBACK,
    FakeEndpoint,
    Reply,
    SeededProject,
    all_settled,
    announce_events,
    count_deliveries_by_state,
    deliver_until,
    reserve_closed_port,
    run_worker,
    seed_project,
    wait_until,
)


def test_event_is_delivered_and_signed(database: Database, project: SeededProject) -> None:
    """An event arrives once under its id; the signature verifies with the current and the previous secret."""
    with FakeEndpoint(Reply(200)) as fake:
        before = project.add_endpoint(database, fake.url)
        with database.transaction() as tx:
            after = endpoints.rotate_secret(tx, project.id, before.id, now=utc_now())
            event = project.add_event(tx)
        asyncio.run(deliver_until(all_settled(database, project), database))
    assert after is not None
    (received,) = fake.received
    assert received.headers["webhook-id"] == str(event)
    for secret in (before.secret, after.secret):
        message = standardwebhooks.Webhook(secret).verify(received.body, received.headers)
        assert message["data"] == {"number": 0}
    verify([before.public_key], received.headers, received.body, utc_now().timestamp())
    assert count_deliveries_by_state(database, project) == {"delivered": 1}


def test_failed_delivery_is_retried(database: Database, project: SeededProject) -> None:
    """After errors the same event is sent again under the same id, and each attempt is recorded."""
    with FakeEndpoint(lambda _request, number: Reply(500 if number < 2 else 200)) as fake:
        project.add_endpoint(database, fake.url)
        announce_events(database, project)
        asyncio.run(deliver_until(all_settled(database, project), database))
    assert len(fake.received) == 3
    assert len(set(fake.webhook_ids())) == 1
    assert len({request.body for request in fake.received}) == 1
    with database.reading() as tx:
        (delivery,) = project.list_deliveries(tx)
        attempts = outbox.list_attempts(tx, delivery)
    assert (delivery.state, delivery.attempts, delivery.last_error) == ("delivered", 3, None)
    assert [(attempt.number, attempt.status_code) for attempt in attempts] == [(1, 500), (2, 500), (3, 200)]


def test_status_410_disables_the_endpoint(database: Database, project: SeededProject) -> None:
    """After 410 nothing more is sent to the endpoint, and its waiting deliveries stay waiting."""
    with FakeEndpoint(Reply(410)) as gone, FakeEndpoint(Reply(200)) as healthy:
        endpoint = project.add_endpoint(database, gone.url)
        project.add_endpoint(database, healthy.url)
        announce_events(database, project, 3)
        limits = WorkerLimits(poll_seconds=0.02, lease_seconds=20, per_endpoint=1)
        asyncio.run(deliver_until(lambda: len(healthy.received) == 3, database, limits=limits))
    assert len(gone.received) == 1
    assert count_deliveries_by_state(database, project) == {"dead": 1, "waiting": 2, "delivered": 3}
    with database.reading() as tx:
        loaded = endpoints.load_endpoint(tx, project.id, endpoint.id)
    assert not loaded.enabled


class FreezingSender(Sender):
    """Freezes its process at the first attempt, for longer than a lease; all deliveries are cancelled meanwhile."""

    database: Database | None = None

    async def send(self, url: str, headers: dict[str, str], body: bytes, event: str = "{}") -> Answer:
        if self.database is not None:
            time.sleep(2.2)
            with self.database.transaction() as tx:
                tx.execute(sa.update(tables.deliveries).values(state="cancelled"))
            self.database = None
        return await super().send(url, headers, body, event)


def test_nothing_is_sent_after_its_lease(embedded_database: Database) -> None:
    """A stop that was undone while its worker was frozen is not sent when the worker goes on."""
    project = seed_project(embedded_database)

    async def deliver() -> None:
        async with FreezingSender(timeout_seconds=1.0, address_policy=LOOPBACK) as sender:
            sender.database = embedded_database
            limits, stop = WorkerLimits(lease_seconds=2.0), asyncio.Event()
            worker = DeliveryWorker(embedded_database, sender, clock=utc_now, chance=random.Random(1), limits=limits)
            running = asyncio.create_task(worker.run(stop))
            await wait_until(all_settled(embedded_database, project), running)
            stop.set()
            await running

    with FakeEndpoint(Reply(200)) as fake:
        project.add_endpoint(embedded_database, fake.url)
        announce_events(embedded_database, project, 2)
        asyncio.run(deliver())
    assert len(fake.received) == 1


def test_rejected_event_is_sent_again_on_request_only(database: Database, project: SeededProject) -> None:
    """A rejected event is dead after one attempt; a replay is a delivery of its own."""
    with FakeEndpoint(lambda _request, number: Reply(400 if number == 0 else 200)) as fake:
        project.add_endpoint(database, fake.url)
        announce_events(database, project)
        asyncio.run(deliver_until(all_settled(database, project), database))
        assert count_deliveries_by_state(database, project) == {"dead": 1}
        assert len(fake.received) == 1
        with database.transaction() as tx:
            dead = project.list_deliveries(tx)[0]
            assert outbox.replay_event(tx, project.id, dead.endpoint_id, dead.event_id, utc_now())
        asyncio.run(deliver_until(all_settled(database, project), database))
    assert count_deliveries_by_state(database, project) == {"dead": 1, "delivered": 1}


def test_delivery_is_dead_after_max_attempts(database: Database, project: SeededProject) -> None:
    """Where the connection is refused, a delivery is dead after `max_attempts`, with the reason."""
    with reserve_closed_port() as url:
        project.add_endpoint(database, url)
        announce_events(database, project)
        backoff = Backoff(first_seconds=0.01, max_attempts=3)
        asyncio.run(deliver_until(all_settled(database, project), database, backoff=backoff))
    with database.reading() as tx:
        (delivery,) = project.list_deliveries(tx)
    assert (delivery.state, delivery.attempts) == ("dead", 3)
    assert delivery.last_error is not None
    assert "given up after 3 attempts" in delivery.last_error


def test_hanging_endpoint_does_not_delay_others(database: Database, project: SeededProject) -> None:
    """While an endpoint with a long queue hangs, another endpoint's events are delivered."""
    with FakeEndpoint(Reply()) as hanging, FakeEndpoint(Reply(200)) as healthy:
        hanging.behavior = lambda _request, _number: Reply(after=hanging.released)
        project.add_endpoint(database, hanging.url)
        announce_events(database, project, 30)
        project.add_endpoint(database, healthy.url)
        announce_events(database, project, 5)
        limits = WorkerLimits(concurrency=6, per_endpoint=4, poll_seconds=0.02, lease_seconds=60)

        def healthy_done() -> bool:
            return len(healthy.received) == 5 and count_deliveries_by_state(database, project)["delivered"] >= 5

        def release_when_done() -> bool:
            if healthy_done() and hanging.max_open_requests >= limits.per_endpoint:
                hanging.released.set()
            return hanging.released.is_set()

        asyncio.run(deliver_until(release_when_done, database, limits=limits, timeout_seconds=30))
        assert hanging.max_open_requests == 4


def test_worker_finishes_running_attempts_on_stop(database: Database, project: SeededProject) -> None:
    """When told to stop, the worker starts nothing new and settles running attempts before it ends."""
    with FakeEndpoint(Reply()) as fake:
        fake.behavior = lambda _request, _number: Reply(after=fake.released)
        project.add_endpoint(database, fake.url)
        announce_events(database, project)

        async def run() -> None:
            stop = asyncio.Event()
            async with run_worker(database, stop=stop) as running:
                await wait_until(lambda: len(fake.received) == 1, running)
                stop.set()
                ended, _ = await asyncio.wait({running}, timeout=0.3)
                assert not ended, "the worker ended before its running attempt"
                announce_events(database, project)
                fake.released.set()

        asyncio.run(run())
        assert len(fake.received) == 1
    assert count_deliveries_by_state(database, project) == {"delivered": 1, "waiting": 1}


def test_worker_survives_a_database_outage(postgres_database: Database, postgres_url: str) -> None:
    """If the database goes away during an attempt, the worker waits, then settles the attempt and goes on."""
    database, name = postgres_database, postgres_database.url.database
    project = seed_project(database)

    def allow_connections(allowed: bool) -> None:
        with open_connection(postgres_url) as server:
            server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {str(allowed).lower()}".encode())
            if not allowed:
                server.execute(
                    f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'".encode()
                )

    with FakeEndpoint(Reply()) as fake:
        fake.behavior = lambda _request, number: Reply(200, after=fake.released if number == 0 else None)
        project.add_endpoint(database, fake.url)
        announce_events(database, project)

        async def run() -> None:
            async with run_worker(database) as running:
                await wait_until(lambda: len(fake.received) == 1, running)
                allow_connections(False)
                fake.released.set()
                ended, _ = await asyncio.wait({running}, timeout=1.0)
                assert not ended, "the outage ended the worker"
                allow_connections(True)
                announce_events(database, project)
                await wait_until(all_settled(database, project), running)

        asyncio.run(run())
    assert count_deliveries_by_state(database, project) == {"delivered": 2}
    assert len(fake.received) == 2, "the running attempt was settled, not repeated"


class FailsAfterClaim(Database):
    """A database that cannot be read once, just after the first read-write transaction."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fails: bool | None = None

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        with super().transaction() as tx:
            yield tx
        self.fails = self.fails is None

    @contextmanager
    def reading(self, *, snapshot: bool = False) -> Iterator[Transaction]:
        if self.fails:
            self.fails = False
            raise sa.exc.OperationalError("SELECT", None, Exception("the server closed the connection"))
        with super().reading(snapshot=snapshot) as tx:
            yield tx


def test_claimed_delivery_is_sent_although_the_database_fails_next(embedded_database: Database) -> None:
    """A delivery that was claimed just before an outage is sent at once, not again after its lease."""
    project = seed_project(embedded_database)
    database = FailsAfterClaim(embedded_database.url.render_as_string())
    with FakeEndpoint(Reply(200)) as fake:
        project.add_endpoint(embedded_database, fake.url)
        with embedded_database.transaction() as tx:
            project.add_event(tx)
        limits = WorkerLimits(poll_seconds=0.05, lease_seconds=3.0)
        settled = all_settled(embedded_database, project)
        asyncio.run(deliver_until(settled, database, limits=limits, timeout_seconds=2.5))
    with embedded_database.reading() as tx:
        assert [delivery.attempts for delivery in project.list_deliveries(tx)] == [1]
    database.close()


def test_attempts_are_counted_and_timed(database: Database, project: SeededProject) -> None:
    """Attempts are counted by result and timed, with their lag behind the due time."""
    service_metrics = ServiceMetrics()
    statuses = [503, 200, 400, 200]
    with FakeEndpoint(lambda _request, number: Reply(statuses[number])) as fake:
        project.add_endpoint(database, fake.url)
        announce_events(database, project, 3)
        limits = WorkerLimits(concurrency=1, per_endpoint=1, poll_seconds=0.02, lease_seconds=20)
        asyncio.run(
            deliver_until(all_settled(database, project), database, limits=limits, service_metrics=service_metrics)
        )

    def read_sample(name: str, **labels: str) -> float | None:
        return service_metrics.registry.get_sample_value(f"evalstop_{name}", labels)

    assert read_sample("deliveries_total", result="delivered") == 2
    assert read_sample("deliveries_total", result="retry") == 1
    assert read_sample("deliveries_total", result="dead") == 1
    assert read_sample("delivery_seconds_count") == 4
    assert read_sample("delivery_lag_seconds_count") == 4


def test_slack_endpoint_gets_a_signed_message(database: Database, project: SeededProject) -> None:
    """An endpoint of the format `slack` gets a text, signed with its decrypted secret."""
    encryption = Encryption([bytes(32)])
    with FakeEndpoint(Reply(200, body=b"ok")) as fake:
        with database.transaction() as tx:
            endpoint = endpoints.add_endpoint(
                tx,
                project.id,
                url=fake.url,
                event_types=["*"],
                now=utc_now(),
                format="slack",
                encryption=encryption,
            )
            data = {
                "project": {"id": str(project.id), "name": "alignment"},
                "run": {"id": str(project.run_id), "name": "ppo <3", "attempt": 1, "labels": {}},
            }
            project.add_event(tx, data=data, event_type="run.stopped")
            encrypted_secret = tx.execute(
                sa.select(endpoint_rows.c.secret).where(endpoint_rows.c.id == endpoint.id)
            ).scalar_one()
        asyncio.run(deliver_until(all_settled(database, project), database, encryption=encryption))
    (received,) = fake.received
    message = Webhook(encryption.decrypt(encrypted_secret, endpoint.id)).verify(received.body, received.headers)
    assert message["text"].startswith("ppo &lt;3 was stopped\n")
