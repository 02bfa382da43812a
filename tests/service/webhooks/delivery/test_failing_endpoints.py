"""A running worker with endpoints that fail: circuit breakers, and the log of attempts."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.queue import outbox
from evalstop_service.store.queue.attempts import BreakerLimits
from evalstop_service.store.tables import endpoints as endpoint_rows
from evalstop_service.webhooks.retry import Backoff
from standardwebhooks import Webhook

from tests.service.webhooks.delivery.fakes import (
    FakeEndpoint,
    Reply,
    SeededProject,
    all_settled,
    announce_events,
    count_deliveries_by_state,
    deliver_until,
)

SLOW_BREAKER = BreakerLimits(failures=3, first_seconds=3600, longest_seconds=3600)


def test_open_breaker_stops_deliveries_to_one_endpoint(database: Database, project: SeededProject) -> None:
    """After repeated failures nothing more is sent to an endpoint, and another endpoint gets everything."""
    with FakeEndpoint(Reply(503)) as failing, FakeEndpoint(Reply(200)) as healthy:
        failing_endpoint = project.add_endpoint(database, failing.url)
        project.add_endpoint(database, healthy.url)
        announce_events(database, project, 40)

        def healthy_done() -> bool:
            return count_deliveries_by_state(database, project)["delivered"] == 40

        asyncio.run(deliver_until(healthy_done, database, backoff=Backoff(first_seconds=0.01), breaker=SLOW_BREAKER))
        with database.reading() as tx:
            loaded = endpoints.load_endpoint(tx, project.id, failing_endpoint.id)
            attempts = [delivery.attempts for delivery in project.list_deliveries(tx, endpoint_id=failing_endpoint.id)]
    assert loaded.open_until is not None
    assert loaded.open_until > utc_now() + timedelta(minutes=50)
    assert 3 <= len(failing.received) <= 3 + 8, "the three failures and the attempts already running"
    assert sum(bool(count) for count in attempts) < 20


def test_attempt_log_keeps_url_and_start_of_answer(database: Database, project: SeededProject) -> None:
    """The log of a delivery holds each attempt's URL and the first kilobyte of the answer."""
    replies = [Reply(500, body=b"x" * 5_000_000), Reply(200, body=b"ok")]
    with FakeEndpoint(lambda _request, number: replies[number]) as fake:
        project.add_endpoint(database, fake.url)
        announce_events(database, project)
        asyncio.run(deliver_until(all_settled(database, project), database))
        with database.reading() as tx:
            first, second = outbox.list_attempts(tx, project.list_deliveries(tx)[0])
    assert (first.url, first.status_code, second.url, second.answer) == (fake.url, 500, fake.url, "ok")
    assert first.answer == "x" * 1024


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
    assert message["text"].startswith("*ppo &lt;3* was stopped\n")
