"""A key that leaks does little for long: it is narrowed, expires, is rotated, is known for what it is, and wrong ones
are not tried without end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
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
from evalstop_service.store.database import Database
from evalstop_service.store.keys import KeyLimits

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_project
from tests.service.web.api.api_calls import FALLING, expect_json, expect_problem

STOPS = {"event_types": ["run.stop_requested"]}


class Project:
    """A project whose stops are carried out at once, and clients with keys to it."""

    def __init__(self, url: str, database: Database, opened: ExitStack) -> None:
        self.url, self.database, self._opened = url, database, opened
        self.admin = self.client(self.key("admin"))

    def key(self, *scopes: str, **limits: Any) -> str:
        """The secret of a new key."""
        return api_keys.create_named_key(self.database, "p", "k", scopes, utc_now(), KeyLimits(**limits))[1]

    def client(self, secret: str, address: str | None = None) -> httpx.Client:
        """A client with this key, seen by the service at this address."""
        headers = {"Authorization": f"Bearer {secret}"} | ({"X-Forwarded-For": address} if address else {})
        client = httpx.Client(verify=get_ssl_context(), base_url=f"{self.url}/api/v1", headers=headers, trust_env=False)
        return self._opened.enter_context(client)

    def stop_a_run(self) -> str:
        """The id of a decision that was requested."""
        run = expect_json(self.admin.post("/runs", json={"name": "r"}), 201)["id"]
        expect_json(self.admin.post(f"/runs/{run}/checkpoints", json={"step": 1, "uri": "file:///1"}), 201)
        expect_json(self.admin.post(f"/runs/{run}/observations", json={"observations": FALLING}), 200)
        return str(expect_json(self.admin.get("/decisions"), 200)["items"][0]["id"])


@pytest.fixture
def project(embedded_database: Database) -> Iterator[Project]:
    create_project(embedded_database, "p", "enforce", 0.0, utc_now(), "paper")
    settings = Settings(key_cache_seconds=0, trusted_proxies="127.0.0.1")
    with start_server(embedded_database, settings) as url, ExitStack() as opened:
        yield Project(url, embedded_database, opened)


def test_a_receiver_s_key_reports_on_its_own_stops(project: Project) -> None:
    """A key of the scope report that is bound to an endpoint fetches, settles and reports what was sent there, looks
    at checkpoints, and does nothing else."""
    mine, other = (
        expect_json(project.admin.post("/pull/endpoints", json=STOPS | {"name": name}), 201)["id"]
        for name in ("a", "b")
    )
    decision = project.stop_a_run()
    idle = expect_json(project.admin.post("/pull/endpoints", json=STOPS | {"name": "late"}), 201)["id"]
    receiver = project.client(project.key("report", endpoint_ids=(UUID(mine),)))
    stranger = project.client(project.key("report", endpoint_ids=(UUID(idle),)))
    claim = {"wait_seconds": 0.0}
    (event,) = expect_json(receiver.post(f"/pull/endpoints/{mine}/claim", json=claim), 200)["events"]
    expect_problem(receiver.post(f"/pull/endpoints/{other}/claim", json=claim), 403)
    settle = {"delivery_id": event["delivery_id"], "attempt": 1, "status": 200}
    expect_problem(receiver.post(f"/pull/endpoints/{other}/settle", json=settle), 403)
    expect_json(receiver.post(f"/pull/endpoints/{mine}/settle", json=settle), 200)
    report = {"state": "confirmed", "actor": "r", "reason": "gone"}
    expect_problem(stranger.post(f"/decisions/{decision}/report", json=report), 403)
    expect_problem(receiver.post(f"/decisions/{decision}/veto", json={"actor": "r", "reason": "x"}), 403)
    run = expect_json(project.admin.get(f"/decisions/{decision}"), 200)["run_id"]
    expect_json(receiver.get(f"/runs/{run}/checkpoints"), 200)
    assert expect_json(receiver.post(f"/decisions/{decision}/report", json=report), 200)["state"] == "confirmed"


def test_a_bound_key_may_report_alone(project: Project) -> None:
    """A key with other scopes cannot be bound to endpoints, which would not narrow it, nor to another project's."""
    endpoint = expect_json(project.admin.post("/pull/endpoints", json=STOPS | {"name": "a"}), 201)["id"]
    body = {"name": "k", "scopes": ["report", "operate"], "endpoint_ids": [endpoint]}
    assert "single scope report" in expect_problem(project.admin.post("/keys", json=body), 422)["detail"]
    body |= {"scopes": ["report"], "endpoint_ids": ["01900000-0000-7000-8000-000000000000"]}
    assert "no endpoint" in expect_problem(project.admin.post("/keys", json=body), 422)["detail"]


def test_a_key_expires(project: Project) -> None:
    """A key with an end opens nothing from then on, and is not made with one in the past."""
    past, future = utc_now() - timedelta(seconds=1), utc_now() + timedelta(days=1)
    body = {"name": "k", "scopes": ["read"], "expires_at": past.isoformat()}
    assert "past" in expect_problem(project.admin.post("/keys", json=body), 422)["detail"]
    key = expect_json(project.admin.post("/keys", json=body | {"expires_at": future.isoformat()}), 201)
    client = project.client(key["key"])
    expect_json(client.get("/runs"), 200)
    with project.database.transaction() as tx:
        tx.execute(tables.keys.update().where(tables.keys.c.id == UUID(key["id"])).values(expires_at=past))
    expect_problem(client.get("/runs"), 401)


