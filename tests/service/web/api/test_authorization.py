"""Authorization: scopes, isolation of projects, keys to the installation, revoked keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
from evalstop_service.app import create_app
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.store.keys import SCOPES

from tests.fixtures.statements import record_statements
from tests.service.web.api.api_calls import Resources, call_route, create_resources, expect_json, expect_problem
from tests.service.web.api.conftest import ON_SQLITE, Service
from tests.service.web.api.routes import BODIES, INSTALLATION_ROUTES, ROUTE_SCOPES, ROUTES

pytestmark = ON_SQLITE


@dataclass(frozen=True)
class Tenant:
    """A project with one resource of each kind, and a client that may read it."""

    project: str
    resources: Resources
    reader: httpx.Client

    def read_project(self) -> list[Any]:
        """What the API shows of the project."""
        return [expect_json(self.reader.get(path), 200) for path in ("/runs", "/decisions", "/deliveries", "/project")]


@pytest.fixture(scope="module")
def openapi() -> dict[str, Any]:
    """The OpenAPI document."""
    return create_app(Settings(), Database("sqlite:///unused.db"), session_secret="none").openapi()


@pytest.fixture(scope="session")
def tenant(service: Service) -> Tenant:
    """A project that other projects must not see."""
    project = service.create_project()
    resources = create_resources(service.open_client(project))
    return Tenant(project, resources, service.open_client(project, "read"))


@pytest.fixture(scope="session")
def other_admin(service: Service) -> httpx.Client:
    """A client with an admin key to another, empty project."""
    return service.open_client(service.create_project())


@pytest.fixture(scope="session")
def third_project(service: Service) -> tuple[httpx.Client, Resources]:
    """A client with an admin key to a third project, and the ids of one resource of each kind in it."""
    client = service.open_client(service.create_project())
    return client, create_resources(client)


def test_every_route_has_scopes(openapi: dict[str, Any]) -> None:
    """Each route of the OpenAPI document is in the tables, and each that takes JSON has a body there."""
    described = {
        (method.upper(), path.removeprefix("/api/v1")): operation
        for path, operations in openapi["paths"].items()
        if path.startswith("/api/v1/")
        for method, operation in operations.items()
    }
    assert set(ROUTES) == set(described)
    with_json = {
        route
        for route, operation in described.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    }
    assert set(BODIES) == with_json


@pytest.mark.parametrize("scope", SCOPES)
def test_key_opens_exactly_the_routes_of_its_scope(service: Service, tenant: Tenant, scope: str) -> None:
    """Any other route is a 403 that names the required scopes."""
    project, resources = tenant.project, tenant.resources
    client = service.open_client(project, scope)
    deletions = [route for route in ROUTES if route[0] == "DELETE"]
    for route in [route for route in ROUTES if route not in deletions] + deletions:
        response = call_route(client, route, resources)
        if route in ROUTE_SCOPES and (scope in ROUTE_SCOPES[route] or scope == "admin"):
            assert response.status_code not in (401, 403), (route, response.text)
            assert response.status_code < 500, (route, response.text)
        else:
            detail = expect_problem(response, 403)["detail"]
            assert route in INSTALLATION_ROUTES or scope in detail


def call_from_many_addresses(
    client: httpx.Client, routes: list[tuple[str, str]], resources: Resources
) -> Iterator[httpx.Response]:
    """Send a valid request to each route, each from another address: many refusals to one address are delayed."""
    for number, route in enumerate(routes):
        client.headers["X-Forwarded-For"] = f"192.0.2.{number}"
        yield call_route(client, route, resources)


@pytest.mark.parametrize("header", [None, "Bearer esk_nosuch", "Basic YTpi", "Bearer", "Bearer \xff\xfe", "esk_x", ""])
def test_request_without_a_valid_key_is_refused(service: Service, tenant: Tenant, header: str | None) -> None:
    """Every route without a key is a 401 that says how to create one; routes with an invalid key are, too."""
    client = service.open_client_with_key(None)
    if header is not None:
        client.headers = httpx.Headers([(b"authorization", header.encode("latin-1"))])
    for response in call_from_many_addresses(client, ROUTES if header is None else ROUTES[::8], tenant.resources):
        assert "key create" in expect_problem(response, 401)["detail"]
        assert response.headers["www-authenticate"] == "Bearer"


def test_resources_of_another_project_are_not_found(tenant: Tenant, other_admin: httpx.Client) -> None:
    """A key of another project gets a 404 for an id, and lists without the resource; it changes nothing."""
    resources, before = tenant.resources, tenant.read_project()
    for route in ROUTES:
        if "_id}" in route[1]:
            expect_problem(call_route(other_admin, route, resources), 403 if route in INSTALLATION_ROUTES else 404)
        elif route[0] == "GET" and route not in INSTALLATION_ROUTES:
            text = call_route(other_admin, route, resources).text
            assert not any(resources.ids[name] in text for name in resources.ids if name != "name"), route
    assert tenant.read_project() == before


@pytest.mark.parametrize("route", [route for route in ROUTES if "_id}" in route[1]], ids=" ".join)
def test_foreign_and_missing_ids_get_the_same_response(
    service: Service, tenant: Tenant, other_admin: httpx.Client, route: tuple[str, str]
) -> None:
    """An id of another project and one that does not exist yield the same text by the same SQL statements."""
    foreign_ids = tenant.resources.ids
    missing_resources = Resources(
        {name: resource_id if name == "name" else str(uuid4()) for name, resource_id in foreign_ids.items()}
    )
    call_route(other_admin, route, missing_resources)  # caches the key
    responses = []
    for resources in (tenant.resources, missing_resources):
        with record_statements(service.database) as statements:
            response = call_route(other_admin, route, resources)
        text = response.text.replace(response.json()["request_id"], "ID")
        for resource_id in sorted(resources.ids.values(), key=len, reverse=True):
            text = text.replace(resource_id, "ID")
        responses.append((response.status_code, text, statements))
    assert responses[0] == responses[1]


def resolve_schema(openapi: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of the document without references and without the alternative null."""
    while "$ref" in schema or "anyOf" in schema:
        if "anyOf" in schema:
            schema = schema["anyOf"][0]
        else:
            schema = openapi["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def list_id_parameters(openapi: dict[str, Any]) -> Iterator[tuple[tuple[str, str], str, str]]:
    """Each id that a route takes in its query or body, as (route, "query" or "json", name)."""
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            route = method.upper(), path.removeprefix("/api/v1")
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "query" and resolve_schema(openapi, parameter["schema"]).get("format") == "uuid":
                    yield route, "query", parameter["name"]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for name, schema in resolve_schema(openapi, body).get("properties", {}).items():
                if resolve_schema(openapi, schema).get("format") == "uuid":
                    yield route, "json", name


RESOURCE_OF_PARAMETER = {
    "id": "run_id",
    "cursor": "decision_id",
    "after": "delivery_id",
    "opening": "run_id",
    "obeyed": "decision_id",
}
"""Which resource an id is of, where its parameter has another name."""


def test_foreign_ids_in_queries_and_bodies_reveal_nothing(
    openapi: dict[str, Any], tenant: Tenant, third_project: tuple[httpx.Client, Resources]
) -> None:
    """An id of another project as a parameter returns and changes nothing of that project, on every route."""
    (other_admin, own_resources), foreign_ids, before = third_project, tenant.resources.ids, tenant.read_project()
    parameters = sorted(list_id_parameters(openapi))
    assert len(parameters) > 10
    for route, where, name in parameters:
        foreign_id = foreign_ids[RESOURCE_OF_PARAMETER.get(name, name)]
        path = own_resources.path(route[1])
        document = BODIES.get(route)
        if where == "query":
            path += ("&" if "?" in path else "?") + f"{name}={foreign_id}"
        else:
            document = {**(document or {}), name: foreign_id}
        response = other_admin.request(route[0], path, json=document)
        assert response.status_code < 500, (route, name, response.text)
        text = response.text.replace(foreign_id, "")
        found = [kind for kind, id_ in foreign_ids.items() if kind.endswith("_id") and id_ in text]
        assert found == [], (route, name)
        assert tenant.read_project() == before, (route, name)


def test_batch_for_a_foreign_run_is_refused(tenant: Tenant, other_admin: httpx.Client) -> None:
    """Among the observations of many runs the run of another project is not found."""
    before = tenant.read_project()
    point = {"metric": "eval", "step": 99, "value": 0.1}
    batch = {"run_id": tenant.resources.ids["run_id"], "observations": [point]}
    answer = expect_json(other_admin.post("/observations", json={"runs": [batch]}), 200)
    assert (answer["runs"], [refused["code"] for refused in answer["refused"]]) == ([], ["not_found"])
    assert tenant.read_project() == before


def test_run_names_are_unique_per_project(service: Service) -> None:
    """Two projects can each have a run of the same name."""
    clients = [service.open_client(service.create_project()) for _ in range(2)]
    ids = {expect_json(client.post("/runs", json={"name": "same"}), 201)["id"] for client in clients}
    assert len(ids) == 2


def test_roles_are_corrected_by_admins_where_two_people_decide(service: Service) -> None:
    """In a project with `second_person` a key that may operate cannot turn the direction of an eval, by which the run
    would be stopped; without it, it can."""
    project = service.create_project()
    admin, operator = service.open_client(project), service.open_client(project, "operate")
    run = expect_json(admin.post("/runs", json={"name": "first"}), 201)["id"]
    turned = {"metrics": {"eval": {"role": "eval", "direction": "minimize"}}}
    expect_json(operator.patch(f"/runs/{run}/metrics", json=turned), 200)
    expect_json(admin.patch("/project", json={"second_person": True}), 200)
    back = {"metrics": {"eval": {"role": "eval", "direction": "maximize"}}}
    assert "admin" in expect_problem(operator.patch(f"/runs/{run}/metrics", json=back), 403)["detail"]
    assert expect_json(admin.get(f"/runs/{run}"), 200)["metrics"] == turned["metrics"]
    assert expect_json(admin.patch(f"/runs/{run}/metrics", json=back), 200)["metrics"] == back["metrics"]


def test_installation_key_opens_installation_routes_only(service: Service, tenant: Tenant) -> None:
    """It creates and lists projects but has no access within one; without `admin` it opens no route."""
    installation_admin, installation_reader = service.open_client(None, "admin"), service.open_client(None, "read")
    expect_json(installation_admin.get("/projects"), 200)
    for route in ROUTES:
        if route not in INSTALLATION_ROUTES:
            expect_problem(call_route(installation_admin, route, tenant.resources), 403)
        expect_problem(call_route(installation_reader, route, tenant.resources), 403)


def test_installation_key_creates_project_keys(service: Service) -> None:
    """The new keys have their scopes, and the project's audit log records them."""
    installation_admin = service.open_client(None, "admin")
    project = expect_json(installation_admin.post("/projects", json={"name": "set up"}), 201)["id"]
    body = {"name": "trainers", "scopes": ["ingest"]}
    created = expect_json(installation_admin.post(f"/projects/{project}/keys", json=body), 201)
    assert (created["name"], created["scopes"]) == ("trainers", ["ingest"])
    trainer = service.open_client_with_key(created["key"])
    expect_json(trainer.post("/runs", json={"name": "a"}), 201)
    expect_problem(trainer.get("/runs"), 403)
    admin = expect_json(
        installation_admin.post(f"/projects/{project}/keys", json={"name": "head", "scopes": ["admin"]}), 201
    )
    project_admin = service.open_client_with_key(admin["key"])
    entries = expect_json(project_admin.get("/audit", params={"action": "key.created"}), 200)["items"]
    assert [(entry["actor"], entry["subject"]) for entry in entries] == [
        ("key test", "key head"),
        ("key test", "key trainers"),
    ]
    expect_problem(installation_admin.post(f"/projects/{uuid4()}/keys", json=body), 404)
    expect_problem(project_admin.post(f"/projects/{project}/keys", json=body), 403)


@pytest.mark.parametrize("body", [b"{", b"\xff"])
def test_body_is_not_parsed_before_the_key_is_checked(service: Service, body: bytes) -> None:
    """An invalid body without a key is a 401, as parsing can take many times its size."""
    headers = {"Content-Type": "application/json"}
    expect_problem(service.open_client_with_key(None).post("/runs", content=body, headers=headers), 401)
    expect_problem(
        service.open_client(service.create_project()).post("/runs", content=body, headers=headers),
        400,
    )
