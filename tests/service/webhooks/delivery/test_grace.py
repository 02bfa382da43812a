"""The veto window: what is decided goes out when it is over, and only if nobody said no."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from http.server import BaseHTTPRequestHandler

import sqlalchemy as sa
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.queue import outbox
from evalstop_service.store.tables import decisions as decision_rows

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


def a_decision(database: Database, scene: Scene, grace: timedelta) -> Decision:
    """A pending decision with its event, as ingest leaves them."""
    now = utc_now()
    with database.transaction() as tx:
        decision = scene.decision(tx, now + grace, now=now)
        scene.announce(tx, type="run.stop_requested", now=now, due_at=now + grace, decision_id=decision.id)
    return decision


def state_of(database: Database, decision: Decision) -> str:
    with database.reading() as tx:
        query = sa.select(decision_rows.c.state).where(decision_rows.c.id == decision.id)
        return str(tx.execute(query).scalar_one())


def test_sends_after_the_grace_period(database: Database, scene: Scene) -> None:
    """A stop is sent once its veto window is over, and its decision is `requested` by then."""
    seen: list[str] = []
    decision: list[Decision] = []

    def behavior(_request: BaseHTTPRequestHandler, _number: int) -> Reply:
        seen.append(state_of(database, decision[0]))
        return Reply(200)

    with FakeEndpoint(behavior) as fake:
        scene.endpoint(database, fake.url)
        decision.append(a_decision(database, scene, timedelta(seconds=0.3)))
        asyncio.run(deliver_until(settled(database, scene), database))
    assert seen == [DecisionState.REQUESTED]
    assert utc_now() >= decision[0].due_at


def test_a_decision_comes_due_without_endpoints(database: Database, scene: Scene) -> None:
    """A decision is `requested` after its veto window even if nobody subscribed: the trainer may be polling."""
    decision = a_decision(database, scene, timedelta(0))
    asyncio.run(deliver_until(lambda: state_of(database, decision) == DecisionState.REQUESTED, database))


def test_a_vetoed_stop_is_never_sent(database: Database, scene: Scene) -> None:
    """What was vetoed within the veto window is not sent, not even when that time is over."""
    with FakeEndpoint(Reply(200)) as fake:
        scene.endpoint(database, fake.url)
        decision = a_decision(database, scene, timedelta(seconds=0.2))
        with database.transaction() as tx:
            tx.execute(sa.update(decision_rows).values(state=DecisionState.VETOED))
            assert outbox.cancel_stop(tx, scene.run_id, decision.id, utc_now(), "vetoed") == 1
        announce(database, scene)

        def over() -> bool:
            return utc_now() > decision.due_at and "waiting" not in states(database, scene)

        asyncio.run(deliver_until(over, database))
    assert len(fake.received) == 1
    assert states(database, scene) == {"cancelled": 1, "delivered": 1}
