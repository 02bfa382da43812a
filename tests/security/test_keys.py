"""Limits on what a leaked key can do: bound endpoints and networks, expiry, and few guesses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import UUID

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.errors import TooOften
from evalstop_service.projects import api_keys
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.security.rate_limits import Rate
from evalstop_service.settings import Settings
from evalstop_service.store import keys, tables
from evalstop_service.store.database import Database, Work
from evalstop_service.store.keys import KeyLimits
from evalstop_service.web.limits import Places

from tests.fixtures.projects import create_project
from tests.security.served_project import ServedProject, serve_project
from tests.service.concurrency import wait_until
from tests.service.web.api.api_calls import call_route, create_decision, create_resources, expect_json, expect_problem
from tests.service.web.api.routes import ROUTES

STOP_EVENTS = {"event_types": ["run.stop_requested"]}


@pytest.fixture
def project(embedded_database: Database) -> Iterator[ServedProject]:
    """A project on a server that trusts a proxy on this machine."""
    with serve_project(embedded_database, Settings(trusted_proxies="127.0.0.1")) as project:
        yield project


@pytest.fixture
def admin(project: ServedProject) -> httpx.Client:
    return project.open_client()


def test_key_bound_to_an_endpoint_reports_its_stops_only(project: ServedProject, admin: httpx.Client) -> None:
    """A `report` key bound to an endpoint claims, settles and reports its deliveries and reads checkpoints."""
    own_endpoint, other_endpoint = (
        expect_json(admin.post("/pull/endpoints", json=STOP_EVENTS | {"name": name}), 201)["id"] for name in ("a", "b")
    )
    decision = create_decision(admin)
    idle_endpoint = expect_json(admin.post("/pull/endpoints", json=STOP_EVENTS | {"name": "late"}), 201)["id"]
    receiver = project.open_client_with_key(project.create_key("report", endpoint_ids=(UUID(own_endpoint),)))
    other_receiver = project.open_client_with_key(project.create_key("report", endpoint_ids=(UUID(idle_endpoint),)))
    claim = {"wait_seconds": 0.0}
    (event,) = expect_json(receiver.post(f"/pull/endpoints/{own_endpoint}/claim", json=claim), 200)["events"]
    expect_problem(receiver.post(f"/pull/endpoints/{other_endpoint}/claim", json=claim), 403)
    settle = {"delivery_id": event["delivery_id"], "attempt": 1, "status": 200}
    expect_problem(receiver.post(f"/pull/endpoints/{other_endpoint}/settle", json=settle), 403)
    expect_json(receiver.post(f"/pull/endpoints/{own_endpoint}/settle", json=settle), 200)
    report = {"state": "confirmed", "reason": "gone"}
    expect_problem(other_receiver.post(f"/decisions/{decision}/report", json=report), 403)
    expect_problem(receiver.post(f"/decisions/{decision}/veto", json={"reason": "x"}), 403)
    run = expect_json(admin.get(f"/decisions/{decision}"), 200)["run_id"]
    expect_json(receiver.get(f"/runs/{run}/checkpoints"), 200)
    expect_problem(other_receiver.get(f"/runs/{run}/checkpoints"), 403)
    assert expect_json(receiver.post(f"/decisions/{decision}/report", json=report), 200)["state"] == "confirmed"


def test_key_bound_to_an_endpoint_opens_nothing_else(project: ServedProject, admin: httpx.Client) -> None:
    """On every route a `report` key whose endpoint has nothing to do with the resources gets a 403, but for itself."""
    resources = create_resources(admin)
    own = expect_json(admin.post("/pull/endpoints", json=STOP_EVENTS | {"name": "own"}), 201)["id"]
    receiver = project.open_client_with_key(project.create_key("report", endpoint_ids=(UUID(own),)))
    answers = {route: call_route(receiver, route, resources) for route in ROUTES}
    opened = {route for route, response in answers.items() if response.status_code not in (403, 404)}
    assert opened == {("GET", "/key")}, {route: answers[route].text for route in opened}
    for path in ("experiments/search", "runs/search", "runs/create"):
        assert receiver.post(f"{project.url}/mlflow/api/2.0/mlflow/{path}", json={}).status_code == 403
    (request,) = expect_json(admin.get("/eval-requests"), 200)["items"]
    assert request["answered_at"] is None


def test_only_a_report_key_of_this_project_can_be_bound(project: ServedProject, admin: httpx.Client) -> None:
    """A key with other scopes, or an endpoint of another project, is a 422."""
    endpoint = expect_json(admin.post("/pull/endpoints", json=STOP_EVENTS | {"name": "a"}), 201)["id"]
    body = {"name": "k", "scopes": ["report", "operate"], "endpoint_ids": [endpoint]}
    assert "single scope report" in expect_problem(admin.post("/keys", json=body), 422)["detail"]
    body |= {"scopes": ["report"], "endpoint_ids": ["01900000-0000-7000-8000-000000000000"]}
    assert "no endpoint" in expect_problem(admin.post("/keys", json=body), 422)["detail"]


def test_key_expires(project: ServedProject, admin: httpx.Client) -> None:
    """An expired key is a 401, and a key cannot be created with an expiry in the past."""
    past, future = utc_now() - timedelta(seconds=1), utc_now() + timedelta(days=1)
    body = {"name": "k", "scopes": ["read"], "expires_at": past.isoformat()}
    assert "past" in expect_problem(admin.post("/keys", json=body), 422)["detail"]
    key = expect_json(admin.post("/keys", json=body | {"expires_at": future.isoformat()}), 201)
    client = project.open_client_with_key(key["key"])
    expect_json(client.get("/runs"), 200)
    with project.database.transaction() as tx:
        tx.execute(tables.keys.update().where(tables.keys.c.id == UUID(key["id"])).values(expires_at=past))
    project.app.state.context.key_cache.clear()
    expect_problem(client.get("/runs"), 401)


@pytest.mark.parametrize(
    ("address", "status"),
    [("10.1.2.3", 200), ("::ffff:10.1.2.3", 200), ("10.2.0.1", 401), ("unknown", 401), ("fe80::1", 401)],
)
def test_key_is_refused_from_other_networks(project: ServedProject, address: str, status: int) -> None:
    """Every API refuses a key from outside its networks, by the address that a trusted proxy reports."""
    secret = project.create_key("ingest", "read", networks=("10.1.0.0/16",))
    home = project.open_client_with_key(secret, "10.1.0.1")
    run = expect_json(home.post("/runs", json={"name": "r"}), 201)["id"]
    client = project.open_client_with_key(secret, address)
    observation = {"observations": [{"metric": "eval", "step": 1, "value": 0.5}]}
    assert client.get("/runs").status_code == status
    assert client.post(f"/runs/{run}/observations", json=observation).status_code == status
    slow_way = client.post(f"/runs/{run}/observations", json=observation | {"unknown": 1})
    assert slow_way.status_code == {200: 422, 401: 401}[status]
    mlflow_run = client.post(f"{project.url}/mlflow/api/2.0/mlflow/runs/create", json={"experiment_id": "0"})
    assert mlflow_run.status_code == status
    login_page = client.get(f"{project.url}/login")
    token = re.search(r'name="csrf" value="([^"]+)"', login_page.text)
    assert token is not None
    signed_in = client.post(f"{project.url}/login", data={"key": secret, "csrf": token[1]})
    assert signed_in.status_code == {200: 303, 401: 401}[status]


def test_waiting_claim_of_a_revoked_key_gets_no_event(project: ServedProject, admin: httpx.Client) -> None:
    """A receiver whose key is revoked while it waits gets 401, and the event goes to the next one."""
    endpoint = expect_json(admin.post("/pull/endpoints", json=STOP_EVENTS | {"name": "a"}), 201)["id"]
    created = expect_json(admin.post("/keys", json={"name": "k", "scopes": ["report"]}), 201)
    receiver = project.open_client_with_key(created["key"])
    key_id, limits = created["id"], project.app.state.context.limits
    limits.pulls = Places("pulls", 1, 1, 1)
    path, body = f"/pull/endpoints/{endpoint}/claim", {"wait_seconds": 30.0}
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(receiver.post, path, json=body)
        wait_until(lambda: not limits.pulls.has_room(Work(None)))
        assert admin.delete(f"/keys/{key_id}").status_code == 204
        create_decision(admin)
        expect_problem(waiting.result(), 401)
    assert len(expect_json(admin.post(path, json={"wait_seconds": 0.0}), 200)["events"]) == 1


def test_last_use_of_each_key_is_listed(project: ServedProject, admin: httpx.Client) -> None:
    """An unused key can be found and revoked."""
    unused = expect_json(admin.post("/keys", json={"name": "unused", "scopes": ["read"]}), 201)["id"]
    used = expect_json(admin.post("/keys", json={"name": "used", "scopes": ["read"]}), 201)
    expect_json(project.open_client_with_key(used["key"]).get("/runs"), 200)
    project.app.state.context.key_cache.record_uses()  # a background job does it, so that no request waits for it
    last_used = {item["id"]: item["last_used_at"] for item in expect_json(admin.get("/keys"), 200)["items"]}
    assert last_used[unused] is None
    assert last_used[used["id"]] is not None


def test_key_is_recognized_by_prefix_length_and_checksum(project: ServedProject) -> None:
    """Secret scanners can find keys, and malformed keys need no database query."""
    secret = project.create_key("read")
    assert re.fullmatch(r"esk_[0-9A-Za-z]{49}", secret)
    assert keys.is_well_formed(secret)
    for malformed in (
        secret[:-1],
        secret + "a",
        "esk_" + secret[5:] + "0",
        secret.replace("esk_", "ghp_"),
        "é" * 53,
        "",
    ):
        assert not keys.is_well_formed(malformed)


def test_address_with_many_wrong_keys_has_to_wait(project: ServedProject) -> None:
    """Other addresses, and keys that this process has in its cache, are not delayed."""
    cache = KeyCache(project.database, 60.0, wrong_keys=Rate(burst=3, per_second=1e-6))
    secret, other = project.create_key("read"), project.create_key("read")
    assert cache.authenticate(secret, "10.0.0.1") is not None
    revoked = keys.generate_secret()
    assert [cache.authenticate(revoked, "10.0.0.1") for _ in range(10)] == [None] * 10, (
        "a repeated wrong key counts once"
    )
    for _ in range(2):
        assert cache.authenticate(keys.generate_secret(), "10.0.0.1") is None
    with pytest.raises(TooOften):
        cache.authenticate(keys.generate_secret(), "10.0.0.1")
    with pytest.raises(TooOften):
        cache.authenticate(other, "10.0.0.1")
    assert cache.authenticate(secret, "10.0.0.1") is not None
    assert cache.authenticate(other, "10.0.0.2") is not None


def test_many_wrong_keys_are_answered_with_429(project: ServedProject) -> None:
    """The response has Retry-After, in the API and MLflow's alike."""
    client = project.open_client_with_key(project.create_key("read"))
    attacker = project.open_client_with_key("esk_", "10.0.0.9")

    def send_until_refused(url: str) -> list[httpx.Response]:
        responses: list[httpx.Response] = []
        while len(responses) < 200 and (not responses or responses[-1].status_code == 401):
            responses.append(
                attacker.get(url, headers={"Authorization": f"Bearer {keys.generate_secret()}"})
            )  # a slow machine refills the bucket meanwhile
        return responses

    first = send_until_refused("/runs")
    assert (len(first) > 10, first[-1].status_code) == (True, 429)
    assert int(first[-1].headers["retry-after"]) > 0
    mlflow = f"{project.url}/mlflow/api/2.0/mlflow/experiments/get?experiment_id=0"
    assert send_until_refused(mlflow)[-1].status_code == 429
    expect_json(client.get("/runs"), 200)


