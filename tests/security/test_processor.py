"""Shares of the processor: a sender over its half waits while others are active."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass
from typing import cast
from uuid import uuid4

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.ingest import Committer
from evalstop_service.projects import api_keys
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.security.rate_limits import Rate, RateLimit
from evalstop_service.store.database import Database, Work
from evalstop_service.web.api.ingest_endpoint import IngestEndpoint
from evalstop_service.web.limits import Entrance, Limits, Places
from evalstop_service.web.processor import (
    ACTIVE_SECONDS,
    AT_ONCE,
    LONG_SECONDS,
    QUIET_SECONDS,
    ROUTE_MS,
    TURN_SECONDS,
    Processor,
)
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from tests.fixtures.projects import create_project
from tests.service.web.api.fake_committer import FakeCommitter

BUSY, OTHER = Work("busy", "a"), Work("other", "b")


POOL = Places("long bodies", 10**6, 10**6, 10**6)


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
    heavy: RateLimit | None = None

    def __post_init__(self) -> None:
        self.processor = Processor(self.count, self.limit, self.heavy, lambda: self.now, lambda: self.cpu_seconds)

    def count(self) -> None:
        self.delayed += 1

    def send(self, key: Work, milliseconds: float) -> None:
        """A request of this key that takes so much CPU time."""
        request = asyncio.run(self.processor.begin(key, is_post=True))
        self.advance(milliseconds)
        self.processor.end(request)

    def send_other(self, sender: Work) -> None:
        """A request of this sender to another part of the app."""
        self.processor.end(asyncio.run(self.processor.begin(sender)))

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
    request = asyncio.run(loop.processor.begin(BUSY, is_post=True))
    assert request is not None
    loop.now += 60.0
    loop.processor.end(request)
    loop.send_other(OTHER)
    assert loop.processor.find_wait(BUSY) == 0


async def begins_at_once(processor: Processor) -> bool:
    """Whether a request of BUSY begins without a wait."""
    begun = asyncio.create_task(processor.begin(BUSY, is_post=True))
    await asyncio.sleep(0)
    is_begun = begun.done()
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    return is_begun


@pytest.mark.parametrize(("used_ms", "waits"), [(5.0, False), (15.0, True)])
def test_key_over_a_tenth_waits_for_requests_in_progress(used_ms: float, waits: bool) -> None:
    """A heavy key's request begins shortly after the other sender's has ended; a light key's begins at once."""
    loop = Loop(limit=RecordedCharges())
    loop.send_other(OTHER)
    loop.send(BUSY, used_ms)

    async def begin() -> bool:
        request = await loop.processor.begin(OTHER)
        begun = asyncio.create_task(loop.processor.begin(BUSY, is_post=True))
        await asyncio.sleep(0)
        waited = not begun.done()
        loop.processor.end(request)
        loop.now += QUIET_SECONDS
        await begun
        return waited

    assert asyncio.run(begin()) == waits
    assert loop.delayed == waits


def test_other_request_of_a_heavy_key_waits_but_a_decision_does_not() -> None:
    """Requests other than posts of observations wait for others in the same way, and are counted; vetoes are not held
    up by what their key has posted, only by a flood of decisions."""
    loop = Loop(limit=RecordedCharges())
    loop.send_other(OTHER)
    loop.send(BUSY, 15.0)
    loop.send_other(OTHER)

    async def begin() -> None:
        begun = asyncio.create_task(loop.processor.begin(BUSY))
        await asyncio.sleep(0)
        assert not begun.done()
        loop.now += QUIET_SECONDS
        await begun
        await asyncio.wait_for(loop.processor.begin(BUSY._replace(is_decision=True)), 1.0)

    asyncio.run(begin())
    assert loop.delayed == 1


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


def test_heavy_keys_take_turns_while_others_always_have_a_request_in_progress() -> None:
    """A quarter of the waiting requests begins in each turn, the first ones first; a cancelled one keeps its place."""
    loop = Loop(limit=RecordedCharges())
    loop.send_other(OTHER)
    loop.send(BUSY, 15.0)

    async def begin() -> None:
        begun = [asyncio.create_task(loop.processor.begin(BUSY, is_post=True)) for _ in range(9)]
        await asyncio.sleep(QUIET_SECONDS / 2)  # all of them wait now
        begun[1].cancel()
        for count in (3, 5, 6, 7, 8, 9):
            await loop.processor.begin(OTHER)
            loop.now += TURN_SECONDS
            await begun[count - 1]
            assert [task.done() for task in begun] == [True] * count + [False] * (9 - count)

    asyncio.run(begin())


def test_few_requests_of_heavy_keys_compute_at_once() -> None:
    """A veto finds no more than a few of them before it, in whatever number they arrive; posts share a commit."""
    loop = Loop(limit=RecordedCharges())
    loop.send_other(OTHER)
    loop.send(BUSY, 50.0)
    loop.now += 2 * QUIET_SECONDS

    async def begin() -> None:
        begun = [asyncio.create_task(loop.processor.begin(BUSY)) for _ in range(AT_ONCE + 2)]
        requests = await asyncio.gather(*begun[:AT_ONCE])
        await asyncio.wait_for(loop.processor.begin(BUSY, is_post=True), 1.0)
        await asyncio.sleep(2 * QUIET_SECONDS)  # in which it has looked twice whether another one may begin
        assert not begun[AT_ONCE].done()
        loop.processor.end(requests[0])
        await begun[AT_ONCE]
        assert not begun[AT_ONCE + 1].done()
        loop.now += LONG_SECONDS  # those in progress wait for something themselves
        await begun[AT_ONCE + 1]

    asyncio.run(begin())


