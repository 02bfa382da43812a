"""Broken and hostile input: always a problem document that helps, never a 500, and nothing half stored."""

from __future__ import annotations

import collections
import gzip
import itertools
import json
import socket
from collections.abc import Iterator
from copy import deepcopy
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.service.web.api.conftest import Service
from tests.service.web.api.speaking import BODIES, World, populate, problem, said

JSON = {"content-type": "application/json"}

MEBIBYTE = 2**20

UNREADABLE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "blank": (b"  \n", "empty"),
    "cut off": (b'{"name": "x"', "line 1, column"),
    "trailing": (b'{"name": "x"} x', "column 15"),
    "second line": (b'{"name":\n  oops}', "line 2, column 3"),
    "not utf-8": (b'{"name": "\xff"}', "byte 10"),
    "utf-16": ('{"name": "x"}'.encode("utf-16"), "UTF-8"),
    "bom": (b'\xef\xbb\xbf{"name": "x"}', "BOM"),
    "NUL": (b"\x00", "line 1"),
    "bare NaN": (b'{"observations": [{"metric": "eval", "step": 1, "value": NaN}]}', '"NaN"'),
    "bare Infinity": (b'{"veto_window_seconds": Infinity}', '"Infinity"'),
    "bare -Infinity": (b'{"veto_window_seconds": -Infinity}', '"-Infinity"'),
    "deep lists": (b"[" * 200_000, "deep"),
    "deep objects": (b'{"a":' * 100_000, "deep"),
    "closed deep lists": (b'{"name": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
    "name twice": (b'{"name": "x", "name": "y"}', "'name' stands twice"),
    "inner name twice": (b'{"details": {"a": {"b": 1, "b": 2}}}', "'b' stands twice"),
    "surrogate name twice": (b'{"\\ud800": 1, "\\ud800": 2}', "stands twice"),
    "endless number": (b'{"step": ' + b"9" * 10_000 + b"}", "10000 digits"),
    "names without end": (b"[" + b",".join([b'{"a":0,"b":0,"c":0}'] * 100_000) + b"]", "names"),
    "many names": (b"{" + b",".join(b'"%d":0' % index for index in range(100_000)) + b"}", "100000 names"),
}

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


FOREIGN = ("POST", "/kubeflow/{name}")
"""Takes a document of which somebody else says what may be in it."""


@pytest.fixture(scope="module")
def everything(service: Service) -> tuple[httpx.Client, World]:
    """A project with one of everything, and a client that may do everything in it."""
    client = service.client(service.key(service.project()))
    return client, populate(client)


def client_for(service: Service, everything: tuple[httpx.Client, World], route: tuple[str, str]) -> httpx.Client:
    return service.client(service.key(None, "admin")) if route[1] == "/projects" else everything[0]


def stored(client: httpx.Client, world: World) -> list[Any]:
    paths = ("/project", "/runs", "/decisions", "/endpoints", "/deliveries", "/keys", "/policies")
    of_run = [world.path(f"/runs/{{run_id}}/{part}") for part in ("observations", "checkpoints", "verdicts")]
    return [said(client.get(path), 200) for path in (*paths, *of_run)]


@pytest.mark.parametrize("route", BODIES, ids=" ".join)
def test_unreadable_bodies(service: Service, everything: tuple[httpx.Client, World], route: tuple[str, str]) -> None:
    """A body that is not JSON is a 400 that says where it is not, on every route that takes one."""
    client, path = client_for(service, everything, route), everything[1].path(route[1])
    before = stored(*everything)
    for name, (body, words) in UNREADABLE.items():
        detail = problem(client.request(route[0], path, content=body, headers=JSON), 400)["detail"]
        assert words in detail, name
    assert stored(*everything) == before


