"""The worker against real endpoints and real databases: at least once, never held up, never brought down."""

from __future__ import annotations

import asyncio
import random

import pytest
import sqlalchemy as sa
import standardwebhooks
from evalstop_client.signature import verify
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.queue import deliveries
from evalstop_service.store.tables import endpoints as endpoint_rows
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.delivery.worker import DeliveryWorker, WorkerLimits
from evalstop_service.webhooks.retry import Backoff

from tests.fixtures.postgres_server import open_connection
from tests.service.webhooks.delivery.fakes import (
    DEADLINE_SECONDS,
    LOOPBACK,
    FakeEndpoint,
    Reply,
    Scene,
    a_scene,
    announce,
    closed_port,
    deliver_until,
    reach,
    settled,
    states,
    utc_now,
)


def test_delivers_signed(database: Database, scene: Scene) -> None:
    """An event arrives once, its signature verifies under the secret and the one before, and its id is the event's."""
    with FakeEndpoint(Reply(200)) as fake:
        before = scene.endpoint(database, fake.url)
        with database.transaction() as tx:
            after = endpoints.rotate_secret(tx, scene.project_id, before.id, now=utc_now())
            event = scene.announce(tx)
        asyncio.run(deliver_until(settled(database, scene), database))
    assert after is not None
    (received,) = fake.received
    assert received.headers["webhook-id"] == str(event)
    for secret in (before.secret, after.secret):
        message = standardwebhooks.Webhook(secret).verify(received.body, received.headers)
        assert message["data"] == {"number": 0}
    verify([before.public_key], received.headers, received.body, utc_now().timestamp())
    assert states(database, scene) == {"delivered": 1}


def test_tries_again(database: Database, scene: Scene) -> None:
    """After errors the same event is sent again under the same id, and each attempt is on record."""
    with FakeEndpoint(lambda _request, number: Reply(500 if number < 2 else 200)) as fake:
        scene.endpoint(database, fake.url)
        announce(database, scene)
        asyncio.run(deliver_until(settled(database, scene), database))
    assert len(fake.received) == 3
    assert len(set(fake.ids())) == 1
    assert len({one.body for one in fake.received}) == 1
    with database.reading() as tx:
        (delivery,) = scene.all(tx)
        log = deliveries.list_attempts(tx, delivery)
    assert (delivery.state, delivery.attempts, delivery.last_error) == ("delivered", 3, None)
    assert [(one.number, one.status_code) for one in log] == [(1, 500), (2, 500), (3, 200)]


def test_gone_disables_the_endpoint(database: Database, scene: Scene) -> None:
    """After 410 nothing more is sent there, and what waits for it waits on."""
    with FakeEndpoint(Reply(410)) as gone, FakeEndpoint(Reply(200)) as fine:
        endpoint = scene.endpoint(database, gone.url)
        scene.endpoint(database, fine.url)
        announce(database, scene, 3)
        limits = WorkerLimits(poll_seconds=0.02, lease_seconds=20, per_endpoint=1)
        asyncio.run(deliver_until(lambda: len(fine.received) == 3, database, limits=limits))
    assert len(gone.received) == 1
    assert states(database, scene) == {"dead": 1, "waiting": 2, "delivered": 3}
    with database.reading() as tx:
        found = endpoints.find_endpoint(tx, scene.project_id, endpoint.id)
    assert found is not None
    assert not found.enabled


def test_dead_until_retried(database: Database, scene: Scene) -> None:
    """A refused event is dead after one attempt, stays so, and is sent again only when someone asks."""
    with FakeEndpoint(lambda _request, number: Reply(400 if number == 0 else 200)) as fake:
        scene.endpoint(database, fake.url)
        announce(database, scene)
        asyncio.run(deliver_until(settled(database, scene), database))
        assert states(database, scene) == {"dead": 1}
        assert len(fake.received) == 1
        with database.transaction() as tx:
            assert deliveries.retry_delivery(tx, scene.project_id, scene.all(tx)[0].id, utc_now())
        asyncio.run(deliver_until(settled(database, scene), database))
    assert states(database, scene) == {"delivered": 1}


