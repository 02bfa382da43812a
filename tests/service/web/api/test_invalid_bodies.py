"""Malformed and oversized bodies are answered with a helpful problem, never a 500, and nothing of them is stored."""

from __future__ import annotations

import collections
import gzip
import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.service.web.api.api_calls import Resources, expect_json, expect_problem, open_run
from tests.service.web.api.conftest import ON_SQLITE, Service, client_for_route
from tests.service.web.api.routes import BODIES

pytestmark = ON_SQLITE

JSON = {"content-type": "application/json"}

MEBIBYTE = 2**20

INVALID_JSON: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "char 0"),
    "blank": (b"  \n", "line 2"),
    "cut off": (b'{"name": "x"', "line 1 column"),
    "trailing": (b'{"name": "x"} x', "column 15"),
    "second line": (b'{"name":\n  oops}', "line 2 column 3"),
    "not utf-8": (b'{"name": "\xff"}', "position 10"),
    "utf-16": ('{"name": "x"}'.encode("utf-16"), "utf-8"),
    "bom": (b'\xef\xbb\xbf{"name": "x"}', "BOM"),
    "NUL": (b"\x00", "line 1"),
    "bare NaN": (b'{"observations": [{"metric": "eval", "step": 1, "value": NaN}]}', '"NaN"'),
    "bare Infinity": (b'{"veto_window_seconds": Infinity}', '"Infinity"'),
    "bare -Infinity": (b'{"veto_window_seconds": -Infinity}', '"-Infinity"'),
    "deep lists": (b"[" * 20_000, "deep"),
    "deep objects": (b'{"a":' * 20_000, "deep"),
    "closed deep lists": (b'{"name": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "deep"),
    "very long number": (b'{"step": ' + b"9" * 10_000 + b"}", "10000 digits"),
    "too many names in all": (b"[" + b",".join([b'{"a":0,"b":0,"c":0}'] * 40_000) + b"]", "names"),
    "too many names in one object": (
        b"{" + b",".join(b'"%d":0' % index for index in range(5_000)) + b"}",
        "5000 names",
    ),
}
"""Bodies that are not valid JSON, and what the problem's detail mentions."""

PARSERS = (("POST", "/runs"), ("POST", "/policies"))
"""A route of each way to read a document; these are sent every kind of invalid JSON."""


def read_project(client: httpx.Client, resources: Resources) -> list[Any]:
    """What the API shows of the project."""
    paths = ("/project", "/runs", "/decisions", "/endpoints", "/deliveries", "/keys", "/policies")
    of_run = [resources.path(f"/runs/{{run_id}}/{part}") for part in ("observations", "checkpoints")]
    shown = [expect_json(client.get(path), 200) for path in (*paths, *of_run)]
    for key in shown[paths.index("/keys")]["items"]:
        del key["last_used_at"]  # a background job writes it
    return shown


@pytest.mark.slow
def test_invalid_json_is_refused_with_its_position(
    service: Service, admin_and_resources: tuple[httpx.Client, Resources]
) -> None:
    """A body that is not JSON is a 400 that says where, on every route with a body; nothing of it is stored."""
    stored = read_project(*admin_and_resources)
    for route in BODIES:
        client, path = client_for_route(service, admin_and_resources, route), admin_and_resources[1].path(route[1])
        for name in INVALID_JSON if route in PARSERS else ("cut off", "deep objects"):
            body, expected_detail = INVALID_JSON[name]
            detail = expect_problem(client.request(route[0], path, content=body, headers=JSON), 400)["detail"]
            assert expected_detail in detail, (route, name)
    assert read_project(*admin_and_resources) == stored