def test_few_decisions_of_a_heavy_key_compute_at_once() -> None:
    """Who floods with vetoes holds up no other veto, and waits for nobody else's requests."""
    veto, loop = BUSY._replace(is_decision=True), Loop(limit=RecordedCharges())
    loop.send_other(OTHER)
    loop.processor.charge(veto, 50.0)

    async def begin() -> None:
        begun = [asyncio.create_task(loop.processor.begin(veto)) for _ in range(AT_ONCE + 1)]
        requests = await asyncio.gather(*begun[:AT_ONCE])
        await asyncio.wait_for(loop.processor.begin(OTHER._replace(is_decision=True)), 1.0)
        await asyncio.sleep(2 * QUIET_SECONDS)  # in which it has looked twice whether another one may begin
        assert not begun[AT_ONCE].done()
        loop.processor.end(requests[0])
        await begun[AT_ONCE]

    asyncio.run(begin())


def test_heavy_key_does_not_wait_for_an_open_page() -> None:
    """A request that has been in progress for long is taken to wait for something itself."""
    loop = Loop(limit=RecordedCharges())
    loop.send_other(OTHER)
    loop.send(BUSY, 50.0)

    async def begin() -> tuple[bool, bool]:
        await loop.processor.begin(OTHER)
        at_once = await begins_at_once(loop.processor)
        loop.now += LONG_SECONDS
        return at_once, await begins_at_once(loop.processor)

    assert asyncio.run(begin()) == (False, True)


def test_heavy_keys_do_not_wait_for_each_other() -> None:
    """Between heavy keys, only the limit of half of the time counts."""
    loop = Loop(limit=RecordedCharges())
    for key in (OTHER, BUSY, OTHER):
        loop.send(key, 15.0)
    loop.now += QUIET_SECONDS

    async def begin() -> bool:
        await loop.processor.begin(OTHER)
        return await begins_at_once(loop.processor)

    assert asyncio.run(begin())


@given(st.lists(st.tuples(st.sampled_from([BUSY, OTHER]), st.floats(0.0, 50.0)), min_size=1, max_size=20))
def test_overlapping_requests_are_charged_once(steps: list[tuple[Work, float]]) -> None:
    """The charges add up to the CPU time of the loop, however requests overlap."""
    charges = RecordedCharges()
    loop = Loop(limit=charges, heavy=RecordedCharges())

    async def overlap() -> None:
        requests = []
        for key, milliseconds in steps:
            loop.processor.end(await loop.processor.begin(BUSY if key == OTHER else OTHER))
            requests.append(await loop.processor.begin(key, is_post=True))
            loop.advance(milliseconds)
        for request in requests:
            loop.processor.end(request)

    asyncio.run(overlap())
    routes = ROUTE_MS * (len(steps) - 1)  # the first is not charged: nobody else was active
    assert sum(charges.costs) == pytest.approx(routes + sum(milliseconds for _, milliseconds in steps), abs=1e-6)


def test_post_of_a_key_in_debt_waits(embedded_database: Database) -> None:
    """The endpoint charges each key for its posts, and another key's post is answered meanwhile."""
    create_project(embedded_database, "p", "shadow", 0.0, utc_now())
    busy, other = (api_keys.create_named_key(embedded_database, "p", name, ["admin"], utc_now()) for name in "ab")
    run_id, limit = uuid4(), RateLimit(Rate(burst=1.0, per_second=1e-9))
    loop = Loop(limit=limit)
    committer = cast(Committer, FakeCommitter({run_id}))
    endpoint = IngestEndpoint(
        refuse_all,
        committer,
        KeyCache(embedded_database, 60.0),
        utc_now,
        lambda _: False,
        lambda _: None,
        10**6,
        POOL,
        loop.processor,
    )

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


def test_only_requests_of_valid_sessions_go_before_those_of_heavy_keys(embedded_database: Database) -> None:
    """A forged cookie delays nobody; one that was recently found valid does."""
    heavy = RateLimit(Rate(burst=1.0, per_second=1e-9))
    loop, limits = Loop(heavy=heavy), Limits()
    heavy.charge(("key", False, BUSY.key), 1000.0)
    limits.sessions.add("evs_valid", OTHER.key, OTHER.project)
    delays = []

    async def count_delays(_scope: Scope, _receive: Receive, _send: Send) -> None:
        before = loop.delayed
        begun = asyncio.create_task(loop.processor.begin(BUSY))
        await asyncio.sleep(0)
        delays.append(loop.delayed - before)
        if begun.done():
            loop.processor.end(begun.result())
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)

    committer = cast(Committer, FakeCommitter(set()))
    key_cache = KeyCache(embedded_database, 60.0)
    endpoint = IngestEndpoint(
        *(count_delays, committer, key_cache, utc_now, lambda _: False, lambda _: None, 10**6, POOL, loop.processor)
    )
    entrance = Entrance(endpoint, limits, key_cache)

    async def visit() -> None:
        for cookie in (
            b"evalstop_session=forged",
            b"evalstop_session=",
            b"\x00=;=",
            b"a=b; evalstop_session=evs_valid",
        ):
            scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"cookie", cookie)]}
            await entrance(scope, None, None)  # type: ignore[arg-type]

    asyncio.run(visit())
    assert delays == [0, 0, 0, 1]
