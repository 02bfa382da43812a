"""The outbox against a model, on both databases: nothing is lost, nothing settled is sent again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_service.store import deliveries, endpoints, outbox
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.outbox import Claimed, Dead, Delivered, Result, Retry
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

from tests.service.delivery.fakes import EPOCH, Scene, a_scene, take


@dataclass
class Expected:
    """What the model knows of one delivery."""

    id: UUID
    endpoint_id: UUID
    decision_id: UUID
    due_at: datetime
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
        self.endpoints = [self.scene.endpoint(database, f"http://{number}.example") for number in range(2)]
        self.scene.endpoint(database, "http://deaf.example", ("run.stopped",))
        self.enabled = {endpoint.id: True for endpoint in self.endpoints}
        self.model: dict[UUID, Expected] = {}
        self.held: list[Claimed] = []
        self.decisions: list[UUID] = []

    def due(self) -> list[Expected]:
        due = [
            one
            for one in self.model.values()
            if one.state == "waiting" and one.due_at <= self.now and self.enabled[one.endpoint_id]
        ]
        return sorted(due, key=lambda one: (one.due_at, one.id))

    @initialize()
    def begin(self) -> None:
        self.announce(None)
        self.claim(1, 5)

    @rule(wait=st.sampled_from([None, 0, 5, 40]))
    def announce(self, wait: int | None) -> None:
        due_at = None if wait is None else self.now + timedelta(seconds=wait)
        decision = new_id()
        with self.database.transaction() as tx:
            event = self.scene.announce(tx, now=self.now, due_at=due_at, decision_id=decision)
            made = [one for one in self.scene.all(tx) if one.event_id == event]
        assert {one.endpoint_id for one in made} == {key for key, enabled in self.enabled.items() if enabled}
        self.decisions.append(decision)
        for one in made:
            self.model[one.id] = Expected(one.id, one.endpoint_id, decision, due_at or self.now)

    @rule(seconds=st.sampled_from([1, 5, 30, 100]))
    def time_passes(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(limit=st.integers(1, 4), lease_seconds=st.sampled_from([5, 30]))
    def claim(self, limit: int, lease_seconds: int) -> None:
        expected = self.due()[:limit]
        with self.database.transaction() as tx:
            claimed = outbox.claim(tx, self.now, lease_seconds, limit)
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

    def settle_one(self, claimed: Claimed, end: str) -> None:
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
            assert outbox.settle(tx, claimed, ends[end], at=self.now, duration_ms=1.0) == holds
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
            assert deliveries.retry(tx, self.scene.project_id, known.id, self.now) == (known.state == "dead")
        if known.state == "dead":
            known.state, known.due_at = "waiting", self.now

    @precondition(lambda self: self.decisions)
    @rule(data=st.data())
    def veto(self, data: st.DataObject) -> None:
        decision = data.draw(st.sampled_from(self.decisions))
        waiting = [one for one in self.model.values() if one.decision_id == decision and one.state == "waiting"]
        with self.database.transaction() as tx:
            assert outbox.cancel(tx, self.scene.run_id, decision, self.now) == len(waiting)
        for one in waiting:
            one.state = "cancelled"

    @rule(which=st.integers(0, 1), enabled=st.sampled_from([True, True, False]))
    def switch_endpoint(self, which: int, enabled: bool) -> None:
        endpoint = self.endpoints[which]
        with self.database.transaction() as tx:
            endpoints.change(tx, self.scene.project_id, endpoint.id, enabled=enabled)
        self.enabled[endpoint.id] = enabled

    @invariant()
    def rows_are_as_the_model_says(self) -> None:
        with self.database.reading() as tx:
            rows = {one.id: one for one in self.scene.all(tx)}
            assert [one.id for one in outbox.due(tx, self.now, 3)] == [one.id for one in self.due()[:3]]
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
                    assert outbox.settle(tx, one, Delivered(), at=self.now, duration_ms=1.0)
            assert claimed
            for one in claimed:
                self.model[one.id].attempts += 1
                self.model[one.id].state = "delivered"
        self.rows_are_as_the_model_says()


def test_outbox_follows_its_model(database: Database) -> None:
    """Whatever workers, operators, crashes and time do, the outbox does what its model says."""
    budget = settings(
        max_examples=80,
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


@pytest.fixture
def scene(database: Database) -> Scene:
    """A project with a run."""
    return a_scene(database)


def test_body_is_what_is_signed(database: Database, scene: Scene) -> None:
    """A claim carries the exact text that was written with the event: type, timestamp and data, in ASCII."""
    scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        event = outbox.announce(
            tx, project_id=scene.project_id, run_id=scene.run_id, type="run.stopped", data={"né": "\ud800"}, now=EPOCH
        )
        claimed = take(tx, EPOCH, 10, 1)
    assert claimed[0].event_id == event
    assert claimed[0].body.isascii()
    assert json.loads(claimed[0].body) == {
        "type": "run.stopped",
        "timestamp": "2026-01-01T00:00:00Z",
        "data": {"né": "\ud800"},
    }


def test_refuses_what_json_cannot_say(database: Database, scene: Scene) -> None:
    """NaN in an event is a mistake of ours and stops the transaction, since no receiver could read it."""
    with pytest.raises(ValueError, match="JSON"), database.transaction() as tx:
        outbox.announce(
            tx,
            project_id=scene.project_id,
            run_id=scene.run_id,
            type="run.stopped",
            data={"x": float("nan")},
            now=EPOCH,
        )


def test_rolls_back_with_its_cause(database: Database, scene: Scene) -> None:
    """An event whose transaction fails was never announced."""
    scene.endpoint(database, "http://x.example")

    def fail() -> None:
        with database.transaction() as tx:
            scene.announce(tx)
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    with database.reading() as tx:
        assert scene.all(tx) == []
        assert outbox.due(tx, EPOCH, 1) == []


@pytest.mark.parametrize("late", [Delivered(), Dead("HTTP 400"), Retry(EPOCH, "HTTP 500"), Dead("gone", gone=True)])
def test_a_lost_lease_changes_nothing(database: Database, scene: Scene, late: Result) -> None:
    """A worker that comes back after its lease was taken over can neither settle, record nor disable anything."""
    endpoint = scene.endpoint(database, "http://x.example")
    later = EPOCH + timedelta(seconds=11)
    with database.transaction() as tx:
        scene.announce(tx)
        (lost,) = take(tx, EPOCH, 10, 1)
        assert take(tx, later - timedelta(seconds=2), 10, 1) == []
        (held,) = take(tx, later, 10, 1)
        assert not outbox.settle(tx, lost, late, at=later, duration_ms=1.0)
        (delivery,) = scene.all(tx)
        assert (delivery.state, delivery.due_at, delivery.attempts) == ("waiting", held.lease_until, 2)
        assert deliveries.attempts(tx, delivery) == []
        assert endpoints.find(tx, scene.project_id, endpoint.id) == endpoint
        assert outbox.settle(tx, held, Delivered(), at=later, duration_ms=1.0)
        assert not outbox.settle(tx, lost, Dead("HTTP 400"), at=later, duration_ms=1.0)
        assert scene.all(tx)[0].state == "delivered"


def test_goes_to_subscribers(database: Database, scene: Scene) -> None:
    """An event goes to the endpoints of its own project that subscribed to its type and are enabled."""
    all_of_them = scene.endpoint(database, "http://all.example")
    this_one = scene.endpoint(database, "http://this.example", ("run.stopped", "run.suspected"))
    scene.endpoint(database, "http://another.example", ("run.stopped",))
    off = scene.endpoint(database, "http://off.example")
    gone = scene.endpoint(database, "http://gone.example")
    a_scene(database).endpoint(database, "http://stranger.example")
    with database.transaction() as tx:
        endpoints.change(tx, scene.project_id, off.id, enabled=False)
        endpoints.delete(tx, scene.project_id, gone.id, now=EPOCH)
        scene.announce(tx)
        assert {one.endpoint_id for one in scene.all(tx)} == {all_of_them.id, this_one.id}


def test_one_endpoint_leaves_room(database: Database, scene: Scene) -> None:
    """An endpoint with a long queue gets its share and no more, less what is under way to it already."""
    busy = scene.endpoint(database, "http://busy.example", ("run.suspected",))
    with database.transaction() as tx:
        for number in range(10):
            scene.announce(tx, number)
    quiet = scene.endpoint(database, "http://quiet.example")
    with database.transaction() as tx:
        scene.announce(tx, 10, now=EPOCH + timedelta(seconds=1))
        now = EPOCH + timedelta(seconds=2)
        first = take(tx, now, 60, 8, per_endpoint=3)
        second = take(tx, now, 60, 8, per_endpoint=3, in_flight={busy.id: 3})
        third = take(tx, now, 60, 8, per_endpoint=3, in_flight={busy.id: 2})
    assert [one.endpoint_id for one in first] == [busy.id, busy.id, busy.id, quiet.id]
    assert second == []
    assert [one.endpoint_id for one in third] == [busy.id]


def test_lists_by_pages(database: Database, scene: Scene) -> None:
    """Deliveries are listed newest first, page by page, each once, filtered, and only those of the project."""
    endpoint = scene.endpoint(database, "http://x.example")
    stranger = a_scene(database)
    stranger.endpoint(database, "http://stranger.example")
    with database.transaction() as tx:
        for number in range(7):
            scene.announce(tx, number)
            stranger.announce(tx, number)
        claimed = take(tx, EPOCH, 10, 100)
        dead = next(one for one in claimed if one.endpoint_id == endpoint.id)
        outbox.settle(tx, dead, Dead("HTTP 400: no"), at=EPOCH, duration_ms=3.5, status_code=400)
    pages: list[UUID] = []
    with database.reading() as tx:
        before = None
        while page := deliveries.listing(tx, scene.project_id, before=before, limit=3):
            pages += [one.id for one in page]
            before = pages[-1]
        assert [one.id for one in scene.all(tx)] == pages == sorted(pages, reverse=True)
        assert len(pages) == 7
        found = scene.all(tx, state="dead", endpoint_id=endpoint.id)
        assert [one.id for one in found] == [dead.id]
        assert scene.all(tx, endpoint_id=new_id()) == []
        assert deliveries.find(tx, stranger.project_id, dead.id) is None
        assert [(a.number, a.status_code, a.error, a.duration_ms) for a in deliveries.attempts(tx, found[0])] == [
            (1, 400, "HTTP 400: no", 3.5)
        ]
    with database.transaction() as tx:
        assert not deliveries.retry(tx, stranger.project_id, dead.id, EPOCH)


def test_deleting_an_endpoint_cancels(database: Database, scene: Scene) -> None:
    """A deleted endpoint is gone from sight, its waiting deliveries are cancelled, and none can be revived."""
    endpoint = scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        scene.announce(tx)
        scene.announce(tx)
        claimed = take(tx, EPOCH, 10, 1)[0]
        outbox.settle(tx, claimed, Dead("HTTP 400"), at=EPOCH, duration_ms=1.0)
        assert endpoints.delete(tx, scene.project_id, endpoint.id, now=EPOCH)
        assert not endpoints.delete(tx, scene.project_id, endpoint.id, now=EPOCH)
        assert endpoints.find(tx, scene.project_id, endpoint.id) is None
        assert endpoints.listing(tx, scene.project_id) == []
        assert sorted(one.state for one in scene.all(tx)) == ["cancelled", "dead"]
        assert not deliveries.retry(tx, scene.project_id, claimed.id, EPOCH)


def test_endpoints_belong_to_projects(database: Database, scene: Scene) -> None:
    """Another project can neither see, change, rotate nor delete an endpoint."""
    endpoint = scene.endpoint(database, "http://x.example")
    stranger = a_scene(database).project_id
    with database.transaction() as tx:
        assert endpoints.find(tx, stranger, endpoint.id) is None
        assert endpoints.change(tx, stranger, endpoint.id, url="http://evil.example") is None
        assert endpoints.rotate_secret(tx, stranger, endpoint.id, now=EPOCH) is None
        assert not endpoints.delete(tx, stranger, endpoint.id, now=EPOCH)
        assert endpoints.find(tx, scene.project_id, endpoint.id) == endpoint


def test_changes_what_is_given(database: Database, scene: Scene) -> None:
    """A change leaves alone what it does not name, and what waits goes to the new URL."""
    endpoint = scene.endpoint(database, "http://old.example")
    with database.transaction() as tx:
        scene.announce(tx)
        changed = endpoints.change(tx, scene.project_id, endpoint.id, url="http://new.example")
        assert changed is not None
        assert (changed.url, changed.event_types, changed.enabled) == ("http://new.example", ("*",), True)
        assert endpoints.change(tx, scene.project_id, endpoint.id) == changed
        assert take(tx, EPOCH, 10, 1)[0].url == "http://new.example"


def test_rotates_with_two_valid(database: Database, scene: Scene) -> None:
    """After a rotation both secrets sign for the hours given, then the new one alone."""
    endpoint = scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        rotated = endpoints.rotate_secret(tx, scene.project_id, endpoint.id, now=EPOCH, previous_valid_hours=2)
        assert rotated is not None
        scene.announce(tx)
        scene.announce(tx)
        during = take(tx, EPOCH + timedelta(hours=1), 10, 1)[0]
        after = take(tx, EPOCH + timedelta(hours=2), 10, 1)[0]
    assert during.secrets == (rotated.secret, endpoint.secret)
    assert after.secrets == (rotated.secret,)
    assert rotated.secret != endpoint.secret


def test_claims_by_the_index(database: Database, scene: Scene) -> None:
    """A look into the outbox reads the index of what waits, not all deliveries that ever were."""
    scene.endpoint(database, "http://x.example")
    with database.transaction() as tx:
        scene.announce(tx)
    statements: list[tuple[str, object]] = []

    def keep(_c: object, _cursor: object, statement: str, parameters: object, _context: object, _many: bool) -> None:
        statements.append((statement, parameters))

    with database.reading() as tx:
        sa.event.listen(database.engine, "before_cursor_execute", keep)
        outbox.due(tx, EPOCH, 1, 8, {scene.run_id: 1})
        sa.event.remove(database.engine, "before_cursor_execute", keep)
        if not database.embedded:
            tx.exec_driver_sql("SET LOCAL enable_seqscan = off")  # one row is read faster without an index
        explain = "EXPLAIN QUERY PLAN " if database.embedded else "EXPLAIN "
        plan = str(tx.exec_driver_sql(explain + statements[0][0], statements[0][1]).all())  # type: ignore[arg-type]
    assert "ix_deliveries_due_at" in plan