def test_gives_up(database: Database, scene: Scene) -> None:
    """Where nobody listens, a delivery is dead after as many attempts as were allowed, with the reason."""
    with closed_port() as url:
        scene.endpoint(database, url)
        announce(database, scene)
        backoff = Backoff(first_seconds=0.01, max_attempts=3)
        asyncio.run(deliver_until(settled(database, scene), database, backoff=backoff))
    with database.reading() as tx:
        (delivery,) = scene.all(tx)
    assert (delivery.state, delivery.attempts) == ("dead", 3)
    assert delivery.last_error is not None
    assert "given up after 3 attempts" in delivery.last_error


def test_hanging_endpoint_holds_up_nobody(database: Database, scene: Scene) -> None:
    """While an endpoint with a long queue hangs, the events for another get through."""
    with FakeEndpoint(Reply()) as hanging, FakeEndpoint(Reply(200)) as fine:
        hanging.behavior = lambda _request, _number: Reply(after=hanging.released)
        scene.endpoint(database, hanging.url)
        announce(database, scene, 30)
        scene.endpoint(database, fine.url)
        announce(database, scene, 5)
        limits = WorkerLimits(concurrency=6, per_endpoint=4, poll_seconds=0.02, lease_seconds=60)

        def served() -> bool:
            return len(fine.received) == 5 and states(database, scene)["delivered"] >= 5

        async def run() -> None:
            def served_then_release() -> bool:
                if served():
                    hanging.released.set()
                return hanging.released.is_set()

            await deliver_until(served_then_release, database, limits=limits, timeout_seconds=30)

        asyncio.run(run())
        assert hanging.most_under_way == 4


def test_stops_gracefully(database: Database, scene: Scene) -> None:
    """Told to stop, the worker starts nothing new and settles what is under way before it ends."""
    with FakeEndpoint(Reply()) as fake:
        fake.behavior = lambda _request, _number: Reply(after=fake.released)
        scene.endpoint(database, fake.url)
        announce(database, scene)

        async def run() -> None:
            stop = asyncio.Event()
            async with Sender(address_policy=LOOPBACK) as sender:
                worker = DeliveryWorker(database, sender, clock=utc_now, chance=random.Random(1))
                running = asyncio.create_task(worker.run(stop))
                await reach(lambda: len(fake.received) == 1, running)
                stop.set()
                done, _ = await asyncio.wait({running}, timeout=0.3)
                assert not done, "it went without waiting for the attempt under way"
                announce(database, scene)
                fake.released.set()
                await asyncio.wait_for(running, DEADLINE_SECONDS)

        asyncio.run(run())
        assert len(fake.received) == 1
    assert states(database, scene) == {"delivered": 1, "waiting": 1}


def test_a_broken_secret_ends_nothing(database: Database, scene: Scene) -> None:
    """A secret that cannot sign fails its own deliveries and no others."""
    with FakeEndpoint(Reply(200)) as fake, FakeEndpoint(Reply(200)) as fine:
        broken = scene.endpoint(database, fake.url)
        scene.endpoint(database, fine.url)
        with database.transaction() as tx:
            tx.execute(sa.update(endpoint_rows).where(endpoint_rows.c.id == broken.id).values(secret="whsec_?"))
        announce(database, scene, 2)
        backoff = Backoff(first_seconds=0.01, max_attempts=2)
        asyncio.run(deliver_until(settled(database, scene), database, backoff=backoff))
    assert fake.received == []
    assert len(fine.received) == 2
    assert states(database, scene) == {"dead": 2, "delivered": 2}


