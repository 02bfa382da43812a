"""Limits of keys and projects: one that floods the service leaves capacity for the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from uuid import UUID, uuid4

import httpx
import pytest
from evalstop_service.errors import Overloaded, TooOften
from evalstop_service.ingest import Message, Observations
from evalstop_service.security.rate_limits import MOST_BUCKETS, Rate, RateLimit
from evalstop_service.store import runs
from evalstop_service.store.database import Database, Work
from evalstop_service.web.limits import COSTLY, Limits, Places

from tests.security.served_project import ServedProject, create_pending_decision, serve_project
from tests.service.concurrency import wait_until
from tests.service.web.api.api_calls import expect_json, expect_problem
from tests.service.web.api.routes import ENDPOINT


@pytest.fixture
def project(embedded_database: Database) -> Iterator[ServedProject]:
    with serve_project(embedded_database, veto_window_seconds=3600.0) as project:
        yield project


def test_requests_of_one_key_leave_places_for_others(project: ServedProject) -> None:
    """A key at its limit of concurrent requests gets 429 but may still pause; another key reads and vetoes."""
    busy, other = project.open_client(name="busy"), project.open_client(name="other")
    decision = create_pending_decision(other)
    request_slots = project.app.state.context.limits.requests
    sender = Work(UUID(expect_json(busy.get("/key"), 200)["id"]))
    with ExitStack() as places:
        while request_slots.has_room(sender):
            places.enter_context(request_slots.hold(sender))
        refused = expect_problem(busy.get("/runs"), 429)
        assert "the most for one key" in refused["detail"]
        expect_json(other.get("/runs"), 200)
        expect_json(busy.post("/project/pause", json={"reason": "look"}), 200)
        expect_json(other.post(f"/decisions/{decision}/veto", json={"reason": "broken eval"}), 200)
    expect_json(busy.get("/runs"), 200)
    assert project.count_refused("requests") >= 1


def test_place_is_held_until_the_answer(project: ServedProject) -> None:
    """A waiting claim holds its key's only place, and leaves it when it is answered; so does a claim that is refused
    later on."""
    limits, client = project.app.state.context.limits, project.open_client()
    limits.pulls = Places("pulls", 2, 1, 2)
    endpoint = expect_json(client.post("/pull/endpoints", json={"name": "node"}), 201)["id"]
    sender = Work(UUID(expect_json(client.get("/key"), 200)["id"]))

    def claim(endpoint_id: str, wait_seconds: float) -> httpx.Response:
        return client.post(f"/pull/endpoints/{endpoint_id}/claim", json={"wait_seconds": wait_seconds})

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(claim, endpoint, 2.0)
        wait_until(lambda: not limits.pulls.has_room(sender))
        expect_problem(claim(endpoint, 0.0), 429)
        expect_json(waiting.result(), 200)
    expect_problem(claim(str(uuid4()), 0.0), 404)
    expect_json(claim(endpoint, 0.0), 200)


@pytest.mark.parametrize("item", [b"1", b"1.5", b"{}"])
def test_other_requests_are_answered_while_a_long_body_is_parsed(project: ServedProject, item: bytes) -> None:
    """The event loop does not parse it, and other threads run meanwhile."""
    busy, other = project.open_client("ingest", name="busy"), project.open_client(name="other")
    body = b"[" + b",".join([item] * 500_000) + b"]"

    def measure_longest_wait() -> float:
        """The longest wait for an answer, as a share of the time that the body takes."""
        with ThreadPoolExecutor(1) as thread:
            durations, began = [0.0], time.monotonic()
            parsed = thread.submit(busy.post, "/runs", content=body, headers={"Content-Type": "application/json"})
            while not parsed.done():
                sent = time.monotonic()
                expect_json(other.get(f"{project.url}/livez"), 200)
                durations.append(time.monotonic() - sent)
            expect_problem(parsed.result(), 422)
        return max(durations) / (time.monotonic() - began)

    # A busy machine may hold up a single answer; an event loop that parses holds up one every time.
    assert any(measure_longest_wait() < 0.5 for _ in range(3))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/policies", {"name": "again", "members": [{"detector": "k_decline"}]}),
        ("/policies/backtests", {"policy": "paper"}),
    ],
)
def test_costly_requests_of_one_key_are_limited(project: ServedProject, path: str, body: dict[str, object]) -> None:
    """A key that stores policies or starts backtests endlessly gets 429; another key does not."""
    busy, other = project.open_client(name="busy"), project.open_client(name="other")
    endpoint = expect_json(busy.post("/endpoints", json=ENDPOINT | {"url": "http://127.0.0.1:1/"}), 201)["id"]
    statuses = [busy.post(path, json=body).status_code for _ in range(int(COSTLY.burst) + 20)]
    assert 429 not in statuses[: int(COSTLY.burst)]
    assert 429 in statuses
    assert expect_json(other.post(f"/endpoints/{endpoint}/test"), 200)["delivered"] is False
    assert project.count_refused("costly") == statuses.count(429)


def test_changes_of_plans_cost_like_late_observations(project: ServedProject) -> None:
    """A key that has used up its share of edits may not change a plan, whichever route it takes; it may still post."""
    client = project.open_client("ingest", name="busy")
    run_id = expect_json(client.post("/runs", json={"name": "job", "total_steps": 100}), 201)["id"]
    key_id, context = UUID(expect_json(client.get("/key"), 200)["id"]), project.app.state.context
    with project.database.reading() as tx:
        run = runs.find_run_by_name(tx, context.key_cache.get(client.headers["Authorization"][7:]).project_id, "job")
    assert run is not None
    context.committer.costs.charge(Message(run.project_id, run.id, Observations(()), key_id), 3600.0)
    expect_problem(client.post("/runs", json={"name": "job", "total_steps": 300}), 429)
    point = {"metric": "eval_loss", "step": 5, "value": 0.4}
    assert (
        expect_json(client.post(f"/runs/{run_id}/observations", json={"observations": [point]}), 200)["accepted"] == 1
    )


def test_places_are_counted_by_key_by_project_and_in_all() -> None:
    """A key has its share, the keys of a project one together, and a place is free again after an error."""
    refusals: list[str] = []
    places = Places("pulls", 5, 2, 3, refusals.append)
    one, other, stranger = Work("one", "a"), Work("other", "a"), Work("third", "b")
    with places.hold(one), places.hold(one):
        with pytest.raises(TooOften, match=r"2 pulls .* for one key"), places.hold(one):
            raise AssertionError
        with places.hold(other):
            with pytest.raises(TooOften, match=r"3 pulls .* for one project"), places.hold(other):
                raise AssertionError
            with places.hold(stranger), places.hold(stranger), pytest.raises(Overloaded), places.hold(Work("fourth")):
                raise AssertionError
    with pytest.raises(KeyError), places.hold(one):
        raise KeyError
    places.take(one, 2)
    assert not places.has_room(one)
    places.release(one, 2)
    assert places.has_room(one)
    assert refusals == ["pulls"] * 3


def test_no_project_has_more_than_half_of_anything() -> None:
    """A key has at most the share of its project, and that at most half."""
    limits = Limits()
    for places in (limits.requests, limits.pulls):
        assert places.of_key <= places.of_project <= places.most / 2


def test_rate_limit_refills_at_its_rate() -> None:
    """A full bucket is available at once; a cost above it delays the next requests."""
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


def test_rate_limit_remembers_a_limited_number_of_senders() -> None:
    """The latest senders are remembered."""
    limit = RateLimit(Rate(burst=1, per_second=1e-9), lambda: 0.0)
    for index in range(MOST_BUCKETS + 1):
        assert limit.spend(str(index)) == 0
    assert limit.spend(str(MOST_BUCKETS)) > 0
    assert limit.spend("0") == 0
