"""The outbox against a model: nothing is lost, nothing settled is sent again, and order is kept."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.queue import leases, outbox
from evalstop_service.store.queue.attempts import ClaimedDelivery, Dead, Delivered, Result, Retry
from evalstop_service.store.tables import deliveries as delivery_rows
from evalstop_service.store.tables import delivery_attempts
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.service.webhooks.delivery.fakes import EPOCH, claim_deliveries, seed_project, settle_delivery

pytestmark = pytest.mark.slow


@dataclass
class Expected:
    """The model's state of one delivery."""

    id: UUID
    run_id: UUID
    endpoint_id: UUID
    decision_id: UUID
    created_at: datetime
    due_at: datetime
    urgent: bool = False
    state: str = "waiting"
    attempts: int = 0
    settled_attempts: int = 0


RESULTS = ("delivered", "retry", "dead", "gone")


class OutboxMachine(RuleBasedStateMachine):
    """Workers, operators, crashes and clock changes act on an outbox and on a model of it."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.database = database
        self.now = EPOCH
        self.project = seed_project(database)
        with database.transaction() as tx:
            self.runs = [self.project.run_id, self.project.insert_run(tx)]
        self.endpoints = [self.project.add_endpoint(database, f"http://{number}.example") for number in range(2)]
        self.project.add_endpoint(database, "http://other-events.example", ("run.stopped",))
        self.enabled = {endpoint.id: True for endpoint in self.endpoints}
        self.model: dict[UUID, Expected] = {}
        self.held: list[ClaimedDelivery] = []
        self.decisions: list[tuple[UUID, UUID]] = []

    def list_due(self) -> list[Expected]:
        due_entries = [
            entry
            for entry in self.model.values()
            if entry.state == "waiting" and entry.due_at <= self.now and self.enabled[entry.endpoint_id]
            if not any(self.must_go_before(other, entry) for other in self.model.values())
        ]
        return sorted(due_entries, key=lambda entry: (entry.due_at, entry.id))

    def must_go_before(self, other: Expected, entry: Expected) -> bool:
        same_queue = (other.run_id, other.endpoint_id) == (entry.run_id, entry.endpoint_id)
        is_due = other.state == "waiting" and (other.attempts > 0 or other.due_at <= self.now)
        return same_queue and is_due and other.id < entry.id and (other.urgent or not entry.urgent)

    @initialize()
    def add_first_event(self) -> None:
        self.add_event(None, 0, False)
        self.claim_due(1, 5)

    @rule(wait=st.sampled_from([None, None, 0, 5, 40]), run=st.sampled_from([0, 0, 1]), urgent=st.booleans())
    def add_event(self, wait: int | None, run: int, urgent: bool) -> None:
        due_at = None if wait is None else self.now + timedelta(seconds=wait)
        with self.database.transaction() as tx:
            decision = self.project.insert_decision(tx, None, self.runs[run]).id
            event_type = "run.stop_requested" if urgent else "run.suspected"
            columns: dict[str, Any] = {"run_id": self.runs[run], "decision_id": decision, "event_type": event_type}
            event = self.project.add_event(tx, now=self.now, due_at=due_at, **columns)
            created = [delivery for delivery in self.project.list_deliveries(tx) if delivery.event_id == event]
        assert {delivery.endpoint_id for delivery in created} == {
            key for key, enabled in self.enabled.items() if enabled
        }
        self.decisions.append((self.runs[run], decision))
        for delivery in created:
            self.model[delivery.id] = Expected(
                delivery.id, delivery.run_id, delivery.endpoint_id, decision, self.now, due_at or self.now, urgent
            )

    @rule(seconds=st.sampled_from([1, 5, 30, 100]))
    def advance_clock(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(limit=st.integers(1, 4), lease_seconds=st.sampled_from([5, 30]))
    def claim_due(self, limit: int, lease_seconds: int) -> None:
        expected = self.list_due()[:limit]
        with self.database.transaction() as tx:
            claimed = claim_deliveries(tx, self.now, lease_seconds, limit)
        assert [delivery.id for delivery in claimed] == [entry.id for entry in expected]
        for delivery, known in zip(claimed, expected, strict=True):
            known.attempts += 1
            known.due_at = self.now + timedelta(seconds=lease_seconds)
            assert (delivery.attempts, delivery.lease_until) == (known.attempts, known.due_at)
        self.held += claimed

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def crash_worker(self, data: st.DataObject) -> None:
        self.held.remove(data.draw(st.sampled_from(self.held)))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), result=st.sampled_from(RESULTS), again=st.booleans())
    def settle_delivery(self, data: st.DataObject, result: str, again: bool) -> None:
        claimed = data.draw(st.sampled_from(self.held))
        if not again:  # otherwise the worker settles it a second time
            self.held.remove(claimed)
        self.settle_one(claimed, result)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), result=st.sampled_from(RESULTS))
    def settle_after_lease_end(self, data: st.DataObject, result: str) -> None:
        claimed = data.draw(st.sampled_from(self.held))
        self.now = max(self.now, claimed.lease_until)
        self.claim_due(4, 30)
        self.settle_one(claimed, result)

    @rule(result=st.sampled_from(RESULTS))
    def claim_and_settle(self, result: str) -> None:
        before = len(self.held)
        self.claim_due(4, 30)
        for claimed in self.held[before:]:
            self.settle_one(claimed, result)

    def settle_one(self, claimed: ClaimedDelivery, result: str) -> None:
        known = self.model[claimed.id]
        results: dict[str, Result] = {
            "delivered": Delivered(),
            "retry": Retry(self.now + timedelta(seconds=10), "HTTP 500"),
            "dead": Dead("HTTP 400"),
            "gone": Dead("HTTP 410", gone=True),
        }
        lease_held = known.state == "waiting" and known.attempts == claimed.attempts
        already_settled = lease_held and known.settled_attempts == known.attempts
        if already_settled:
            return  # no worker settles the same lease twice as a retry
        with self.database.transaction() as tx:
            assert settle_delivery(tx, claimed, results[result], self.now) == lease_held
        if not lease_held:
            return
        known.settled_attempts = known.attempts
        if result == "retry":
            known.due_at = self.now + timedelta(seconds=10)
        else:
            known.state = "delivered" if result == "delivered" else "dead"
        if result == "gone":
            self.enabled[known.endpoint_id] = False

    @precondition(lambda self: self.decisions)
    @rule(data=st.data())
    def cancel_decision(self, data: st.DataObject) -> None:
        run, decision = data.draw(st.sampled_from(self.decisions))
        stops = [entry for entry in self.model.values() if entry.decision_id == decision and entry.urgent]
        waiting = [entry for entry in stops if entry.state == "waiting"]
        with self.database.transaction() as tx:
            assert outbox.cancel_stop(tx, run, decision, self.now, "vetoed") == len(waiting)
        for delivery in waiting:
            delivery.state = "cancelled"

    @rule(index=st.integers(0, 1), enabled=st.sampled_from([True, True, False]))
    def switch_endpoint(self, index: int, enabled: bool) -> None:
        endpoint = self.endpoints[index]
        with self.database.transaction() as tx:
            endpoints.update_endpoint(tx, self.project.id, endpoint.id, enabled=enabled)
        self.enabled[endpoint.id] = enabled
        if enabled:  # what failed before is tried again at once
            for known in self.model.values():
                if known.endpoint_id == endpoint.id and known.settled_attempts == known.attempts > 0:
                    known.due_at = known.created_at

    @invariant()
    def rows_match_the_model(self) -> None:
        with self.database.reading() as tx:
            rows = {delivery.id: delivery for delivery in self.project.list_deliveries(tx)}
            assert [delivery.id for delivery in leases.find_due_deliveries(tx, self.now, 3, 3)] == [
                entry.id for entry in self.list_due()[:3]
            ]
        assert rows.keys() == self.model.keys()
        for known in self.model.values():
            row = rows[known.id]
            assert (row.state, row.attempts) == (known.state, known.attempts)
            assert (row.settled_at is None) == (known.state == "waiting")
            if known.state == "waiting":
                assert row.due_at == known.due_at

    def teardown(self) -> None:
        """At the end, every delivery that is neither dead nor cancelled can be delivered."""
        for index in range(2):
            self.switch_endpoint(index, True)
        self.now += timedelta(days=1)
        while self.list_due():
            with self.database.transaction() as tx:
                claimed = claim_deliveries(tx, self.now, 5, 100)
                for delivery in claimed:
                    assert settle_delivery(tx, delivery, Delivered(), self.now)
            assert claimed
            for delivery in claimed:
                self.model[delivery.id].attempts += 1
                self.model[delivery.id].state = "delivered"
        self.rows_match_the_model()


def test_outbox_matches_its_model(database: Database) -> None:
    """After any sequence of claims, settlements, retries, cancellations and clock changes, rows and model agree."""
    hypothesis_settings = settings(
        max_examples=4,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )

    class MachineOnDatabase(OutboxMachine):
        def __init__(self) -> None:
            with database.transaction() as tx:
                tx.execute(sa.delete(delivery_attempts))
                tx.execute(sa.delete(delivery_rows))
            super().__init__(database)

    run_state_machine_as_test(MachineOnDatabase, settings=hypothesis_settings)