def test_outlives_an_outage(postgres_database: Database, postgres_url: str) -> None:
    """A database that goes away while an attempt is under way is waited for; then all is settled and delivered."""
    database, name = postgres_database, postgres_database.url.database
    scene = a_scene(database)

    def allow(yes: bool) -> None:
        with open_connection(postgres_url) as server:
            server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {str(yes).lower()}".encode())
            if not yes:
                server.execute(
                    f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'".encode()
                )

    with FakeEndpoint(Reply()) as fake:
        fake.behavior = lambda _request, number: Reply(200, after=fake.released if number == 0 else None)
        scene.endpoint(database, fake.url)
        announce(database, scene)

        async def run() -> None:
            stop = asyncio.Event()
            async with Sender(address_policy=LOOPBACK) as sender:
                worker = DeliveryWorker(database, sender, clock=utc_now, chance=random.Random(1))
                running = asyncio.create_task(worker.run(stop))
                await reach(lambda: len(fake.received) == 1, running)
                allow(False)
                fake.released.set()
                done, _ = await asyncio.wait({running}, timeout=1.0)
                assert not done, "the outage ended the worker"
                allow(True)
                announce(database, scene)
                await reach(settled(database, scene), running)
                stop.set()
                await asyncio.wait_for(running, DEADLINE_SECONDS)

        asyncio.run(run())
    assert states(database, scene) == {"delivered": 2}
    assert len(fake.received) == 2, "the attempt under way was settled, not repeated"


def test_a_lease_outlasts_an_attempt(embedded_database: Database) -> None:
    """A lease that could run out during an attempt is refused, since two workers would then send at one time."""
    with pytest.raises(ValueError, match="lease_seconds"):
        DeliveryWorker(
            embedded_database,
            Sender(timeout_seconds=10),
            clock=utc_now,
            chance=random.Random(1),
            limits=WorkerLimits(lease_seconds=10),
        )


def test_counts_what_it_did(database: Database, scene: Scene) -> None:
    """Attempts are counted by what came of them, timed, and their lag behind the due time is told."""
    service_metrics = ServiceMetrics()
    answers = [503, 200, 400, 200]
    with FakeEndpoint(lambda _request, number: Reply(answers[number])) as fake:
        scene.endpoint(database, fake.url)
        announce(database, scene, 3)
        limits = WorkerLimits(concurrency=1, per_endpoint=1, poll_seconds=0.02, lease_seconds=20)
        asyncio.run(deliver_until(settled(database, scene), database, limits=limits, service_metrics=service_metrics))

    def told(name: str, **labels: str) -> float | None:
        return service_metrics.registry.get_sample_value(f"evalstop_{name}", labels)

    assert told("deliveries_total", result="delivered") == 2
    assert told("deliveries_total", result="retry") == 1
    assert told("deliveries_total", result="dead") == 1
    assert told("delivery_seconds_count") == 4
    assert told("delivery_lag_seconds_count") == 4


def test_one_that_cannot_be_recorded_spoils_no_other(postgres_database: Database) -> None:
    """Attempts that end together are recorded together; when one of them cannot be, the others are by themselves."""
    database = postgres_database
    scene = a_scene(database)
    with FakeEndpoint(Reply(200)) as fake:
        scene.endpoint(database, fake.url)
        announce(database, scene, 6)
        with database.transaction() as tx:
            poisoned = scene.all(tx)[2].id
            tx.exec_driver_sql(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                f"IF NEW.delivery_id = '{poisoned}' THEN RAISE EXCEPTION USING ERRCODE = '22000'; END IF; "
                "RETURN NEW; END $$"
            )
            tx.exec_driver_sql(
                "CREATE TRIGGER refuse BEFORE INSERT ON delivery_attempts FOR EACH ROW EXECUTE FUNCTION refuse()"
            )
        asyncio.run(deliver_until(lambda: states(database, scene)["delivered"] == 5, database))
        assert states(database, scene) == {"delivered": 5, "waiting": 1}
