"""Shares of the processor: a sender over its half waits while others are active."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import cast
from uuid import UUID, uuid4

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.domain.decision_lifecycle import Mode
from evalstop_service.domain.run import Call, Verdict
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.errors import NotFound
from evalstop_service.ingest import Committer, Observations, Receipt, ValueConflict
from evalstop_service.ingest import Message as IngestMessage
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.security.rate_limits import Rate, RateLimit
from evalstop_service.store.database import Database, Work
from evalstop_service.store.runs import Run
from evalstop_service.web.api.ingest_endpoint import IngestEndpoint
from evalstop_service.web.limits import ACTIVE_SECONDS, ROUTE_MS, Lane, Limits, Processor
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from tests.fixtures.projects import create_named_key, create_project

BUSY, OTHER = Work("busy", "a"), Work("other", "b")


class RecordedCharges(RateLimit):
    """Records what is charged and delays nobody."""

    def __init__(self) -> None:
        super().__init__(Rate(burst=1e9, per_second=1.0))
        self.costs: list[float] = []

    def charge(self, who: Hashable, cost: float) -> None:
        if isinstance(who, tuple) and who[0] == "key":  # the same is charged to its project
            self.costs.append(cost)


@dataclass
class Loop:
    """A clock and CPU time that tests advance, and the processor measured by them."""

    now: float = 0.0
    cpu_seconds: float = 0.0
    delayed: int = 0
    limit: RateLimit | None = None

    def __post_init__(self) -> None:
        self.processor = Processor(self.count, self.limit, lambda: self.now, lambda: self.cpu_seconds)

    def count(self) -> None:
        self.delayed += 1

    def send(self, key: Work, milliseconds: float) -> None:
        """A request of this key that takes so much CPU time."""
        asyncio.run(self.processor.wait_for_share(key))
        began = self.processor.begin_post(key)
        self.advance(milliseconds)
        self.processor.end_post(key, began)

    def send_other(self, sender: Work) -> None:
        """A request of this sender to another part of the app."""
        asyncio.run(self.processor.wait_for_share(sender))
        self.processor.charge(sender, ROUTE_MS)

    def advance(self, milliseconds: float) -> None:
        """Advance the clock and the CPU time."""
        self.cpu_seconds += milliseconds / 1000
        self.now += milliseconds / 1000


def test_single_active_key_never_waits() -> None:
    """Time that a key used while no other key sent requests is not charged."""
    loop = Loop()
    for _ in range(20):
        loop.send(BUSY, 100.0)
    loop.send_other(OTHER)
    loop.send(BUSY, 100.0)
    assert loop.delayed == 0


def test_key_over_its_half_waits_while_another_is_active() -> None:
    """After 100 ms, of which 10 ms are free, it waits for twice the rest, and the other key does not wait."""
    loop = Loop()
    loop.send_other(OTHER)
    loop.send(BUSY, 100.0)
    loop.send_other(OTHER)
    assert loop.processor.find_wait(OTHER) == 0
    assert 0.15 <= loop.processor.find_wait(BUSY) <= 0.2


def test_wait_ends_once_other_keys_are_inactive() -> None:
    """One second after the last request of another key it may send, whatever it used."""
    loop = Loop()
    loop.send_other(OTHER)
    loop.send(BUSY, 60_000.0)
    loop.send_other(OTHER)
    assert loop.processor.find_wait(BUSY) > ACTIVE_SECONDS
    loop.now += ACTIVE_SECONDS
    assert loop.processor.find_wait(BUSY) == 0


def test_waiting_for_the_database_is_not_charged() -> None:
    """A key is charged for CPU time of the loop, not for the duration of its requests."""
    loop = Loop()
    loop.send_other(OTHER)
    asyncio.run(loop.processor.wait_for_share(BUSY))
    began = loop.processor.begin_post(BUSY)
    assert began is not None
    loop.now += 60.0
    loop.processor.end_post(BUSY, began)
    loop.send_other(OTHER)
    assert loop.processor.find_wait(BUSY) == 0


def test_decisions_and_projects_have_accounts_of_their_own() -> None:
    """A key in debt for its posts may veto at once; one that floods with vetoes waits; and so does each other key of a
    project that has used more than half, while a key of another project does not."""
    loop, veto = Loop(), BUSY._replace(is_decision=True)
    loop.send_other(OTHER)
    loop.processor.charge(BUSY, 100.0)
    loop.send_other(OTHER)
    assert loop.processor.find_wait(BUSY) > 0
    assert loop.processor.find_wait(BUSY._replace(key="colleague")) > 0
    assert loop.processor.find_wait(OTHER) == 0
    assert loop.processor.find_wait(veto) == 0
    loop.processor.charge(veto, 100.0)
    assert loop.processor.find_wait(veto) > 0


def test_few_requests_of_a_sender_go_on_at_once_when_its_debt_is_paid() -> None:
    """Those that waited together go on one after the other, each once it has a thread and what the last one used is
    paid; a veto of the same key goes on meanwhile."""
    loop = Loop()
    loop.send_other(OTHER)
    loop.processor.charge(BUSY, 100.0)
    loop.send_other(OTHER)

    async def call() -> None:
        lane = Lane(4, loop.processor)
        calls = [asyncio.create_task(lane.run(BUSY, lambda: loop.processor.charge(BUSY, 100.0))) for _ in range(2)]
        await asyncio.sleep(0.02)
        await asyncio.wait_for(lane.run(BUSY._replace(is_decision=True, key="veto"), lambda: None), 1.0)
        assert not any(task.done() for task in calls)
        loop.now += loop.processor.find_wait(BUSY)
        await asyncio.wait_for(calls[0], 5.0)
        await asyncio.sleep(0.02)
        assert not calls[1].done()
        loop.now += ACTIVE_SECONDS
        await calls[1]

    asyncio.run(call())


@given(st.lists(st.tuples(st.sampled_from([BUSY, OTHER]), st.floats(0.0, 50.0)), min_size=1, max_size=20))
def test_overlapping_requests_are_charged_once(steps: list[tuple[Work, float]]) -> None:
    """The charges add up to the CPU time of the loop, however requests overlap."""
    charges = RecordedCharges()
    loop = Loop(limit=charges)

    async def overlap() -> None:
        posts = []
        for key, milliseconds in steps:
            other = BUSY if key == OTHER else OTHER
            await loop.processor.wait_for_share(other)
            loop.processor.charge(other, ROUTE_MS)
            await loop.processor.wait_for_share(key)
            posts.append((key, loop.processor.begin_post(key)))
            loop.advance(milliseconds)
        for key, began in posts:
            loop.processor.end_post(key, began)

    asyncio.run(overlap())
    routes = ROUTE_MS * (len(steps) - 1)  # the first is not charged: nobody else was active
    assert sum(charges.costs) == pytest.approx(routes + sum(milliseconds for _, milliseconds in steps), abs=1e-6)


def test_post_of_a_key_in_debt_waits(embedded_database: Database) -> None:
    """The endpoint charges each key for its posts, and another key's post is answered meanwhile."""
    create_project(embedded_database, "p", "shadow", 0.0, utc_now())
    busy, other = (create_named_key(embedded_database, "p", name, ["admin"], utc_now()) for name in "ab")
    run_id, limit = uuid4(), RateLimit(Rate(burst=1.0, per_second=1e-9))
    loop = Loop(limit=limit)
    committer = cast(Committer, FakeCommitter({run_id}))
    limits = Limits()
    limits.processor = loop.processor
    key_cache = KeyCache(embedded_database, 60.0)
    endpoint = IngestEndpoint(refuse_all, committer, key_cache, utc_now, lambda _: False, lambda _: None, limits)

    async def post(secret: str) -> int:
        statuses = list[int]()

        async def receive() -> Message:
            body = b'{"observations": [{"metric": "eval", "step": 1, "value": 0.5}]}'
            return {"type": "http.request", "body": body}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [
            (b"authorization", f"Bearer {secret}".encode()),
            (b"content-type", b"application/json"),
            (b"content-length", b"63"),
        ]
        path = f"/api/v1/runs/{run_id}/observations"
        await endpoint({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
        return statuses[0]

    async def post_both() -> bool:
        assert [await post(busy[1]), await post(other[1])] == [200, 200]
        limit.charge(("key", False, busy[0].id), 1000.0)
        waiting = asyncio.create_task(post(busy[1]))
        assert await post(other[1]) == 200
        still_waits = not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return still_waits

    assert asyncio.run(post_both())
    assert loop.delayed == 1


async def refuse_all(scope: Scope, receive: Receive, send: Send) -> None:
    """The app behind the endpoint, which must not be called."""
    raise AssertionError(scope["path"])


NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


@dataclass
class FakeCommitter:
    """Stores observations of the runs in `known`.

    `values` holds what was stored, `messages` every message as (run, number of observations), in order. An entry of
    `failures` is raised for each message until none is left. While `open` is not set, `submit` waits.
    """

    known: set[UUID]
    failures: list[Exception] = field(default_factory=list)
    open: asyncio.Event | None = None
    values: dict[tuple[UUID, str, int], float] = field(default_factory=dict)
    messages: list[tuple[UUID, int]] = field(default_factory=list)
    under_way: int = 0

    async def submit(self, message: IngestMessage) -> Receipt:
        assert isinstance(message.content, Observations)
        points = message.content.points
        self.under_way += len(points)
        try:
            await (self.open.wait() if self.open is not None else asyncio.sleep(0))
        finally:
            self.under_way -= len(points)
        self.messages.append((message.run_id, len(points)))
        if self.failures:
            raise self.failures.pop(0)
        if message.run_id not in self.known:
            raise NotFound(f"there is no run {message.run_id}")
        accepted, conflicts = 0, []
        for point in points:
            stored = self.values.get((message.run_id, *point.identity))
            if stored is None:
                self.values[message.run_id, *point.identity] = point.value
                accepted += 1
            elif stored != point.value and not (math.isnan(stored) and math.isnan(point.value)):
                conflicts.append(ValueConflict(point, stored))
        duplicates = len(points) - accepted - len(conflicts)
        run = build_run(message.run_id)
        return Receipt(run, None, accepted, duplicates, conflicts=tuple(conflicts))


def build_run(run_id: UUID) -> Run:
    """A run with default values in all fields."""
    return Run(
        id=run_id,
        project_id=run_id,
        name="r",
        status=RunStatus.RUNNING,
        attempt=1,
        metrics={},
        labels={},
        policy_id=run_id,
        policy_name="p",
        policy_version=1,
        mode=Mode.SHADOW,
        total_steps=None,
        last_step=None,
        version=1,
        verdict=Verdict(Call.CONTINUE, None, None, ""),
        best_checkpoint=None,
        raw_maximum=None,
        created_at=NOW,
        updated_at=NOW,
        ended_at=None,
    )
