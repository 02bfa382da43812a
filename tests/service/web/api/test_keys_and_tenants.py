"""Who may do what: scopes, projects apart from each other, keys to the installation, keys out of use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
from evalstop_service.app import create_app
from evalstop_service.clock import utc_now
from evalstop_service.settings import Settings
from evalstop_service.store import keys
from evalstop_service.store.database import Database
from evalstop_service.store.keys import SCOPES

from tests.fixtures.statements import record_statements
from tests.service.web.api.api_calls import (
    BODIES,
    ROUTES,
    Resources,
    call_route,
    create_resources,
    expect_json,
    expect_problem,
)
from tests.service.web.api.conftest import ON_SQLITE, Service

pytestmark = ON_SQLITE

DOCUMENT = create_app(Settings(), Database("sqlite:///never-asked.db"), session_secret="none").openapi()

MAY: dict[tuple[str, str], set[str]] = {
    ("GET", "/project"): {"read"},
    ("PATCH", "/project"): set(),
    ("GET", "/key"): {"read", "ingest", "report", "operate"},
    ("GET", "/keys"): set(),
    ("POST", "/project/pause"): {"operate"},
    ("POST", "/project/resume"): {"operate"},
    ("POST", "/keys"): set(),
    ("DELETE", "/keys/{key_id}"): set(),
    ("POST", "/keys/{key_id}/rotate"): set(),
    ("GET", "/sessions"): set(),
    ("DELETE", "/sessions/{session_id}"): set(),
    ("GET", "/policies"): {"read"},
    ("GET", "/policies/{name}"): {"read"},
    ("POST", "/policies"): set(),
    ("GET", "/policies/{name}/rollout-stage"): {"read"},
    ("PUT", "/policies/{name}/rollout-stage"): set(),
    ("DELETE", "/policies/{name}/rollout-stage"): set(),
    ("POST", "/policies/{name}/rollout-stage/demote"): set(),
    ("GET", "/proposals"): {"read"},
    ("GET", "/proposals/{proposal_id}"): {"read"},
    ("POST", "/proposals/{proposal_id}/confirm"): {"operate"},
    ("POST", "/proposals/{proposal_id}/refuse"): {"operate"},
    ("GET", "/precision"): {"read"},
    ("GET", "/cases"): {"read"},
    ("PUT", "/project/role-patterns"): set(),
    ("PATCH", "/runs/{run_id}"): {"operate"},
    ("GET", "/runs/{run_id}/metrics"): {"read"},
    ("PATCH", "/runs/{run_id}/metrics"): {"operate"},
    ("POST", "/runs/{run_id}/stop"): {"operate"},
    ("POST", "/policies/backtests"): {"operate"},
    ("GET", "/policies/backtests"): {"read"},
    ("GET", "/policies/backtests/{backtest_id}"): {"read"},
    ("GET", "/runs"): {"read"},
    ("POST", "/runs"): {"ingest"},
    ("GET", "/runs/{run_id}"): {"read", "ingest"},
    ("POST", "/runs/{run_id}/resume"): {"ingest"},
    ("POST", "/runs/{run_id}/eval-changes"): {"ingest"},
    ("POST", "/runs/{run_id}/heartbeat"): {"ingest"},
    ("POST", "/runs/{run_id}/finish"): {"ingest"},
    ("GET", "/runs/{run_id}/verdicts"): {"read"},
    ("POST", "/observations"): {"ingest"},
    ("POST", "/runs/{run_id}/observations"): {"ingest"},
    ("POST", "/runs/{run_id}/openmetrics"): {"ingest"},
    ("POST", "/kubeflow/{name}"): {"ingest"},
    ("GET", "/runs/{run_id}/observations"): {"read"},
    ("GET", "/runs/{run_id}/series"): {"read"},
    ("POST", "/runs/{run_id}/checkpoints"): {"ingest"},
    ("GET", "/runs/{run_id}/checkpoints"): {"read", "report"},
    ("GET", "/eval-requests"): {"read", "ingest", "report", "operate"},
    ("GET", "/runs/{run_id}/eval-requests"): {"read", "ingest", "report", "operate"},
    ("POST", "/runs/{run_id}/eval-requests/{request_id}/answer"): {"ingest", "report", "operate"},
    ("GET", "/decisions"): {"read"},
    ("GET", "/decisions/{decision_id}"): {"read"},
    ("POST", "/decisions/{decision_id}/veto"): {"operate"},
    ("POST", "/decisions/{decision_id}/release"): {"operate"},
    ("POST", "/decisions/{decision_id}/undo"): {"operate"},
    ("POST", "/decisions/{decision_id}/report"): {"report", "operate"},
    ("POST", "/decisions/{decision_id}/outcome"): {"operate"},
    ("GET", "/decisions/{decision_id}/outcomes"): {"read"},
    ("GET", "/runs/{run_id}/outcomes"): {"read"},
    ("POST", "/runs/{run_id}/outcome"): {"operate"},
    ("GET", "/endpoints"): set(),
    ("POST", "/endpoints"): set(),
    ("PATCH", "/endpoints/{endpoint_id}"): set(),
    ("DELETE", "/endpoints/{endpoint_id}"): set(),
    ("POST", "/endpoints/{endpoint_id}/rotate-secret"): set(),
    ("POST", "/pull/endpoints"): set(),
    ("POST", "/pull/endpoints/{endpoint_id}/claim"): {"report", "operate"},
    ("POST", "/pull/endpoints/{endpoint_id}/settle"): {"report", "operate"},
    ("GET", "/deliveries"): {"read"},
    ("POST", "/deliveries/{delivery_id}/retry"): {"operate"},
    ("GET", "/deliveries/{delivery_id}"): {"read"},
    ("POST", "/deliveries/{delivery_id}/replay"): {"operate"},
    ("POST", "/endpoints/{endpoint_id}/replay"): {"operate"},
    ("POST", "/endpoints/{endpoint_id}/test"): {"operate"},
    ("GET", "/audit"): set(),
    ("GET", "/audit/export"): set(),
    ("GET", "/events/schemas"): {"read"},
    ("GET", "/events/schemas/{event_type}"): {"read"},
}
"""The scopes that open each route of a project, `admin` aside, which opens them all."""

LANDLORD = {
    ("GET", "/projects"),
    ("POST", "/projects"),
    ("POST", "/projects/{project_id}/keys"),
    ("PUT", "/projects/{project_id}/quotas"),
}
"""The routes that a key to the installation opens, and no other key."""


@dataclass(frozen=True)
class Tenant:
    """A project with one of everything in it, and a client that reads there."""

    project: str
    resources: Resources
    reader: httpx.Client

    def snapshot(self) -> list[Any]:
        """What it sees of its own."""
        return [expect_json(self.reader.get(path), 200) for path in ("/runs", "/decisions", "/deliveries", "/project")]


@pytest.fixture(scope="session")
def tenant(service: Service) -> Tenant:
    """A project that others must not see."""
    project = service.create_project()
    resources = create_resources(service.open_client(project))
    return Tenant(project, resources, service.open_client(project, "read"))


@pytest.fixture(scope="session")
def stranger(service: Service) -> httpx.Client:
    """A client that may do everything in another project, which stays empty of what it does not do itself."""
    return service.open_client(service.create_project())


@pytest.fixture(scope="session")
def peer(service: Service) -> tuple[httpx.Client, Resources]:
    """A client that may do everything in a third project, which has one of everything, too."""
    client = service.open_client(service.create_project())
    return client, create_resources(client)


def test_the_table_is_complete() -> None:
    """Every route of the document has its row in the table of scopes, and is asked by the tests below."""
    described = {
        (method.upper(), path.removeprefix("/api/v1"))
        for path, operations in DOCUMENT["paths"].items()
        if path.startswith("/api/v1/")
        for method in operations
    }
    assert {*MAY, *LANDLORD} == set(ROUTES) == described


@pytest.mark.parametrize("scope", SCOPES)
def test_scopes(service: Service, tenant: Tenant, scope: str) -> None:
    """A key opens exactly the routes of its scope: any other route answers 403 and says what it needs."""
    project, resources = tenant.project, tenant.resources
    client = service.open_client(project, scope)
    destroys = [route for route in ROUTES if route[0] == "DELETE"]
    for route in [route for route in ROUTES if route not in destroys] + destroys:
        response = call_route(client, route, resources)
        if route in MAY and (scope in MAY[route] or scope == "admin"):
            assert response.status_code not in (401, 403), (route, response.text)
            assert response.status_code < 500, (route, response.text)
        else:
            detail = expect_problem(response, 403)["detail"]
            assert route in LANDLORD or scope in detail


@pytest.mark.parametrize("header", [None, "Bearer esk_nosuch", "Basic YTpi", "Bearer", "Bearer \xff\xfe", "esk_x", ""])
def test_without_a_valid_key(service: Service, tenant: Tenant, header: str | None) -> None:
    """Without a key in use every route answers 401, says how to get one, and does nothing."""
    client = service.open_client_with_key(None)
    if header is not None:
        client.headers = httpx.Headers([(b"authorization", header.encode("latin-1"))])
    for route in ROUTES:
        response = call_route(client, route, tenant.resources)
        assert "key create" in expect_problem(response, 401)["detail"]
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_tenants_do_not_see_each_other(tenant: Tenant, stranger: httpx.Client, route: tuple[str, str]) -> None:
    """To a key of another project what is in this one does not exist: 404 by its id, absent from every list."""
    resources = tenant.resources
    before = tenant.snapshot()
    if "_id}" in route[1]:
        expect_problem(call_route(stranger, route, resources), 403 if route in LANDLORD else 404)
    elif route[0] == "GET" and route not in LANDLORD:
        text = call_route(stranger, route, resources).text
        assert not any(resources.ids[name] in text for name in resources.ids if name not in ("name", "event_type"))
    assert tenant.snapshot() == before


@pytest.mark.parametrize("route", [route for route in ROUTES if "_id}" in route[1]], ids=" ".join)
def test_what_is_foreign_is_missing(
    service: Service, tenant: Tenant, stranger: httpx.Client, route: tuple[str, str]
) -> None:
    """What belongs to another project answers as what does not exist does: the same words, by the same statements."""
    ours = tenant.resources.ids
    nowhere = Resources({name: one if name in ("name", "event_type") else str(uuid4()) for name, one in ours.items()})
    call_route(stranger, route, nowhere)  # the key is remembered from now on
    answers = []
    for resources in (tenant.resources, nowhere):
        with record_statements(service.database) as seen:
            response = call_route(stranger, route, resources)
        text = response.text.replace(response.json()["request_id"], "ID")
        for one in sorted(resources.ids.values(), key=len, reverse=True):
            text = text.replace(one, "ID")
        answers.append((response.status_code, text, seen))
    assert answers[0] == answers[1]


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of the document without references and without the choice of null."""
    while "$ref" in schema or "anyOf" in schema:
        if "anyOf" in schema:
            schema = schema["anyOf"][0]
        else:
            schema = DOCUMENT["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def list_ids() -> Iterator[tuple[tuple[str, str], str, str]]:
    """Every id that a route takes elsewhere than in its path, as (route, "query" or "json", name)."""
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            route = method.upper(), path.removeprefix("/api/v1")
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "query" and resolve(parameter["schema"]).get("format") == "uuid":
                    yield route, "query", parameter["name"]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for name, schema in resolve(body).get("properties", {}).items():
                if resolve(schema).get("format") == "uuid":
                    yield route, "json", name


KINDS = {
    "cursor": "decision_id",
    "after": "delivery_id",
    "opening": "run_id",
    "obeyed": "decision_id",
}
"""What an id is of whose name does not tell."""


@pytest.mark.parametrize(("route", "where", "name"), sorted(list_ids()), ids=str)
def test_a_foreign_id_opens_nothing(
    tenant: Tenant, peer: tuple[httpx.Client, Resources], route: tuple[str, str], where: str, name: str
) -> None:
    """Wherever the document has a route take an id in its query or body, one of another project gives nothing of it."""
    (stranger, own), foreign, before = peer, tenant.resources.ids, tenant.snapshot()
    id_ = foreign[KINDS.get(name, name)]
    path = own.path(route[1])
    document = BODIES.get(route)
    if where == "query":
        path += ("&" if "?" in path else "?") + f"{name}={id_}"
    else:
        document = {**(document or {}), name: id_}
    response = stranger.request(route[0], path, json=document)
    assert response.status_code < 500, response.text
    text = response.text.replace(id_, "")
    assert [one for kind, one in foreign.items() if kind.endswith("_id") and one in text] == []
    assert tenant.snapshot() == before


def test_a_line_for_a_foreign_run_is_refused(tenant: Tenant, stranger: httpx.Client) -> None:
    """In a stream of lines the run of another project does not exist."""
    before = tenant.snapshot()
    line = f'{{"run_id": "{tenant.resources.ids["run_id"]}", "metric": "eval", "step": 99, "value": 0.1}}\n'
    headers = {"Content-Type": "application/x-ndjson"}
    answer = expect_json(stranger.post("/observations", content=line, headers=headers), 200)
    assert (answer["accepted"], answer["error_count"], answer["runs"]) == (0, 1, [])
    assert tenant.snapshot() == before


def test_filters_do_not_leak(service: Service, tenant: Tenant) -> None:
    """Asking a list for another project's run, endpoint or cursor gives nothing of it."""
    stranger = service.open_client(service.create_project())
    ids = tenant.resources.ids
    last = "ffffffff-ffff-7fff-bfff-ffffffffffff"
    for path, query in (
        ("/decisions", {"run_id": ids["run_id"]}),
        ("/deliveries", {"run_id": ids["run_id"]}),
        ("/deliveries", {"endpoint_id": ids["endpoint_id"]}),
        ("/runs", {"cursor": last}),
        ("/decisions", {"cursor": last}),
        ("/deliveries", {"cursor": last}),
        ("/runs", {"name": "first"}),
    ):
        assert expect_json(stranger.get(path, params=query), 200)["items"] == []


def test_a_name_is_taken_in_one_project_only(service: Service) -> None:
    """Two projects each have a run of the same name."""
    ids = {expect_json(service.open_client(service.create_project()).post("/runs", json={"name": "same"}), 201)["id"]}
    ids |= {expect_json(service.open_client(service.create_project()).post("/runs", json={"name": "same"}), 201)["id"]}
    assert len(ids) == 2


def test_installation_keys(service: Service, tenant: Tenant) -> None:
    """A key to the installation makes and lists projects and opens nothing within one; without `admin`, nothing."""
    landlord, guest = (
        service.open_client(None, "admin"),
        service.open_client(None, "read"),
    )
    expect_json(landlord.get("/projects"), 200)
    for route in ROUTES:
        if route not in LANDLORD:
            expect_problem(call_route(landlord, route, tenant.resources), 403)
        expect_problem(call_route(guest, route, tenant.resources), 403)


def test_an_installation_key_makes_keys_of_projects(service: Service) -> None:
    """Who sets up projects gives each its keys, which may do what their scopes say; the project's log has them."""
    landlord = service.open_client(None, "admin")
    project = expect_json(landlord.post("/projects", json={"name": "set up"}), 201)["id"]
    body = {"name": "trainers", "scopes": ["ingest"]}
    made = expect_json(landlord.post(f"/projects/{project}/keys", json=body), 201)
    assert (made["name"], made["scopes"]) == ("trainers", ["ingest"])
    trainer = service.open_client_with_key(made["key"])
    expect_json(trainer.post("/runs", json={"name": "a"}), 201)
    expect_problem(trainer.get("/runs"), 403)
    admin = expect_json(landlord.post(f"/projects/{project}/keys", json={"name": "head", "scopes": ["admin"]}), 201)
    project_admin = service.open_client_with_key(admin["key"])
    entries = expect_json(project_admin.get("/audit", params={"action": "key.made"}), 200)["items"]
    assert [(entry["actor"], entry["subject"]) for entry in entries] == [
        ("key test", "key head"),
        ("key test", "key trainers"),
    ]
    expect_problem(landlord.post(f"/projects/{uuid4()}/keys", json=body), 404)
    expect_problem(project_admin.post(f"/projects/{project}/keys", json=body), 403)


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"a": 1, "a": 2}'])
def test_nothing_is_read_for_nobody(service: Service, body: bytes) -> None:
    """What cannot be read is not looked at before there is a key: a body unfolds to many times its size."""
    headers = {"Content-Type": "application/json"}
    expect_problem(service.open_client_with_key(None).post("/runs", content=body, headers=headers), 401)
    expect_problem(
        service.open_client(service.create_project()).post("/runs", content=body, headers=headers),
        400,
    )


def test_a_revoked_key(service: Service, tenant: Tenant) -> None:
    """A key that was revoked opens no route any more."""
    project, resources = tenant.project, tenant.resources
    secret = service.create_key(project)
    with service.database.transaction() as tx:
        key = keys.authenticate_key(tx, secret, utc_now())
        assert key is not None
        assert key.project_id is not None
        assert keys.revoke_key(tx, key.project_id, key.id, utc_now())
    client = service.open_client_with_key(secret)
    for route in ROUTES:
        expect_problem(call_route(client, route, resources), 401)