@pytest.mark.parametrize("route", BODIES, ids=" ".join)
def test_other_documents(service: Service, everything: tuple[httpx.Client, World], route: tuple[str, str]) -> None:
    """JSON that is no object, or has a name that nobody knows, is a 422 that points at it.

    Kubeflow's reports hold names that others may add to.
    """
    client, path = client_for(service, everything, route), everything[1].path(route[1])
    before = stored(*everything)
    others: list[Any] = [None, 1, "x", [], [{}], True]
    for document in others:
        problem(client.request(route[0], path, content=json.dumps(document), headers=JSON), 422)
    for name in () if route == FOREIGN else ("nosuch", "", "a/b~c", "\ud800", "x" * 10_000, "\x00"):
        body = json.dumps(BODIES[route] | {name: 1})
        found = problem(client.request(route[0], path, content=body, headers=JSON), 422)
        if route[1] != "/policies" and name != "\ud800":  # a policy's own reader says what it may hold
            pointer = "/" + name.replace("~", "~0").replace("/", "~1")
            assert [error["pointer"] for error in found["errors"]] == [pointer]
    assert stored(*everything) == before


@pytest.mark.parametrize("route", BODIES, ids=" ".join)
def test_twisted_values(service: Service, everything: tuple[httpx.Client, World], route: tuple[str, str]) -> None:
    """Whatever stands in the place of a value: it is taken, or refused with a problem, and never a fault."""
    client, path = client_for(service, everything, route), everything[1].path(route[1])
    for where in places(BODIES[route]):
        for value in TWISTED:
            body = json.dumps(put(BODIES[route], where, value))
            response = client.request(route[0], path, content=body, headers=JSON)
            if response.status_code >= 400:
                problem(response)
            else:
                assert response.status_code in (200, 201, 202), (where, value)


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


@pytest.mark.parametrize(
    ("point", "pointer"),
    [
        ({"metric": "eval", "step": -1, "value": 1}, "/observations/1/step"),
        ({"metric": "eval", "step": 2**53, "value": 1}, "/observations/1/step"),
        ({"metric": "eval", "step": 1.5, "value": 1}, "/observations/1/step"),
        ({"metric": "eval", "step": True, "value": 1}, "/observations/1/step"),
        ({"metric": "eval", "step": "1", "value": 1}, "/observations/1/step"),
        ({"metric": "eval", "step": 1, "value": "nan"}, "/observations/1/value"),
        ({"metric": "eval", "step": 1, "value": "0.5"}, "/observations/1/value"),
        ({"metric": "eval", "step": 1, "value": None}, "/observations/1/value"),
        ({"metric": "eval", "step": 1, "value": True}, "/observations/1/value"),
        ({"metric": "eval", "step": 1, "value": 10**399}, "/observations/1/value"),
        ({"metric": "eval", "step": 1}, "/observations/1/value"),
        ({"metric": "", "step": 1, "value": 1}, "/observations/1/metric"),
        ({"metric": "a\nb\x1b", "step": 1, "value": 1}, "/observations/1/metric"),
        ({"metric": "eval", "step": 1, "value": 1, "stderr": -1}, "/observations/1/stderr"),
        ({"metric": "eval", "step": 1, "value": 1, "stderr": "NaN"}, "/observations/1/stderr"),
        ({"metric": "eval", "step": 1, "value": 1, "time": 5}, "/observations/1/time"),
        ({"metric": "eval", "step": 1, "value": 1, "time": "5"}, "/observations/1/time"),
        ({"metric": "eval", "step": 1, "value": 1, "time": "2026-13-01T00:00:00Z"}, "/observations/1/time"),
        ({"metric": "eval", "step": 1, "value": 1, "when": "now"}, "/observations/1/when"),
        ("eval", "/observations/1"),
    ],
)
def test_a_bad_point_refuses_its_batch(admin: httpx.Client, point: Any, pointer: str) -> None:
    """One malformed point among good ones is named by its place, and nothing of the batch is stored."""
    run = said(admin.post("/runs", json={"name": "r"}), 201)
    good = [{"metric": "eval", "step": step, "value": 0.5} for step in (10, 11)]
    body = {"observations": [good[0], point, good[1]]}
    errors = problem(admin.post(f"/runs/{run['id']}/observations", json=body), 422)["errors"]
    assert [error["pointer"] for error in errors] == [pointer]
    listed = said(admin.get(f"/runs/{run['id']}/observations", params={"metric": "eval"}), 200)
    assert listed["items"] == []


