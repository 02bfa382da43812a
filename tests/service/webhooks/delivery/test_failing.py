"""Endpoints that fail, and endpoints that want something else, by a worker that runs."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import sqlalchemy as sa
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.queue import deliveries
from evalstop_service.store.queue.breakers import BreakerLimits
from evalstop_service.store.tables import endpoints as rows
from evalstop_service.webhooks.retry import Backoff
from standardwebhooks import Webhook

from tests.service.webhooks.delivery.fakes import (
    FakeEndpoint,
    Reply,
    Scene,
    announce,
    deliver_until,
    settled,
    states,
    utc_now,
)

LONG = BreakerLimits(failures=3, seconds=3600)


def test_an_endpoint_that_fails_is_left_alone(database: Database, scene: Scene) -> None:
    """After its failures nothing more is sent there, however much waits, and another endpoint gets everything."""
    with FakeEndpoint(Reply(503)) as failing, FakeEndpoint(Reply(200)) as fine:
        broken = scene.endpoint(database, failing.url)
        scene.endpoint(database, fine.url)
        announce(database, scene, 40)

        def served() -> bool:
            return states(database, scene)["delivered"] == 40

        asyncio.run(deliver_until(served, database, backoff=Backoff(first_seconds=0.01), breaker=LONG))
        with database.reading() as tx:
            found = endpoints.find_endpoint(tx, scene.project_id, broken.id)
            attempts = [one.attempts for one in scene.all(tx, endpoint_id=broken.id)]
    assert found is not None
    assert found.open_until is not None
    assert found.open_until > utc_now() + timedelta(minutes=50)
    assert 3 <= len(failing.received) <= 3 + 8, "those under way, and no more"
    assert sum(bool(count) for count in attempts) < 20


def test_an_endpoint_that_recovers_gets_everything(database: Database, scene: Scene) -> None:
    """When the one attempt goes well, all that waited is delivered, each event once."""
    with FakeEndpoint(lambda _request, number: Reply(503 if number < 3 else 200)) as fake:
        endpoint = scene.endpoint(database, fake.url)
        announce(database, scene, 20)
        breaker = BreakerLimits(failures=3, seconds=0.2)
        asyncio.run(
            deliver_until(settled(database, scene), database, backoff=Backoff(first_seconds=0.05), breaker=breaker)
        )
        with database.reading() as tx:
            found = endpoints.find_endpoint(tx, scene.project_id, endpoint.id)
    assert found is not None
    assert (found.failures, found.open_until) == (0, None)
    assert states(database, scene) == {"delivered": 20}
    assert len(set(fake.ids())) == 20


def test_each_attempt_is_on_record(database: Database, scene: Scene) -> None:
    """The log of a delivery holds where each attempt went and the start of what came back, however much it was."""
    replies = [Reply(500, body=b"x" * 5_000_000), Reply(200, body=b"ok")]
    with FakeEndpoint(lambda _request, number: replies[number]) as fake:
        scene.endpoint(database, fake.url)
        announce(database, scene)
        asyncio.run(deliver_until(settled(database, scene), database))
        with database.reading() as tx:
            first, second = deliveries.list_attempts(tx, scene.all(tx)[0])
    assert (first.url, first.status_code, second.url, second.answer) == (fake.url, 500, fake.url, "ok")
    assert first.answer == "x" * 1024


def test_slack_gets_a_message(database: Database, scene: Scene) -> None:
    """An endpoint of the format slack gets a text with blocks, signed as it was sent, and sealed secrets sign."""
    encryption = Encryption([bytes(32)])
    with FakeEndpoint(Reply(200, body=b"ok")) as fake:
        with database.transaction() as tx:
            endpoint = endpoints.add_endpoint(
                tx,
                scene.project_id,
                url=fake.url,
                event_types=["*"],
                now=utc_now(),
                format="slack",
                encryption=encryption,
            )
            data = {
                "project": {"id": str(scene.project_id), "name": "alignment"},
                "run": {"id": str(scene.run_id), "name": "ppo <3", "attempt": 1, "labels": {}},
            }
            scene.announce(tx, data=data, type="run.stopped")
            kept = tx.execute(sa.select(rows.c.secret).where(rows.c.id == endpoint.id)).scalar_one()
        asyncio.run(deliver_until(settled(database, scene), database, encryption=encryption))
    (received,) = fake.received
    assert json.loads(received.body)["text"] == "*ppo &lt;3* was stopped"
    assert "blocks" in Webhook(encryption.decrypt(kept, endpoint.id)).verify(received.body, received.headers)
