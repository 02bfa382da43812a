"""A veto window is extended while the service cannot record vetoes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from uuid import UUID

import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.store import tables
from evalstop_service.store.database import Database

from tests.faults import raw_sockets
from tests.faults.retrying_clients import wait_until
from tests.fixtures.projects import create_named_key, create_project
from tests.security.served_project import ServedProject, create_pending_decision, serve_project
from tests.service.web.api.api_calls import expect_json
from tests.service.web.api.routes import ENDPOINT

WAIT_SECONDS = 60.0
STOPS = ["run.stop_requested"]


def end_windows(database: Database, at: datetime) -> None:
    """Set the end of all veto windows."""
    with database.transaction() as tx:
        tx.execute(tables.decisions.update().values(due_at=at))


def read_state_and_due_at(database: Database, decision_id: UUID) -> tuple[DecisionState, datetime]:
    with database.reading() as tx:
        query = sa.select(tables.decisions.c.state, tables.decisions.c.due_at)
        state, due_at = tx.execute(query.where(tables.decisions.c.id == decision_id)).one()
    return state, due_at


@contextmanager
def serve_pending_stops(database: Database) -> Iterator[ServedProject]:
    """Serve a project with an hour for a veto and an endpoint for stops."""
    with serve_project(database, veto_window_seconds=3600.0) as project:
        expect_json(project.open_client().post("/endpoints", json=ENDPOINT | {"event_types": STOPS}), 201)
        yield project


def test_failed_veto_extends_the_window(embedded_database: Database) -> None:
    """A person whose veto was answered with a 5xx has another minute; the windows of other projects do not move."""
    database = embedded_database
    with serve_pending_stops(database) as project:
        client = project.open_client()
        decision_id = UUID(create_pending_decision(client))
        with database.transaction() as tx:
            tx.exec_driver_sql(
                "CREATE TRIGGER broken BEFORE UPDATE ON decisions WHEN NEW.state = 'vetoed' "
                "BEGIN SELECT RAISE(ABORT, 'broken'); END"
            )
        create_project(database, "other", "enforce", 3600.0, utc_now(), "paper")
        other_key = create_named_key(database, "other", "k", ["admin"], utc_now())[1]
        other_id = UUID(create_pending_decision(project.open_client_with_key(other_key)))
        end_windows(database, utc_now() + timedelta(seconds=10))
        before = read_state_and_due_at(database, decision_id)[1]
        answer = client.post(f"/decisions/{decision_id}/veto", json={"reason": "broken eval"})
        assert answer.status_code >= 500
        deadline = time.monotonic() + WAIT_SECONDS
        while read_state_and_due_at(database, decision_id)[1] == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read_state_and_due_at(database, decision_id)[1] > before + timedelta(seconds=30)
        assert read_state_and_due_at(database, other_id)[1] == before, "vetoes of the other project did not fail"


def test_veto_whose_sender_gave_up_extends_the_window(embedded_database: Database) -> None:
    """A veto of which only a part arrived may be repeated: its sender may not have waited for a busy process."""
    with serve_pending_stops(embedded_database) as project:
        client = project.open_client()
        decision_id = UUID(create_pending_decision(client))
        end_windows(embedded_database, utc_now() + timedelta(seconds=10))
        before = read_state_and_due_at(embedded_database, decision_id)[1]
        key = client.headers["Authorization"].removeprefix("Bearer ")
        path = f"/api/v1/decisions/{decision_id}/veto"
        with raw_sockets.connect(str(client.base_url)) as connection:
            connection.sendall(raw_sockets.build_request_head("POST", path, key, Content_Length="100") + b'{"reason":')
        wait_until(
            lambda: read_state_and_due_at(embedded_database, decision_id)[1] > before + timedelta(seconds=30),
            "the window is extended",
        )


def test_malformed_sign_in_extends_no_window(embedded_database: Database) -> None:
    """Nobody can keep stops from being sent by forms that cannot be read."""
    with serve_pending_stops(embedded_database) as project:
        client = project.open_client()
        decision_id = UUID(create_pending_decision(client))
        end_windows(embedded_database, utc_now() + timedelta(seconds=10))
        before = read_state_and_due_at(embedded_database, decision_id)
        form = {"Content-Type": "multipart/form-data; boundary=a"}
        answer = client.post(f"{project.url}/login", content=b"not a form", headers=form)
        assert (answer.status_code, "Nothing was changed" in answer.text) == (400, True)
        time.sleep(1.2)  # the next round would extend it
        assert read_state_and_due_at(embedded_database, decision_id) == before
