"""The outbox against a model, on both databases: nothing is lost, nothing settled is sent again, all in order."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from evalstop_service.store import endpoints
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.queue import deliveries, outbox, queues
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

from tests.service.webhooks.delivery.fakes import EPOCH, a_scene, settle, take


@dataclass
class Expected:
    """What the model knows of one delivery."""

    id: UUID
    run_id: UUID
    endpoint_id: UUID
    decision_id: UUID
    due_at: datetime
    urgent: bool = False
    state: str = "waiting"
    attempts: int = 0
    settled_attempts: int = 0


ENDS = ("delivered", "retry", "dead", "gone")


class OutboxMachine(RuleBasedStateMachine):
    """Workers, operators, crashes and time work on one outbox, and on a model of it."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.database = database
        self.now = EPOCH
        self.scene = a_scene(database)
        with database.transaction() as tx:
            self.runs = [self.scene.run_id, self.scene.another_run(tx)]
        self.endpoints = [self.scene.endpoint(database, f"http://{number}.example") for number in range(2)]
        self.scene.endpoint(database, "http://deaf.example", ("run.stopped",))
        self.enabled = {endpoint.id: True for endpoint in self.endpoints}
        self.model: dict[UUID, Expected] = {}
        self.held: list[ClaimedDelivery] = []
        self.decisions: list[tuple[UUID, UUID]] = []

    def due(self) -> list[Expected]:
        due = [
            one
            for one in self.model.values()
            if one.state == "waiting" and one.due_at <= self.now and self.enabled[one.endpoint_id]
            if not any(self.goes_first(other, one) for other in self.model.values())
        ]
        return sorted(due, key=lambda one: (one.due_at, one.id))

    def goes_first(self, other: Expected, one: Expected) -> bool:
        same_line = (other.run_id, other.endpoint_id) == (one.run_id, one.endpoint_id)
        under_way = other.state == "waiting" and (other.attempts > 0 or other.due_at <= self.now)
        return same_line and under_way and other.id < one.id and (other.urgent or not one.urgent)

    @initialize()
    def begin(self) -> None:
        self.announce(None, 0, False)
        self.claim(1, 5)

    @rule(wait=st.sampled_from([None, None, 0, 5, 40]), run=st.sampled_from([0, 0, 1]), urgent=st.booleans())
    def announce(self, wait: int | None, run: int, urgent: bool) -> None:
        due_at = None if wait is None else self.now + timedelta(seconds=wait)
        decision = new_id()
        with self.database.transaction() as tx:
            kind = "run.stop_requested" if urgent else "run.suspected"
            about: dict[str, Any] = {"run_id": self.runs[run], "decision_id": decision, "type": kind}
            event = self.scene.announce(tx, now=self.now, due_at=due_at, **about)
            made = [one for one in self.scene.all(tx) if one.event_id == event]
        assert {one.endpoint_id for one in made} == {key for key, enabled in self.enabled.items() if enabled}
        self.decisions.append((self.runs[run], decision))
        for one in made:
            self.model[one.id] = Expected(one.id, one.run_id, one.endpoint_id, decision, due_at or self.now, urgent)

    @rule(seconds=st.sampled_from([1, 5, 30, 100]))
    def time_passes(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(limit=st.integers(1, 4), lease_seconds=st.sampled_from([5, 30]))
    def claim(self, limit: int, lease_seconds: int) -> None:
        expected = self.due()[:limit]
        with self.database.transaction() as tx:
            claimed = take(tx, self.now, lease_seconds, limit)
        assert [one.id for one in claimed] == [one.id for one in expected]
        for one, known in zip(claimed, expected, strict=True):
            known.attempts += 1
            known.due_at = self.now + timedelta(seconds=lease_seconds)
            assert (one.attempts, one.lease_until) == (known.attempts, known.due_at)
        self.held += claimed

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.held.remove(data.draw(st.sampled_from(self.held)))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), end=st.sampled_from(ENDS), again=st.booleans())
    def settle(self, data: st.DataObject, end: str, again: bool) -> None:
        claimed = data.draw(st.sampled_from(self.held))
        if not again:  # or it comes back and settles twice
            self.held.remove(claimed)
        self.settle_one(claimed, end)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), end=st.sampled_from(ENDS))
    def settle_after_the_lease(self, data: st.DataObject, end: str) -> None:
        claimed = data.draw(st.sampled_from(self.held))
        self.now = max(self.now, claimed.lease_until)
        self.claim(4, 30)
        self.settle_one(claimed, end)

    @rule(end=st.sampled_from(ENDS))
    def work(self, end: str) -> None:
        before = len(self.held)
        self.claim(4, 30)
        for claimed in self.held[before:]:
            self.settle_one(claimed, end)

    def settle_one(self, claimed: ClaimedDelivery, end: str) -> None:
        known = self.model[claimed.id]
        ends: dict[str, Result] = {
            "delivered": Delivered(),
            "retry": Retry(self.now + timedelta(seconds=10), "HTTP 500"),
            "dead": Dead("HTTP 400"),
            "gone": Dead("HTTP 410", gone=True),
        }
        holds = known.state == "waiting" and known.attempts == claimed.attempts
        already = holds and known.settled_attempts == known.attempts
        if already:
            return  # the same lease settled twice as a retry is not a thing that one worker does
        with self.database.transaction() as tx:
            assert settle(tx, claimed, ends[end], self.now) == holds
        if not holds:
            return
        known.settled_attempts = known.attempts
        if end == "retry":
            known.due_at = self.now + timedelta(seconds=10)
        else:
            known.state = "delivered" if end == "delivered" else "dead"
        if end == "gone":
            self.enabled[known.endpoint_id] = False

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def retry_by_hand(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(list(self.model.values())))
        with self.database.transaction() as tx:
            assert deliveries.retry_delivery(tx, self.scene.project_id, known.id, self.now) == (known.state == "dead")
        if known.state == "dead":
            known.state, known.due_at = "waiting", self.now

    @precondition(lambda self: self.decisions)
    @rule(data=st.data())
    def veto(self, data: st.DataObject) -> None:
        run, decision = data.draw(st.sampled_from(self.decisions))
        stops = [one for one in self.model.values() if one.decision_id == decision and one.urgent]
        waiting = [one for one in stops if one.state == "waiting"]
        with self.database.transaction() as tx:
            assert outbox.cancel_stop(tx, run, decision, self.now, "vetoed") == len(waiting)
        for one in waiting:
            one.state = "cancelled"

    @rule(which=st.integers(0, 1), enabled=st.sampled_from([True, True, False]))
    def switch_endpoint(self, which: int, enabled: bool) -> None:
        endpoint = self.endpoints[which]
        with self.database.transaction() as tx:
            endpoints.update_endpoint(tx, self.scene.project_id, endpoint.id, enabled=enabled)
        self.enabled[endpoint.id] = enabled

    @invariant()
    def rows_are_as_the_model_says(self) -> None:
        with self.database.reading() as tx:
            rows = {one.id: one for one in self.scene.all(tx)}
            assert [one.id for one in queues.find_due_deliveries(tx, self.now, 3, 3)] == [
                one.id for one in self.due()[:3]
            ]
        assert rows.keys() == self.model.keys()
        for known in self.model.values():
            row = rows[known.id]
            assert (row.state, row.attempts) == (known.state, known.attempts)
            assert (row.settled_at is None) == (known.state == "waiting")
            if known.state == "waiting":
                assert row.due_at == known.due_at

    def teardown(self) -> None:
        """In the end everything that is neither dead nor cancelled can be delivered: nothing was lost on the way."""
        for which in range(2):
            self.switch_endpoint(which, True)
        self.now += timedelta(days=1)
        while self.due():
            with self.database.transaction() as tx:
                claimed = take(tx, self.now, 5, 100)
                for one in claimed:
                    assert settle(tx, one, Delivered(), self.now)
            assert claimed
            for one in claimed:
                self.model[one.id].attempts += 1
                self.model[one.id].state = "delivered"
        self.rows_are_as_the_model_says()


def test_outbox_follows_its_model(database: Database) -> None:
    """Whatever workers, operators, crashes and time do, the outbox does what its model says."""
    budget = settings(
        max_examples=40,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )

    class OnThisDatabase(OutboxMachine):
        def __init__(self) -> None:
            with database.transaction() as tx:
                tx.execute(sa.delete(delivery_attempts))
                tx.execute(sa.delete(delivery_rows))
            super().__init__(database)

    run_state_machine_as_test(OnThisDatabase, settings=budget)
