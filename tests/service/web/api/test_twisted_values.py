"""Values that a reader lets pass or a database may choke on: taken, or refused with a problem, never a fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from tests.service.web.api.api_calls import BODIES, Resources, expect_json, expect_problem
from tests.service.web.api.conftest import Service, client_for_route

ON_POSTGRESQL = pytest.mark.parametrize("service", ["postgresql"], indirect=True)
"""It refuses all that SQLite does, and more."""

TWISTED: list[Any] = [
    None,
    True,
    [],
    {},
    [[]],
    [None],
    "",
    " ",
    "12",
    "x" * 100_000,
    "\x00",
    "a\x00b",
    "\ud800",
    "a\udfffb",
    "\u202e",
    "NaN",
    "' OR 1=1 --",
    -1,
    2**31,
    2**53,
    2**63,
    2**64,
    10**30,
    10**399,
    -(10**399),
    1e308,
    -1e308,
    0.5,
    5e-324,
    {"a": 1},
    {"\ud800": "\ud800"},
    {"": ""},
    ["\ud800"],
    "paper@" + "9" * 90,
    "paper@" + "9" * 1000,
    "http://[",
    "http://x:99999/",
    "0000-00-00T00:00:00Z",
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59-14:00",
]


@ON_POSTGRESQL
@pytest.mark.parametrize("route", BODIES, ids=" ".join)
def test_twisted_values(
    service: Service, admin_and_resources: tuple[httpx.Client, Resources], route: tuple[str, str]
) -> None:
    """Whatever stands in the place of a value: it is taken, or refused with a problem, and never a fault."""
    client, path = client_for_route(service, admin_and_resources, route), admin_and_resources[1].path(route[1])
    with closing(HTTPConnection(client.base_url.host, client.base_url.port)) as connection:
        for where in places(BODIES[route]):
            for value in TWISTED:
                response = send(connection, client, route[0], path, json.dumps(put(BODIES[route], where, value)))
                if response.status_code >= 400:
                    expect_problem(response)
                else:
                    assert response.status_code in (200, 201, 202), (where, value)


def send(connection: HTTPConnection, client: httpx.Client, method: str, path: str, body: str) -> httpx.Response:
    """The answer to a request of this client, sent by what takes a fifth of its processor time."""
    url = client.base_url.path.rstrip("/") + path
    headers = {"content-type": "application/json", "authorization": client.headers["authorization"]}
    connection.request(method, url, body, headers)
    answer = connection.getresponse()
    request = httpx.Request(method, client.base_url.join(url))
    return httpx.Response(answer.status, headers=answer.getheaders(), content=answer.read(), request=request)


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*at, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*at, key))


def put(document: Any, where: tuple[Any, ...], value: Any) -> Any:
    changed = deepcopy(document)
    inner = changed
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    return changed


LISTS = ("/runs", "/decisions", "/deliveries", "/runs/{run_id}/verdicts", "/runs/{run_id}/observations")


@ON_POSTGRESQL
@pytest.mark.parametrize("template", LISTS)
@pytest.mark.parametrize("value", ["", "x", "-1", "0", "1.5", "1e3", "9" * 30, "9" * 5000, "NaN", "\x00", "é", "0.0"])
def test_absurd_queries(admin_and_resources: tuple[httpx.Client, Resources], template: str, value: str) -> None:
    """An absurd limit, cursor or filter is a 422 that names the parameter, or finds what it says."""
    client, resources = admin_and_resources
    path = resources.path(template).partition("?")[0]
    for parameter in ("limit", "cursor", "state", "status", "run_id", "endpoint_id", "metric", "name"):
        query = ({"metric": "eval"} if template.endswith(("/series", "/observations")) else {}) | {parameter: value}
        response = client.get(path, params=query)
        if response.status_code != 200:
            assert parameter in str(expect_problem(response, 422)["errors"])


@pytest.mark.parametrize("cursor", ["9999999999999999.0", "0.999999999", "9007199254740991.2147483647", "0.9999999999"])
def test_far_cursors(admin_and_resources: tuple[httpx.Client, Resources], cursor: str) -> None:
    """A cursor of observations that lies beyond everything finds nothing or is refused."""
    client, resources = admin_and_resources
    path = resources.path("/runs/{run_id}/observations")
    response = client.get(path.partition("?")[0], params={"metric": "eval", "cursor": cursor})
    assert response.status_code == 200 or expect_problem(response, 422)


@pytest.mark.parametrize(
    "target",
    ["/api/v1/runs/%00", "/api/v1/runs/%ff%fe", "/api/v1/policies/%00", "/api/v1/policies/%ed%a0%80", "/api/v1//runs"],
)
def test_odd_paths(service: Service, admin: httpx.Client, target: str) -> None:
    """Bytes in a path that are no text are nothing that is there."""
    response = admin.get(f"{service.url}{target}")
    assert response.status_code in (404, 422)
    assert response.headers["content-type"] == "application/problem+json"


def test_big_numbers_do_not_poison(admin: httpx.Client) -> None:
    """The largest and smallest doubles go through every detector and come back in an answer that is JSON."""
    members = [
        {"detector": "k_decline"},
        {"detector": "k_below_best"},
        {"detector": "loss_plateau", "params": {"min_delta": 1e308}},
        {"detector": "fixed_progress"},
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
