"""The outbox: events and their deliveries are added and cancelled in the transaction that causes them."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.domain.event_types import EventType
from evalstop_service.store import endpoints, tables
from evalstop_service.store.database import Database, read_now
from evalstop_service.store.queue import outbox
from evalstop_service.store.queue.outbox import StopReach

from tests.service.webhooks.delivery.fakes import (
    EPOCH,
    SeededProject,
    claim_deliveries,
    seed_project,
)

REASON = "the run went on in a new attempt"


def test_claim_carries_the_stored_body(database: Database, project: SeededProject) -> None:
    """A claim carries the exact text stored with the event: type, timestamp and data, in ASCII."""
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        event = outbox.add_event(
            tx,
            project_id=project.id,
            run_id=project.run_id,
            event_type=EventType("run.stopped"),
            data={"né": "\ud800"},
            now=EPOCH,
        )
        claimed = claim_deliveries(tx, EPOCH, 10, 1)
    assert claimed[0].event_id == event
    assert claimed[0].body.isascii()
    assert json.loads(claimed[0].body) == {
        "type": "run.stopped",
        "timestamp": "2026-01-01T00:00:00Z",
        "data": {"né": "\ud800"},
    }


def test_nan_in_an_event_is_refused(database: Database, project: SeededProject) -> None:
    """NaN in an event raises an error and aborts the transaction: JSON has no NaN."""
    with pytest.raises(ValueError, match="JSON"), database.transaction() as tx:
        outbox.add_event(
            tx,
            project_id=project.id,
            run_id=project.run_id,
            event_type=EventType("run.stopped"),
            data={"x": float("nan")},
            now=EPOCH,
        )


def test_event_goes_to_subscribed_endpoints(database: Database, project: SeededProject) -> None:
    """An event goes to the project's enabled endpoints that subscribe to its type."""
    all_types = project.add_endpoint(database, "http://all.example")
    two_types = project.add_endpoint(database, "http://this.example", ("run.stopped", "run.suspected"))
    project.add_endpoint(database, "http://another.example", ("run.stopped",))
    disabled = project.add_endpoint(database, "http://off.example")
    deleted = project.add_endpoint(database, "http://gone.example")
    seed_project(database).add_endpoint(database, "http://stranger.example")
    with database.transaction() as tx:
        endpoints.update_endpoint(tx, project.id, disabled.id, enabled=False)
        endpoints.delete_endpoint(tx, project.id, deleted.id, now=EPOCH)
        project.add_event(tx)
        assert {delivery.endpoint_id for delivery in project.list_deliveries(tx)} == {all_types.id, two_types.id}


def test_cancelling_a_stop_cancels_only_its_deliveries(database: Database, project: SeededProject) -> None:
    """Cancelling cancels a decision's waiting stop requests, not its other events nor another decision's stop."""
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        first, second = project.insert_decision(tx, attempt=1), project.insert_decision(tx, attempt=2)
        stop = project.add_event(tx, 1, event_type=EventType("run.stop_requested"), decision_id=first.id)
        failure_event = project.add_event(tx, 2, event_type=EventType("run.stop_failed"), decision_id=first.id)
        other_stop = project.add_event(tx, 3, event_type=EventType("run.stop_requested"), decision_id=second.id)
        assert outbox.cancel_stop(tx, project.run_id, first.id, EPOCH, REASON) == 1
        assert outbox.cancel_stop(tx, project.run_id, first.id, EPOCH, REASON) == 0
        results = {delivery.event_id: (delivery.state, delivery.last_error) for delivery in project.list_deliveries(tx)}
        assert results == {
            stop: ("cancelled", REASON),
            failure_event: ("waiting", None),
            other_stop: ("waiting", None),
        }
        assert {delivery.event_id for delivery in claim_deliveries(tx, EPOCH, 10, 10)} == {failure_event, other_stop}


def test_new_stop_request_replaces_the_previous(database: Database, project: SeededProject) -> None:
    """Each endpoint has at most one waiting stop of a decision: the last type that it subscribes to."""
    both_types = project.add_endpoint(database, "http://x.example", ("run.stop_requested", "run.stop_escalated"))
    requests_only = project.add_endpoint(database, "http://y.example", ("run.stop_requested",))
    with database.transaction() as tx:
        decision = project.insert_decision(tx)
        for event_type in ("run.stop_requested", "run.stop_requested", "run.stop_escalated"):
            project.add_event(tx, event_type=event_type, decision_id=decision.id)
        waiting = {
            (delivery.endpoint_id, delivery.event_type) for delivery in project.list_deliveries(tx, state="waiting")
        }
        assert waiting == {(both_types.id, "run.stop_escalated"), (requests_only.id, "run.stop_requested")}
        assert len(project.list_deliveries(tx, state="cancelled")) == 3


def test_stop_reach_follows_the_delivery(database: Database, project: SeededProject) -> None:
    """A stop cancelled before its first attempt reached nobody; one that a worker claimed may have arrived."""
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        decision = project.insert_decision(tx)
        assert outbox.read_stop_reach(tx, project.run_id, decision.id) == StopReach(addressed=False, tried=False)
        project.add_event(tx, event_type=EventType("run.stop_on_hold"), decision_id=decision.id)
        assert outbox.read_stop_reach(tx, project.run_id, decision.id) == StopReach(addressed=False, tried=False)
        project.add_event(tx, event_type=EventType("run.stop_requested"), decision_id=decision.id)
        assert outbox.read_stop_reach(tx, project.run_id, decision.id) == StopReach(addressed=True, tried=False)
        outbox.cancel_stop(tx, project.run_id, decision.id, EPOCH, REASON)
        assert outbox.read_stop_reach(tx, project.run_id, decision.id) == StopReach(addressed=False, tried=False)
        project.add_event(tx, event_type=EventType("run.stop_requested"), decision_id=decision.id)
        claim_deliveries(tx, EPOCH, 60, 2)
        outbox.cancel_stop(tx, project.run_id, decision.id, EPOCH, REASON)
        assert outbox.read_stop_reach(tx, project.run_id, decision.id) == StopReach(addressed=True, tried=True)


def test_chat_endpoint_is_no_receiver(database: Database, project: SeededProject) -> None:
    """A stop sent only to a chat channel is addressed to no receiver that could end the job."""
    chat = project.add_endpoint(database, "http://chat.example")
    with database.transaction() as tx:
        tx.execute(sa.update(tables.endpoints).where(tables.endpoints.c.id == chat.id).values(format="slack"))
        decision = project.insert_decision(tx)
        project.add_event(tx, event_type=EventType("run.stop_requested"), decision_id=decision.id)
        claim_deliveries(tx, EPOCH, 60, 1)
        assert outbox.read_stop_reach(tx, project.run_id, decision.id) == StopReach(addressed=False, tried=False)


def test_event_is_due_despite_clock_skew(postgres_database: Database) -> None:
    """An event without a delay is due at once, even if the writer's clock is ahead of the database's; no other is."""
    project = seed_project(postgres_database)
    project.add_endpoint(postgres_database, "http://x.example")
    with postgres_database.transaction() as tx:
        project.add_event(tx, now=utc_now() + timedelta(minutes=10))
        project.add_event_of_new_run(tx, now=utc_now(), due_at=utc_now() + timedelta(minutes=10))
    with postgres_database.transaction() as tx:
        assert len(claim_deliveries(tx, read_now(tx, utc_now), 60, 2)) == 1
