"""One key that floods the service takes its own share, and leaves the others theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from evalstop_service.app import create_app
from evalstop_service.clock import utc_now
from evalstop_service.errors import TooOften
from evalstop_service.projects import api_keys
from evalstop_service.security.rate_limits import MOST_BUCKETS, Rate, RateLimit
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.web.fair_shares import COSTLY, THREADS, FairShares, Places
from fastapi import FastAPI

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import serve_app
from tests.fixtures.projects import create_project
from tests.security.stops import create_pending_decision
from tests.service.web.api.api_calls import ENDPOINT, expect_json, expect_problem

WAIT_SECONDS = 60


class Flooded:
    """A service, and clients with a key each."""

    def __init__(self, app: FastAPI, url: str, database: Database, opened: ExitStack) -> None:
        self.app, self.url, self.database, self.opened = app, url, database, opened

    def client(self, name: str) -> httpx.Client:
        """A client with a key of its own that may do all."""
        key = api_keys.create_named_key(self.database, "p", name, ["admin"], utc_now())[1]
        headers = {"Authorization": f"Bearer {key}"}
        return self.opened.enter_context(
            httpx.Client(
                verify=get_ssl_context(),
                base_url=f"{self.url}/api/v1",
                headers=headers,
                timeout=WAIT_SECONDS,
                trust_env=False,
            )
        )

    def count_refused(self, share: str) -> float:
        """What the metrics say of requests that were refused for a share."""
        lines = httpx.get(f"{self.url}/metrics", trust_env=False).text.splitlines()
        found = [line for line in lines if line.startswith(f'evalstop_refused_requests_total{{reason="{share}"}}')]
        return float(found[0].split()[-1]) if found else 0.0


@pytest.fixture
def flooded(embedded_database: Database) -> Iterator[Flooded]:
    create_project(embedded_database, "p", "enforce", 3600.0, utc_now(), "paper")
    app = create_app(Settings(), embedded_database, session_secret="s" * 32)
    with serve_app(app) as url, ExitStack() as opened:
        yield Flooded(app, url, embedded_database, opened)


def test_requests_of_one_key_leave_threads_for_others(flooded: Flooded) -> None:
    """While a key has as many requests under way as it may, more are answered 429; it still pauses, and another key
    reads and vetoes."""
    busy, other = flooded.client("busy"), flooded.client("other")
    decision = create_pending_decision(other)
    from_key = flooded.app.state.context.shares.requests
    sender = str(expect_json(busy.get("/keys"), 200)["items"][0]["id"])
    with ExitStack() as places:
        count = 0
        try:
            while True:
                places.enter_context(from_key.hold(sender))
                count += 1
        except TooOften:
            pass
        assert count < THREADS / 2
        refused = expect_problem(busy.get("/runs"), 429)
        assert "the most for one sender" in refused["detail"]
        expect_json(other.get("/runs"), 200)
        expect_json(busy.post("/project/pause", json={"actor": "dana", "reason": "look"}), 200)
        expect_json(other.post(f"/decisions/{decision}/veto", json={"actor": "dana", "reason": "broken eval"}), 200)
    expect_json(busy.get("/runs"), 200)
    assert flooded.count_refused("requests") >= 1


def test_costly_requests_of_one_key_are_few(flooded: Flooded) -> None:
    """A key that tests an endpoint without end is answered 429 with the time to wait; another key is not."""
    busy, other = flooded.client("busy"), flooded.client("other")
    endpoint = expect_json(busy.post("/endpoints", json=ENDPOINT | {"url": "http://127.0.0.1:1/"}), 201)["id"]
    path, since = f"/endpoints/{endpoint}/replay", {"since": "2020-01-01T00:00:00Z"}
    statuses = [busy.post(path, json=since).status_code for _ in range(int(COSTLY.burst) + 20)]
    assert statuses.count(200) >= COSTLY.burst
    assert 429 in statuses
    assert expect_json(other.post(f"/endpoints/{endpoint}/test"), 200)["delivered"] is False
    assert flooded.count_refused("costly") == statuses.count(429)


def test_a_policy_has_a_bounded_cost(flooded: Flooded) -> None:
    """A policy whose detectors would hold the database up for minutes is refused, to be stored and to be tried."""
    client = flooded.client("head")
    member = {"detector": "bocpd", "params": {"run_lengths": 1000}, "stop_at": 0.9}
    policy = {"name": "slow", "members": [member | {"id": f"m{index}"} for index in range(32)]}
    assert "run lengths" in expect_problem(client.post("/policies", json=policy), 422)["detail"]
    expect_json(client.post("/policies", json=policy | {"members": policy["members"][:2]}), 201)


def test_places_are_counted_by_sender() -> None:
    """Each sender holds its own places; one that was let go is free again, also after an error."""
    counted: list[str] = []
    places = Places("pulls", 2, counted.append)
    with places.hold("one"), places.hold("one"), places.hold("two"):
        with pytest.raises(TooOften, match="2 pulls"), places.hold("one"):
            raise AssertionError
        assert not places.has_room("one")
    with pytest.raises(KeyError), places.hold("one"):
        raise KeyError
    assert places.has_room("one")
    assert counted == ["pulls"]


def test_a_rate_is_kept_in_the_long_run() -> None:
    """A full bucket at once, then as many as the rate says; what costs more than a bucket is owed."""
    now = [0.0]
    limit = RateLimit(Rate(burst=3, per_second=0.5), lambda: now[0])
    assert [limit.spend("one") for _ in range(4)] == [0, 0, 0, 2]
    assert limit.spend("two") == 0
    now[0] = 2.0
    assert [limit.spend("one") for _ in range(2)] == [0, 2]
    now[0] = 100.0
    assert limit.spend("one", 10) == 0
    assert limit.spend("one") == 16
    assert limit.find_wait("one") == 16


def test_senders_without_end_take_no_memory() -> None:
    """Only so many senders are remembered, the latest ones."""
    limit = RateLimit(Rate(burst=1, per_second=1e-9), lambda: 0.0)
    for index in range(MOST_BUCKETS + 1):
        assert limit.spend(str(index)) == 0
    assert limit.spend(str(MOST_BUCKETS)) > 0
    assert limit.spend("0") == 0


def test_streams_leave_one_for_others() -> None:
    """Of the streams of lines that a process takes at a time no key has all, but for one."""
    for streams in (2, 8, 9):
        shares = FairShares(streams)
        with ExitStack() as places:
            for _ in range(streams // 2):
                places.enter_context(shares.streams.hold("one"))
            assert not shares.streams.has_room("one")
            assert shares.streams.has_room("two")