@pytest.mark.slow
def test_wrong_documents_are_refused_with_a_pointer(
    service: Service, admin_and_resources: tuple[httpx.Client, Resources]
) -> None:
    """JSON that is no object, or has an unknown name, is a 422."""
    stored = read_project(*admin_and_resources)
    wrong_documents: list[Any] = [None, 1, "x", [], [{}], True]
    for route in BODIES:
        client = client_for_route(service, admin_and_resources, route)
        path = admin_and_resources[1].path(route[1]).partition("?")[0]
        for document in wrong_documents:
            expect_problem(client.request(route[0], path, content=json.dumps(document), headers=JSON), 422)
        for name in ("nosuch", "", "a/b~c", "\ud800", "x" * 10_000, "\x00"):
            body = json.dumps(BODIES[route] | {name: 1})
            document_problem = expect_problem(client.request(route[0], path, content=body, headers=JSON), 422)
            own_parser = route[1] in ("/policies", "/groups/{name}")
            if not own_parser and name != "\ud800":
                pointer = "/" + name.replace("~", "~0").replace("/", "~1")
                assert [error["pointer"] for error in document_problem["errors"]] == [pointer], route
    assert read_project(*admin_and_resources) == stored


@pytest.mark.parametrize(
    ("observation", "pointer"),
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
        ({"metric": "x" * 257, "step": 1, "value": 1}, "/observations/1/metric"),
        ({"metric": "a\nb\x1b", "step": 1, "value": 1}, "/observations/1/metric"),
        ({"metric": "eval", "step": 1, "value": 1, "stderr": -1}, "/observations/1/stderr"),
        ({"metric": "eval", "step": 1, "value": 1, "stderr": "NaN"}, "/observations/1/stderr"),
        ({"metric": "eval", "step": 1, "value": 1, "time": 5}, "/observations/1/time"),
        ({"metric": "eval", "step": 1, "value": 1, "time": "5"}, "/observations/1/time"),
        ({"metric": "eval", "step": 1, "value": 1, "time": "2026-13-01T00:00:00Z"}, "/observations/1/time"),
        ({"metric": "eval", "step": 1, "value": 1, "time": "0001-01-01T00:00:00+05:00"}, "/observations/1/time"),
        ({"metric": "eval", "step": 1, "value": 1, "time": "9999-12-31T23:59:59-05:00"}, "/observations/1/time"),
        ({"metric": "eval", "step": 1, "value": 1, "when": "now"}, "/observations/1/when"),
        ("eval", "/observations/1"),
    ],
)
def test_one_invalid_observation_refuses_its_batch(admin: httpx.Client, observation: Any, pointer: str) -> None:
    """The invalid observation is named by its index, and nothing of the batch is stored."""
    run = open_run(admin)
    valid = [{"metric": "eval", "step": step, "value": 0.5} for step in (10, 11)]
    body = {"observations": [valid[0], observation, valid[1]]}
    errors = expect_problem(admin.post(f"/runs/{run['id']}/observations", json=body), 422)["errors"]
    assert [error["pointer"] for error in errors] == [pointer]
    stored = expect_json(admin.get(f"/runs/{run['id']}/observations", params={"metric": "eval"}), 200)
    assert stored["items"] == []


def test_invalid_observations_are_listed_up_to_100(admin: httpx.Client) -> None:
    """All invalid observations of a batch are counted, and the first 100 listed."""
    run = open_run(admin)
    points = [{"metric": "eval", "step": -step, "value": 0.5} for step in range(200)]
    answer = expect_problem(admin.post(f"/runs/{run['id']}/observations", json={"observations": points}), 422)
    assert answer["detail"].startswith("the request has 199 errors")
    assert [error["pointer"] for error in answer["errors"]] == [f"/observations/{i}/step" for i in range(1, 101)]


def test_float_without_a_fraction_is_a_valid_step(admin: httpx.Client) -> None:
    """120.0 is an integer in JSON Schema."""
    run = open_run(admin)
    body = {"observations": [{"metric": "eval", "step": 120.0, "value": 1}]}
    assert expect_json(admin.post(f"/runs/{run['id']}/observations", json=body), 200)["accepted"] == 1


def test_batch_holds_1_to_10000_observations(admin: httpx.Client) -> None:
    """Of a batch without observations, or with too many, nothing is stored."""
    run = open_run(admin)
    path = f"/runs/{run['id']}/observations"
    points = [{"metric": "eval", "step": step, "value": 0.5} for step in range(10_001)]
    assert "10001 observations" in str(expect_problem(admin.post(path, json={"observations": points}), 422)["errors"])
    expect_problem(admin.post(path, json={"observations": []}), 422)
    assert "10000" in str(expect_problem(admin.post(path, json={"observations": [0] * 1_000_000}), 422)["errors"])
    assert expect_json(admin.get(path, params={"metric": "eval"}), 200)["items"] == []
    assert expect_json(admin.post(path, json={"observations": points[:10_000]}), 200)["accepted"] == 10_000