@pytest.mark.parametrize(
    ("address", "status"),
    [("10.1.2.3", 200), ("::ffff:10.1.2.3", 200), ("10.2.0.1", 401), ("unknown", 401), ("fe80::1", 401)],
)
def test_a_key_is_taken_from_its_networks(project: Project, address: str, status: int) -> None:
    """A key that is bound to networks opens nothing from elsewhere, by any way in, as trusted proxies say it."""
    secret = project.key("ingest", "read", networks=("10.1.0.0/16",))
    home = project.client(secret, "10.1.0.1")
    run = expect_json(home.post("/runs", json={"name": "r"}), 201)["id"]
    client = project.client(secret, address)
    observation = {"observations": [{"metric": "eval", "step": 1, "value": 0.5}]}
    assert client.get("/runs").status_code == status
    assert client.post(f"/runs/{run}/observations", json=observation).status_code == status
    slow_way = client.post(f"/runs/{run}/observations", json=observation | {"unknown": 1})
    assert slow_way.status_code == {200: 422, 401: 401}[status]
    logged = client.post(f"{project.url}/mlflow/api/2.0/mlflow/runs/create", json={"experiment_id": "0"})
    assert logged.status_code == status
    signing_in = client.get(f"{project.url}/login")
    token = re.search(r'name="csrf" value="([^"]+)"', signing_in.text)
    assert token is not None
    signed_in = client.post(f"{project.url}/login", data={"key": secret, "csrf": token[1]})
    assert signed_in.status_code == {200: 303, 401: 401}[status]


def test_a_key_is_rotated_with_an_overlap(project: Project) -> None:
    """A new secret of a key works at once, the one before as long as it was said, and the key stays the same one."""
    made = expect_json(project.admin.post("/keys", json={"name": "k", "scopes": ["read"]}), 201)
    path = f"/keys/{made['id']}/rotate"
    rotated = expect_json(project.admin.post(path, json={"overlap_seconds": 3600}), 200)
    assert rotated["id"] == made["id"]
    for secret in (made["key"], rotated["key"]):
        expect_json(project.client(secret).get("/runs"), 200)
    again = expect_json(project.admin.post(path, json={"overlap_seconds": 0}), 200)
    assert [project.client(one["key"]).get("/runs").status_code for one in (made, rotated, again)] == [401, 401, 200]
    entries = expect_json(project.admin.get("/audit", params={"action": "key.rotated"}), 200)["items"]
    assert len(entries) == 2


def test_it_is_known_when_a_key_was_used(project: Project) -> None:
    """The list of keys says when each was used last, so that those of nobody can be revoked."""
    unused = expect_json(project.admin.post("/keys", json={"name": "unused", "scopes": ["read"]}), 201)["id"]
    used = expect_json(project.admin.post("/keys", json={"name": "used", "scopes": ["read"]}), 201)
    expect_json(project.client(used["key"]).get("/runs"), 200)
    listed = {one["id"]: one["last_used_at"] for one in expect_json(project.admin.get("/keys"), 200)["items"]}
    assert listed[unused] is None
    assert listed[used["id"]] is not None


def test_a_key_is_recognized(project: Project) -> None:
    """A scanner knows a key by its prefix, length and checksum; a text without them is no key, and no database is asked
    for it."""
    secret = project.key("read")
    assert re.fullmatch(r"esk_[0-9A-Za-z]{49}", secret)
    assert keys.is_well_formed(secret)
    for wrong in (secret[:-1], secret + "a", "esk_" + secret[5:] + "0", secret.replace("esk_", "ghp_"), "é" * 53, ""):
        assert not keys.is_well_formed(wrong)


def test_wrong_keys_are_not_tried_without_end(project: Project) -> None:
    """An address that sends wrong keys has to wait; others, and keys that this process knows, do not."""
    cache = KeyCache(project.database, 60.0, wrong_keys=Rate(burst=3, per_second=1e-6))
    secret, other = project.key("read"), project.key("read")
    assert cache.authenticate(secret, "10.0.0.1") is not None
    revoked = keys.generate_secret()
    assert [cache.authenticate(revoked, "10.0.0.1") for _ in range(10)] == [None] * 10, "one wrong key, not ten"
    for _ in range(2):
        assert cache.authenticate(keys.generate_secret(), "10.0.0.1") is None
    with pytest.raises(TooOften):
        cache.authenticate(keys.generate_secret(), "10.0.0.1")
    with pytest.raises(TooOften):
        cache.authenticate(other, "10.0.0.1")
    assert cache.authenticate(secret, "10.0.0.1") is not None
    assert cache.authenticate(other, "10.0.0.2") is not None


def test_a_key_guessed_too_often_is_answered_429(project: Project) -> None:
    """Over HTTP the answer is 429 with the time to wait, to the API, MLflow's clients and the sign-in form alike."""
    client = project.client(project.key("read"))
    guesser = project.client("esk_", "10.0.0.9")
    statuses = []
    for _ in range(25):
        guesser.headers["Authorization"] = f"Bearer {keys.generate_secret()}"
        statuses.append(guesser.get("/runs").status_code)
    assert (statuses[0], statuses[-1]) == (401, 429)
    assert int(guesser.get("/runs").headers["retry-after"]) > 0
    assert guesser.get(f"{project.url}/mlflow/api/2.0/mlflow/experiments/get?experiment_id=0").status_code == 429
    expect_json(client.get("/runs"), 200)


def test_a_veto_is_heard_though_others_guess_keys_behind_the_same_proxy(project: Project) -> None:
    """A key that this process does not know yet pauses the project from an address that sends one wrong key after the
    other; by any other path it would have to wait."""
    guesser = project.client("esk_", "10.0.0.7")
    for _ in range(25):
        guesser.headers["Authorization"] = f"Bearer {keys.generate_secret()}"
        guesser.get("/runs")
    person = project.client(project.key("operate"), "10.0.0.7")
    expect_json(person.post("/project/pause", json={"reason": "the eval set is broken"}), 200)
    expect_json(person.post("/project/resume", json={}), 200)
