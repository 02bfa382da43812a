"""Unusual values in bodies, queries and paths are accepted or refused, and never cause an internal error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from tests.service.web.api.api_calls import Resources, create_resources, expect_json, expect_problem
from tests.service.web.api.conftest import Service, client_for_route
from tests.service.web.api.routes import BODIES

ON_POSTGRESQL = pytest.mark.parametrize("service", ["postgresql"], indirect=True)
"""PostgreSQL refuses every value that SQLite refuses, and more."""

STRINGS: list[Any] = [None, 10**399, "x" * 100_000, "a\x00b", "a\udfffb", {"a": 1}]
NUMBERS: list[Any] = [None, 10**399, 2**63, 1e308]
CONTAINERS: list[Any] = [None, 10**399, ["\ud800"], {"a": 1}, {"\ud800": "\ud800"}]
"""What replaces a value of each kind: what is valid JSON of the expected type, and what a database refuses."""


@ON_POSTGRESQL
@pytest.mark.parametrize("route", BODIES, ids=" ".join)
def test_unusual_values_in_bodies_cause_no_internal_error(
    service: Service, admin_and_resources: tuple[httpx.Client, Resources], route: tuple[str, str]
) -> None:
    """Each value of a valid body is replaced by unusual ones; the response is a success or a problem."""
    client, path = client_for_route(service, admin_and_resources, route), admin_and_resources[1].path(route[1])
    request = client.build_request(route[0], path)
    with closing(HTTPConnection(client.base_url.host, client.base_url.port)) as connection:
        for value_path, valid in iterate_values(BODIES[route]):
            kind = CONTAINERS if isinstance(valid, (dict, list)) else NUMBERS
            for value in STRINGS if isinstance(valid, str) else kind:
                body = json.dumps(replace_value(BODIES[route], value_path, value))
                response = send(connection, request, body)
                if response.status_code == 429:  # the next project may send as many costly requests again
                    client = service.open_client(service.create_project())
                    request = client.build_request(route[0], create_resources(client).path(route[1]))
                    response = send(connection, request, body)
                assert response.status_code != 429, "every request is judged by its content"
                if response.status_code >= 400:
                    expect_problem(response)
                else:
                    assert response.status_code in (200, 201, 202), (value_path, value)


def send(connection: HTTPConnection, request: httpx.Request, body: str) -> httpx.Response:
    """Send a request with this body by `http.client`, which takes a fifth of httpx's CPU time."""
    headers = {"content-type": "application/json", "authorization": request.headers["authorization"]}
    connection.request(request.method, request.url.raw_path.decode(), body, headers)
    answer = connection.getresponse()
    return httpx.Response(answer.status, headers=answer.getheaders(), content=answer.read(), request=request)


def iterate_values(document: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each value in a document, after its path."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*prefix, key), value
        if isinstance(value, (dict, list)):
            yield from iterate_values(value, (*prefix, key))


def replace_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = deepcopy(document)
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return copy


LISTS = ("/runs", "/decisions", "/deliveries", "/runs/{run_id}/observations")


@ON_POSTGRESQL
@pytest.mark.parametrize("template", LISTS)
@pytest.mark.parametrize("value", ["", "x", "-1", "1.5", "9" * 5000, "\x00"])
def test_invalid_query_parameters_are_named(
    admin_and_resources: tuple[httpx.Client, Resources], template: str, value: str
) -> None:
    """A query parameter with an unusual value is refused by name, or the list is filtered by it."""
    client, resources = admin_and_resources
    path = resources.path(template).partition("?")[0]
    for parameter in ("limit", "cursor", "state", "status", "run_id", "endpoint_id", "metric", "name"):
        query = ({"metric": "eval"} if template.endswith("/observations") else {}) | {parameter: value}
        response = client.get(path, params=query)
        if response.status_code != 200:
            assert parameter in str(expect_problem(response, 422)["errors"])


@pytest.mark.parametrize("cursor", ["9999999999999999.0", "0.999999999", "9007199254740991.2147483647", "0.9999999999"])
def test_extreme_cursor_is_harmless(admin_and_resources: tuple[httpx.Client, Resources], cursor: str) -> None:
    """A cursor with extreme numbers yields a page, or is refused."""
    client, resources = admin_and_resources
    path = resources.path("/runs/{run_id}/observations")
    response = client.get(path.partition("?")[0], params={"metric": "eval", "cursor": cursor})
    assert response.status_code == 200 or expect_problem(response, 422)


@pytest.mark.parametrize(
    "target",
    ["/api/v1/runs/%00", "/api/v1/runs/%ff%fe", "/api/v1/policies/%00", "/api/v1/policies/%ed%a0%80", "/api/v1//runs"],
)
def test_undecodable_paths_are_not_found(service: Service, admin: httpx.Client, target: str) -> None:
    """Bytes in a path that are not valid text are answered with a problem."""
    response = admin.get(f"{service.url}{target}")
    assert response.status_code in (404, 422)
    assert response.headers["content-type"] == "application/problem+json"


def test_extreme_numbers_pass_every_detector(admin: httpx.Client) -> None:
    """The largest and smallest doubles are stored, and the run's response is valid JSON."""
    members = [
        {"detector": "k_decline"},
        {"detector": "k_decline", "params": {"min_delta": 1e308}},
        {"detector": "non_finite"},
    ]
    expect_json(admin.post("/policies", json={"name": "all", "members": members}), 201)
    run = expect_json(admin.post("/runs", json={"name": "r", "policy": "all", "total_steps": 2**53 - 1}), 201)
    values: list[Any] = [1.7e308, -1.7e308, 5e-324, -0.0, "NaN", "Infinity", "-Infinity", 0]
    points = [
        {"metric": metric, "step": step if step < 7 else 2**53 - 1, "value": value, "stderr": 1.7e308}
        for step, value in enumerate(values)
        for metric in ("eval", "proxy", "loss", "kl")
    ]
    receipt = expect_json(admin.post(f"/runs/{run['id']}/observations", json={"observations": points}), 200)
    assert receipt["accepted"] == len(points)
    expect_json(admin.get(f"/runs/{run['id']}"), 200)