def test_wrong_keys_delay_only_their_own_address_behind_a_proxy(project: ServedProject) -> None:
    """Posts of observations are limited by the address that a trusted proxy reports, not by the proxy's."""
    trainer = project.open_client_with_key(project.create_key("ingest"), "10.0.0.1")
    path = f"/runs/{expect_json(trainer.post('/runs', json={'name': 'r'}), 201)['id']}/observations"
    batch = {"observations": [{"metric": "eval", "step": 1, "value": 0.5}]}
    attacker = project.open_client_with_key("esk_", "10.0.0.8")

    def send_wrong_key(secret: str) -> int:
        return attacker.post(path, json=batch, headers={"Authorization": f"Bearer {secret}"}).status_code

    with ThreadPoolExecutor(30) as threads:
        statuses = list(threads.map(send_wrong_key, [keys.generate_secret() for _ in range(30)]))
    assert set(statuses) == {401, 429}
    expect_json(trainer.post(path, json=batch), 200)


def test_pause_is_accepted_from_an_address_with_wrong_keys(project: ServedProject) -> None:
    """A valid key that is not cached pauses the project from an address whose other requests have to wait."""
    attacker = project.open_client_with_key("esk_", "10.0.0.7")
    for _ in range(25):
        attacker.headers["Authorization"] = f"Bearer {keys.generate_secret()}"
        attacker.get("/runs")
    operator = project.open_client_with_key(project.create_key("operate"), "10.0.0.7")
    expect_json(operator.post("/project/pause", json={"reason": "the eval set is broken"}), 200)
    expect_json(operator.post("/project/resume", json={}), 200)


def test_sign_in_link_is_of_a_key_that_can_sign_in(database: Database) -> None:
    """`evalstop up` prints a link of the first key that reads and that is neither expired nor bound to a network."""
    now = utc_now()
    project = create_project(database, api_keys.FIRST_PROJECT, "shadow", 0.0, now)
    for name, scope, limits in (
        ("short", "read", KeyLimits(expires_at=now + timedelta(hours=1))),
        ("bound", "read", KeyLimits(networks=("10.1.0.0/16",))),
        ("trainer", "ingest", KeyLimits()),
        ("viewer", "read", KeyLimits()),
    ):
        api_keys.create_key(database, project.id, "dana", name, [scope], now, limits)
    found = [api_keys.find_reading_key(database, at) for at in (now, now + timedelta(hours=1))]
    assert [key and key.name for key in found] == ["short", "viewer"]