def test_long_lists_of_invalid_items_yield_one_error(admin: httpx.Client) -> None:
    """Of a million invalid scopes or event types only the first is reported."""
    errors = expect_problem(admin.post("/keys", json={"name": "k", "scopes": [0] * 1_000_000}), 422)["errors"]
    assert len(errors) == 1
    body = {"url": "http://127.0.0.1:9/", "event_types": ["nosuch"] * 500_000}
    assert len(expect_problem(admin.post("/endpoints", json=body), 422)["errors"]) == 1


def test_body_over_8_mib_is_refused(admin: httpx.Client) -> None:
    """A batch of a million observations is a 413 that advises smaller batches, and nothing is stored."""
    run = open_run(admin)
    point = b'{"metric":"eval","step":1,"value":1},'
    body = b'{"observations":[' + (point * 1_000_000)[:-1] + b"]}"
    answer = expect_problem(admin.post(f"/runs/{run['id']}/observations", content=body, headers=JSON), 413)
    assert "smaller batches" in answer["detail"]
    assert expect_json(admin.get(f"/runs/{run['id']}"), 200)["last_step"] is None


def test_chunked_body_over_the_limit_is_refused(admin: httpx.Client) -> None:
    """A body without a declared length is cut off at the limit."""
    run = open_run(admin)

    def flood() -> Iterator[bytes]:
        for _ in range(12):
            yield b" " * MEBIBYTE

    expect_problem(admin.post(f"/runs/{run['id']}/observations", content=flood(), headers=JSON), 413)
    expect_json(admin.get(f"/runs/{run['id']}"), 200)


def test_endless_body_is_disconnected(service: Service, admin: httpx.Client) -> None:
    """The server closes the connection of a client that never stops sending."""
    address = urlsplit(service.url)
    head = f"POST /api/v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: {admin.headers['authorization']}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b" " * MEBIBYTE + b"\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(head.encode())
        with pytest.raises(ConnectionError):
            collections.deque(map(connection.sendall, itertools.repeat(chunk, 10_000)), maxlen=0)


def test_body_of_exactly_8_mib_is_read(admin: httpx.Client) -> None:
    """The limit is inclusive."""
    body = b'{"name": "r"}'
    expect_json(admin.post("/runs", content=body + b" " * (8 * MEBIBYTE - len(body)), headers=JSON), 201)


def test_incomplete_body_stores_nothing(service: Service, admin: httpx.Client) -> None:
    """A client that disconnects within its body creates no run."""
    address = urlsplit(service.url)
    head = f"POST /api/v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: {admin.headers['authorization']}\r\n"
    head += 'Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"name": "broken off"}'
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(head.encode())
    assert expect_json(admin.get("/runs"), 200)["items"] == []


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/xml", "x", ""]
)
def test_other_content_type_is_refused(admin: httpx.Client, content_type: str) -> None:
    """A body of another type is a 415 that names the right type."""
    response = admin.post("/runs", content=b'{"name": "r"}', headers={"content-type": content_type})
    assert "application/json" in expect_problem(response, 415)["detail"]


def test_content_type_may_have_parameters(admin: httpx.Client) -> None:
    """Case and a charset parameter are ignored."""
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    expect_json(admin.post("/runs", content=b'{"name": "r"}', headers=headers), 201)


def test_compressed_body_is_refused(admin: httpx.Client) -> None:
    """Only observations of many runs may be compressed; another body with an encoding is a 415."""
    body = gzip.compress(b'{"name": "r"}')
    for encoding in ("gzip", "GZIP", "br", "gzip, identity"):
        response = admin.post("/runs", content=body, headers=JSON | {"content-encoding": encoding})
        assert "Content-Encoding" in expect_problem(response, 415)["detail"]
    expect_json(admin.post("/runs", content=b'{"name": "r"}', headers=JSON | {"content-encoding": "Identity"}), 201)