def test_every_bad_point_is_named(admin: httpx.Client) -> None:
    """Each bad point of a batch is named, up to a hundred, and all of them are counted."""
    run = said(admin.post("/runs", json={"name": "r"}), 201)
    points = [{"metric": "eval", "step": -step, "value": 0.5} for step in range(200)]
    found = problem(admin.post(f"/runs/{run['id']}/observations", json={"observations": points}), 422)
    assert found["detail"].startswith("199 things")
    assert [error["pointer"] for error in found["errors"]] == [f"/observations/{i}/step" for i in range(1, 101)]


def test_whole_floats_are_steps(admin: httpx.Client) -> None:
    """To JSON 120.0 is an integer, so it is a step."""
    run = said(admin.post("/runs", json={"name": "r"}), 201)
    body = {"observations": [{"metric": "eval", "step": 120.0, "value": 1}]}
    assert said(admin.post(f"/runs/{run['id']}/observations", json=body), 200)["accepted"] == 1


def test_batches_have_an_end(admin: httpx.Client) -> None:
    """A batch holds 1 to 10,000 points: of one too many, or of a million scribbles, nothing is stored."""
    run = said(admin.post("/runs", json={"name": "r"}), 201)
    path = f"/runs/{run['id']}/observations"
    points = [{"metric": "eval", "step": step, "value": 0.5} for step in range(10_001)]
    assert "10001 points" in str(problem(admin.post(path, json={"observations": points}), 422)["errors"])
    problem(admin.post(path, json={"observations": []}), 422)
    assert "10000" in str(problem(admin.post(path, json={"observations": [0] * 1_000_000}), 422)["errors"])
    assert said(admin.get(path, params={"metric": "eval"}), 200)["items"] == []
    assert said(admin.post(path, json={"observations": points[:10_000]}), 200)["accepted"] == 10_000


def test_lists_of_scribbles(admin: httpx.Client) -> None:
    """A million wrong scopes or event types are refused at the first."""
    errors = problem(admin.post("/keys", json={"name": "k", "scopes": [0] * 1_000_000}), 422)["errors"]
    assert len(errors) == 1
    body = {"url": "http://127.0.0.1:9/", "event_types": ["nosuch"] * 500_000}
    assert len(problem(admin.post("/endpoints", json=body), 422)["errors"]) == 1


def test_a_million_points(admin: httpx.Client) -> None:
    """A batch of a million points is a 413, with what to do, and the service goes on."""
    run = said(admin.post("/runs", json={"name": "r"}), 201)
    point = b'{"metric":"eval","step":1,"value":1},'
    body = b'{"observations":[' + (point * 1_000_000)[:-1] + b"]}"
    found = problem(admin.post(f"/runs/{run['id']}/observations", content=body, headers=JSON), 413)
    assert "smaller batches" in found["detail"]
    assert said(admin.get(f"/runs/{run['id']}"), 200)["last_step"] is None


def test_a_chunked_flood(admin: httpx.Client) -> None:
    """A body that does not say its length is cut off at the limit all the same."""
    run = said(admin.post("/runs", json={"name": "r"}), 201)

    def flood() -> Iterator[bytes]:
        for _ in range(12):
            yield b" " * MEBIBYTE

    problem(admin.post(f"/runs/{run['id']}/observations", content=flood(), headers=JSON), 413)
    said(admin.get(f"/runs/{run['id']}"), 200)


def test_an_endless_flood(service: Service, admin: httpx.Client) -> None:
    """A client that never stops sending is cut off."""
    address = urlsplit(service.url)
    head = f"POST /api/v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: {admin.headers['authorization']}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b" " * MEBIBYTE + b"\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(head.encode())
        with pytest.raises(ConnectionError):
            collections.deque(map(connection.sendall, itertools.repeat(chunk, 10_000)), maxlen=0)


