"""The veto window: a stop request is sent once it has ended, unless the stop was vetoed."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from http.server import BaseHTTPRequestHandler

import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.queue import outbox
from evalstop_service.store.tables import decisions as decision_table

from tests.service.webhooks.delivery.fakes import (
    FakeEndpoint,
    Reply,
    SeededProject,
    all_settled,
    announce_events,
    count_deliveries_by_state,
    deliver_until,
)


def add_stop_request(database: Database, project: SeededProject, window: timedelta) -> Decision:
    """Insert a pending decision and its event, as ingestion does."""
    now = utc_now()
    with database.transaction() as tx:
        decision = project.insert_decision(tx, now + window, now=now)
        project.add_event(tx, type="run.stop_requested", now=now, due_at=now + window, decision_id=decision.id)
    return decision


def load_decision_state(database: Database, decision: Decision) -> str:
    with database.reading() as tx:
        query = sa.select(decision_table.c.state).where(decision_table.c.id == decision.id)
        return str(tx.execute(query).scalar_one())


def test_stop_is_sent_after_the_veto_window(database: Database, project: SeededProject) -> None:
    """A stop is sent once its veto window has ended; its decision is `requested` by then."""
    states_at_delivery: list[str] = []
    decision: list[Decision] = []

    def behavior(_request: BaseHTTPRequestHandler, _number: int) -> Reply:
        states_at_delivery.append(load_decision_state(database, decision[0]))
        return Reply(200)

    with FakeEndpoint(behavior) as fake:
        project.add_endpoint(database, fake.url)
        decision.append(add_stop_request(database, project, timedelta(seconds=0.3)))
        asyncio.run(deliver_until(all_settled(database, project), database))
    assert states_at_delivery == [DecisionState.REQUESTED]
    assert utc_now() >= decision[0].due_at


def test_decision_is_requested_without_endpoints(database: Database, project: SeededProject) -> None:
    """A decision is `requested` after its veto window even without subscribers: the trainer may poll."""
    decision = add_stop_request(database, project, timedelta(0))
    asyncio.run(deliver_until(lambda: load_decision_state(database, decision) == DecisionState.REQUESTED, database))


def test_vetoed_stop_is_not_sent(database: Database, project: SeededProject) -> None:
    """A stop vetoed within its veto window is not sent, not even after the window."""
    with FakeEndpoint(Reply(200)) as fake:
        project.add_endpoint(database, fake.url)
        decision = add_stop_request(database, project, timedelta(seconds=0.2))
        with database.transaction() as tx:
            tx.execute(sa.update(decision_table).values(state=DecisionState.VETOED))
            assert outbox.cancel_stop(tx, project.run_id, decision.id, utc_now(), "vetoed") == 1
        announce_events(database, project)

        def window_ended() -> bool:
            return utc_now() > decision.due_at and "waiting" not in count_deliveries_by_state(database, project)

        asyncio.run(deliver_until(window_ended, database))
    assert len(fake.received) == 1
    assert count_deliveries_by_state(database, project) == {"cancelled": 1, "delivered": 1}
