"""If vetoes cannot be heard, stops are not sent: the window in which one can be said is extended."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from uuid import UUID

import httpx
import pytest
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import endpoints, tables
from evalstop_service.store.database import Database
from evalstop_service.store.queue.attempts import ClaimedDelivery
from evalstop_service.store.queue.breakers import BreakerLimits
from evalstop_service.webhooks.delivery.claim import ClaimLimits, DeliveryRules, settle_and_claim

from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_project
from tests.security.stops import create_pending_decision
from tests.service.web.api.api_calls import expect_json

WAIT_SECONDS = 30.0


def end_window(database: Database, at: datetime) -> None:
    """Have all veto windows end then."""
    with database.transaction() as tx:
        tx.execute(tables.decisions.update().values(due_at=at))
        tx.execute(tables.deliveries.update().values(due_at=at))


def read_window(database: Database, decision_id: UUID) -> tuple[DecisionState, datetime]:
    with database.reading() as tx:
        query = sa.select(tables.decisions.c.state, tables.decisions.c.due_at)
        state, due_at = tx.execute(query.where(tables.decisions.c.id == decision_id)).one()
    return state, due_at


def claim(database: Database) -> list[ClaimedDelivery]:
    rules = DeliveryRules(BreakerLimits(), Encryption())
    return list(settle_and_claim(database, utc_now, rules, (), ClaimLimits(10, 10, {}, 30.0)).claimed)


@pytest.fixture
def client_key(database: Database) -> str:
    """A key to a project that has one endpoint for stops, and an hour for a veto."""
    project = create_project(database, "p", "enforce", 3600.0, utc_now(), "paper")
    with database.transaction() as tx:
        endpoints.add_endpoint(
            tx, project.id, url="http://127.0.0.1:9/", event_types=["run.stop_requested"], now=utc_now()
        )
    return api_keys.create_named_key(database, "p", "k", ["admin"], utc_now())[1]


def test_a_window_that_ended_unseen_is_extended(database: Database, client_key: str) -> None:
    """A window that ended while nothing could be written, as when the service was down, is open again for a minute."""
    headers = {"Authorization": f"Bearer {client_key}"}
    with (
        start_server(database) as url,
        httpx.Client(base_url=f"{url}/api/v1", headers=headers, trust_env=False) as client,
    ):
        decision_id = UUID(create_pending_decision(client))
        end_window(database, utc_now() - timedelta(seconds=600))
        assert claim(database) == []
        state, due_at = read_window(database, decision_id)
        assert state == DecisionState.PENDING
        assert due_at > utc_now() + timedelta(seconds=30)
        assert claim(database) == []
        expect_json(client.post(f"/decisions/{decision_id}/veto", json={"actor": "dana", "reason": "broken eval"}), 200)


def test_a_window_that_ended_just_now_is_over(database: Database, client_key: str) -> None:
    """A window that ends while the service is well is not extended."""
    headers = {"Authorization": f"Bearer {client_key}"}
    with (
        start_server(database) as url,
        httpx.Client(base_url=f"{url}/api/v1", headers=headers, trust_env=False) as client,
    ):
        decision_id = UUID(create_pending_decision(client))
        end_window(database, utc_now() - timedelta(seconds=1))
        assert len(claim(database)) == 1
        assert read_window(database, decision_id)[0] == DecisionState.REQUESTED


def test_a_veto_that_could_not_be_written_extends_the_window(database: Database, client_key: str) -> None:
    """Whoever is answered that the service failed has a minute to veto again."""
    headers = {"Authorization": f"Bearer {client_key}"}
    if not database.embedded:
        pytest.skip("the fault is written as a trigger of SQLite")
    with (
        start_server(database) as url,
        httpx.Client(base_url=f"{url}/api/v1", headers=headers, trust_env=False) as client,
    ):
        decision_id = UUID(create_pending_decision(client))
        with database.transaction() as tx:
            tx.exec_driver_sql(
                "CREATE TRIGGER broken BEFORE UPDATE ON decisions WHEN NEW.state = 'vetoed' "
                "BEGIN SELECT RAISE(ABORT, 'broken'); END"
            )
        create_project(database, "other", "enforce", 3600.0, utc_now(), "paper")
        other_key = api_keys.create_named_key(database, "other", "k", ["admin"], utc_now())[1]
        client.headers["Authorization"] = f"Bearer {other_key}"
        other_id = UUID(create_pending_decision(client))
        client.headers.update(headers)
        end_window(database, utc_now() + timedelta(seconds=10))
        before = read_window(database, decision_id)[1]
        answer = client.post(f"/decisions/{decision_id}/veto", json={"actor": "dana", "reason": "broken eval"})
        assert answer.status_code >= 500
        deadline = time.monotonic() + WAIT_SECONDS
        while read_window(database, decision_id)[1] == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read_window(database, decision_id)[1] > before + timedelta(seconds=30)
        assert read_window(database, other_id)[1] == before, "of another project, whose people were heard"
        with database.reading() as tx:
            due = tx.execute(sa.select(tables.deliveries.c.due_at)).scalars().one()
        assert due == read_window(database, decision_id)[1]