def test_just_within_the_limit(admin: httpx.Client) -> None:
    """A body of exactly the limit is read."""
    body = b'{"name": "r"}'
    said(admin.post("/runs", content=body + b" " * (8 * MEBIBYTE - len(body)), headers=JSON), 201)


def test_a_broken_off_body(service: Service, admin: httpx.Client) -> None:
    """A client that goes away in the middle of its body leaves nothing behind."""
    address = urlsplit(service.url)
    head = f"POST /api/v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: {admin.headers['authorization']}\r\n"
    head += 'Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"name": "broken off"}'
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(head.encode())
    assert said(admin.get("/runs"), 200)["items"] == []


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/xml", "x", ""]
)
def test_other_content_types(admin: httpx.Client, content_type: str) -> None:
    """A body of another type is a 415 that names the right one."""
    response = admin.post("/runs", content=b'{"name": "r"}', headers={"content-type": content_type})
    assert "application/json" in problem(response, 415)["detail"]


def test_content_type_parameters(admin: httpx.Client) -> None:
    """A charset beside the content type is no reason to refuse."""
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    said(admin.post("/runs", content=b'{"name": "r"}', headers=headers), 201)


def test_compressed(admin: httpx.Client) -> None:
    """A compressed body is a 415: nobody unpacks a bomb here."""
    body = gzip.compress(b'{"name": "r"}')
    for encoding in ("gzip", "GZIP", "br", "gzip, identity"):
        response = admin.post("/runs", content=body, headers=JSON | {"content-encoding": encoding})
        assert "Content-Encoding" in problem(response, 415)["detail"]
    said(admin.post("/runs", content=b'{"name": "r"}', headers=JSON | {"content-encoding": "Identity"}), 201)


LISTS = ("/runs", "/decisions", "/deliveries", "/runs/{run_id}/verdicts", "/runs/{run_id}/observations")


@pytest.mark.parametrize("template", LISTS)
@pytest.mark.parametrize("value", ["", "x", "-1", "0", "1.5", "1e3", "9" * 30, "9" * 5000, "NaN", "\x00", "é", "0.0"])
def test_absurd_queries(everything: tuple[httpx.Client, World], template: str, value: str) -> None:
    """An absurd limit, cursor or filter is a 422 that names the parameter, or finds what it says."""
    client, world = everything
    path = world.path(template).partition("?")[0]
    for parameter in ("limit", "cursor", "state", "status", "run_id", "endpoint_id", "metric", "name"):
        query = {"metric": "eval"} | {parameter: value}
        response = client.get(path, params=query)
        if response.status_code != 200:
            assert parameter in str(problem(response, 422)["errors"])


@pytest.mark.parametrize("cursor", ["9999999999999999.0", "0.999999999", "9007199254740991.2147483647", "0.9999999999"])
def test_far_cursors(everything: tuple[httpx.Client, World], cursor: str) -> None:
    """A cursor of observations that lies beyond everything finds nothing or is refused."""
    client, world = everything
    path = world.path("/runs/{run_id}/observations")
    response = client.get(path.partition("?")[0], params={"metric": "eval", "cursor": cursor})
    assert response.status_code == 200 or problem(response, 422)


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
    said(admin.post("/policies", json={"name": "all", "members": members}), 201)
    run = said(admin.post("/runs", json={"name": "r", "policy": "all", "total_steps": 2**53 - 1}), 201)
    values: list[Any] = [1.7e308, -1.7e308, 5e-324, -0.0, "NaN", "Infinity", "-Infinity", 0]
    points = [
        {"metric": metric, "step": step if step < 7 else 2**53 - 1, "value": value, "stderr": 1.7e308}
        for step, value in enumerate(values)
        for metric in ("eval", "proxy", "loss", "kl")
    ]
    receipt = said(admin.post(f"/runs/{run['id']}/observations", json={"observations": points}), 200)
    assert receipt["accepted"] == len(points)
    said(admin.get(f"/runs/{run['id']}"), 200)
