"""A key that fills the event loop waits while others send requests, and for as long as it used more than its half."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from evalstop_service.app import create_app
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.security.rate_limits import Rate, RateLimit
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.web.loop_shares import ACTIVE_SECONDS, LoopShares
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.projects import create_project
from tests.fixtures.serving import served
from tests.service.web.api.speaking import said

BUSY, OTHER = "busy", "other"


class RecordedCharges(RateLimit):
    """Records what is charged; nobody has to wait."""

    def __init__(self) -> None:
        super().__init__(Rate(burst=1e9, per_second=1.0))
        self.costs: list[float] = []

    def charge(self, who: Hashable, cost: float) -> None:
        self.costs.append(cost)


@dataclass
class Loop:
    """A clock and a thread's processor time that move when told to, and the shares measured by them."""

    now: float = 0.0
    computed: float = 0.0
    delayed: int = 0
    limit: RateLimit | None = None

    def __post_init__(self) -> None:
        self.shares = LoopShares(self.count, self.limit, lambda: self.now, lambda: self.computed)

    def count(self) -> None:
        self.delayed += 1

    def send(self, key: str, milliseconds: float) -> None:
        """A request of this key that computes for so long and begins at once."""
        begun = asyncio.run(self.shares.begin(key))
        self.compute(milliseconds)
        self.shares.end(key, begun)

    def compute(self, milliseconds: float) -> None:
        self.computed += milliseconds / 1000
        self.now += milliseconds / 1000


def test_a_lone_key_never_waits() -> None:
    """It may use all of the loop while nobody else sends requests."""
    loop = Loop()
    for _ in range(20):
        loop.send(BUSY, 100.0)
    assert loop.delayed == 0


def test_a_key_over_its_half_waits_while_another_is_active() -> None:
    """After 100 ms of computing, ten of them free, it waits for twice the rest; the other one does not wait."""
    loop = Loop()
    loop.send(BUSY, 100.0)
    loop.shares.note_sender(OTHER)
    assert loop.shares.find_wait(OTHER) == 0
    assert 0.15 <= loop.shares.find_wait(BUSY) <= 0.2


def test_the_wait_ends_when_the_others_are_silent() -> None:
    """However much it has computed: a second after the last request of another sender it begins."""
    loop = Loop()
    loop.send(BUSY, 60_000.0)
    loop.shares.note_sender(OTHER)
    assert loop.shares.find_wait(BUSY) > ACTIVE_SECONDS
    loop.now += ACTIVE_SECONDS
    assert loop.shares.find_wait(BUSY) == 0


def test_waiting_for_the_database_costs_nothing() -> None:
    """A key that always has requests in progress is charged for what the loop computes, not for their duration."""
    loop = Loop()
    begun = asyncio.run(loop.shares.begin(BUSY))
    loop.now += 60.0
    loop.shares.end(BUSY, begun)
    loop.shares.note_sender(OTHER)
    assert loop.shares.find_wait(BUSY) == 0


@given(st.lists(st.tuples(st.sampled_from([BUSY, OTHER]), st.floats(0.0, 50.0)), min_size=1, max_size=20))
def test_requests_in_progress_divide_the_time(steps: list[tuple[str, float]]) -> None:
    """All of the loop's time is charged once, however requests overlap."""
    charges = RecordedCharges()
    loop = Loop(limit=charges)

    async def overlap() -> None:
        begun = []
        for key, milliseconds in steps:
            begun.append((key, await loop.shares.begin(key)))
            loop.compute(milliseconds)
        for key, at in begun:
            loop.shares.end(key, at)

    asyncio.run(overlap())
    assert sum(charges.costs) == pytest.approx(sum(milliseconds for _, milliseconds in steps), abs=1e-6)


def test_posts_of_a_busy_key_are_delayed_and_counted(embedded_database: Database) -> None:
    """Of two keys that post, the one that sends many large batches waits, and the metrics tell how often."""
    create_project(embedded_database, "p", "shadow", 0.0, utc_now())
    keys = [api_keys.create_named_key(embedded_database, "p", name, ["admin"], utc_now())[1] for name in "ab"]
    app = create_app(Settings(), embedded_database, session_secret="s" * 32)
    with served(app) as url:
        busy, other = (
            httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False)
            for key in keys
        )
        with busy, other:
            run_id = said(busy.post("/api/v1/runs", json={"name": "r"}), 201)["id"]

            def post(step: int) -> None:
                points = [{"metric": f"m{n}", "step": step, "value": 1.0} for n in range(500)]
                said(busy.post(f"/api/v1/runs/{run_id}/observations", json={"observations": points}), 200)

            with ThreadPoolExecutor(8) as threads:
                posts = [threads.submit(post, step) for step in range(20)]
                while not all(future.done() for future in posts):
                    said(other.get("/api/v1/runs?limit=1"), 200)
            for future in posts:
                future.result()
            lines = busy.get("/metrics").text.splitlines()
    delayed = next(line for line in lines if line.startswith("evalstop_delayed_requests_total "))
    assert float(delayed.split()[-1]) > 0
