"""Streams of lines over HTTP: the verdicts of single posts, stored while they arrive, and harmless to break off."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.ingest import Committer, RunCache
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.web import problems
from evalstop_service.web.api import stream as bulk
from evalstop_service.web.api.reading.stream import StreamLimits
from evalstop_service.web.context import Context
from evalstop_service.web.pull_waiters import PullWaiters
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.http_server import serve_app
from tests.service.web.api.api_calls import FALLING, expect_json, expect_problem
from tests.service.web.api.conftest import Service
from tests.service.web.api.test_unpacking import PACKED

LINES = {"content-type": "application/x-ndjson"}
DEADLINE_SECONDS = 30.0
NAMES = count()

Point = dict[str, Any]


def opened(client: httpx.Client, number: int = 1) -> list[str]:
    """The ids of new runs."""
    return [expect_json(client.post("/runs", json={"name": f"bulk-{next(NAMES)}"}), 201)["id"] for _ in range(number)]


def line(run_id: str, point: Point) -> bytes:
    return json.dumps({"run_id": run_id} | point).encode()


def stream(client: httpx.Client, body: Any, encoding: str = "identity") -> httpx.Response:
    return client.post("/observations", content=body, headers=LINES | {"content-encoding": encoding})


def steps(client: httpx.Client, run_id: str, metric: str = "eval") -> list[int]:
    items = expect_json(client.get(f"/runs/{run_id}/observations", params={"metric": metric}), 200)["items"]
    return [item["step"] for item in items]


def wait_for(client: httpx.Client, run_id: str, expected: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (found := steps(client, run_id)) != expected:
        assert time.monotonic() < deadline, f"{found} are stored"
        time.sleep(0.01)


def test_a_stream(admin: httpx.Client) -> None:
    """Lines of several runs, single and in batches: the answer tells of each run, and of each line that is wrong."""
    falling, other = opened(admin, 2)
    nobody = "00000000-0000-7000-8000-000000000000"
    lines = [
        line(falling, FALLING[0]),
        line(other, FALLING[0]),
        b"oops",
        json.dumps({"run_id": falling, "observations": FALLING}).encode(),
        b"",
        line(nobody, FALLING[0]),
        line(other, {"metric": "eval", "step": 0, "value": 7, "time": "2026-01-01T00:00:00Z"}),
        line(other, {"metric": "lo\x01ss", "step": 0, "value": "NaN"}),
        line(other.upper(), {"metric": "loss", "step": 0, "value": "NaN"}),
    ]
    answer = expect_json(stream(admin, b"\n".join(lines)), 200)
    told, errors = answer.pop("runs"), answer.pop("errors")
    assert answer == {"lines": 9, "accepted": 7, "duplicates": 1, "conflict_count": 1, "error_count": 4}
    assert [(run["run_id"], run["accepted"], run["verdict"], run["should_stop"]) for run in told] == [
        (falling, 5, "stop", True),
        (other, 2, "continue", False),
    ]
    assert [(error["line"], error["title"]) for error in errors] == [
        (3, "The line is not valid JSON"),
        (6, "Not found"),
        (7, "Conflict with what is recorded"),
        (8, "The line is not valid"),
    ]
    assert nobody in errors[1]["detail"]
    assert "0.5" in errors[2]["detail"]
    assert steps(admin, falling) == [0, 1, 2, 3, 4]
    assert steps(admin, other, "loss") == [0]


series = st.lists(
    st.fixed_dictionaries(
        {
            "metric": st.sampled_from(["eval", "eval", "loss", "kl"]),
            "step": st.integers(0, 8),
            "value": st.sampled_from([0.1, 0.2, 0.3, 0.4, "NaN"]),
        }
    ),
    min_size=1,
    max_size=15,
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(told=st.lists(series, min_size=1, max_size=3), data=st.data(), encoding=st.sampled_from(sorted(PACKED)))
def test_verdicts_of_single_posts(
    admin: httpx.Client, told: list[list[Point]], data: st.DataObject, encoding: str
) -> None:
    """However lines of several runs are mixed, cut and packed, each run gets the verdict that single posts give."""
    single, bulk = opened(admin, len(told)), opened(admin, len(told))
    for run_id, points in zip(single, told, strict=True):
        for point in points:
            expect_json(admin.post(f"/runs/{run_id}/observations", json={"observations": [point]}), 200)
    left = [list(points) for points in told]
    lines = []
    while any(left):
        which = data.draw(st.sampled_from([number for number, points in enumerate(left) if points]))
        lines.append(line(bulk[which], left[which].pop(0)))
        lines += data.draw(st.sampled_from([[], [], [b"garbage"], [b""]]))
    body = PACKED[encoding](b"\n".join(lines))
    # A share, for how long the body is depends on ids that are never twice the same.
    size = max(1, len(body) * data.draw(st.integers(0, 1000)) // 1000)
    answer = expect_json(stream(admin, iter([body[at : at + size] for at in range(0, len(body), size)]), encoding), 200)
    assert answer["error_count"] == answer["conflict_count"] + lines.count(b"garbage")
    standing = {run["run_id"]: run for run in answer["runs"]}
    for one, other in zip(single, bulk, strict=True):
        expected, found = (expect_json(admin.get(f"/runs/{run_id}"), 200) for run_id in (one, other))
        for word in ("verdict", "should_stop", "last_step", "raw_maximum"):
            assert found[word] == expected[word]
        assert standing[other]["verdict"] == expected["verdict"]["verdict"]
        assert standing[other]["should_stop"] == expected["should_stop"]


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "", "application/x-ndjsonx"])
def test_other_content_types(admin: httpx.Client, content_type: str) -> None:
    """A body of another type is a 415 that names the right one."""
    response = admin.post("/observations", content=b"{}", headers={"content-type": content_type})
    assert "application/x-ndjson" in expect_problem(response, 415)["detail"]


def test_other_encodings(admin: httpx.Client) -> None:
    """A body packed in another way, or twice, is a 415 that names the ways there are."""
    for encoding in ("br", "deflate", "gzip, gzip"):
        response = stream(admin, b"", encoding)
        assert "gzip, zstd, identity" in expect_problem(response, 415)["detail"]
        assert response.headers["accept-encoding"] == "gzip, zstd, identity"


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_cut_off_file(admin: httpx.Client, encoding: str) -> None:
    """Of a packed file whose end is missing, what could be read is stored and told; it can be sent again as it is."""
    (run_id,) = opened(admin)
    body = b"\n".join(line(run_id, {"metric": "eval", "step": step, "value": step}) for step in range(5))
    broken = expect_problem(stream(admin, PACKED[encoding](body)[:-3], encoding), 400)
    stored = broken["lines_stored"]
    assert broken["so_far"]["lines"] == stored
    assert steps(admin, run_id) == list(range(stored))
    assert "harmless" in broken["detail"]
    answer = expect_json(stream(admin, PACKED[encoding](body), encoding), 200)
    assert (answer["duplicates"], answer["accepted"]) == (stored, 5 - stored)


def test_not_what_it_says(admin: httpx.Client) -> None:
    """A body that is not packed as it says is a 400, and nothing is stored."""
    assert expect_problem(stream(admin, b"not packed", "gzip"), 400)["lines_stored"] == 0
    assert expect_problem(stream(admin, PACKED["gzip"](b""), "zstd"), 400)["so_far"]["runs"] == []


@contextmanager
def sending(client: httpx.Client, path: str = "/observations") -> Iterator[socket.socket]:
    """A connection on which a stream of unknown length has begun."""
    address = client.base_url
    head = f"POST /api/v1{path} HTTP/1.1\r\nHost: x\r\nAuthorization: {client.headers['authorization']}\r\n"
    head += "Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    with socket.create_connection((address.host, address.port), timeout=DEADLINE_SECONDS) as connection:
        connection.sendall(head.encode())
        yield connection


def chunk(part: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(part), part)


def test_stored_while_it_arrives(admin: httpx.Client) -> None:
    """What was sent is stored before the stream ends, and the answer comes when it has ended."""
    (run_id,) = opened(admin)
    with sending(admin) as connection:
        for step, point in enumerate(FALLING):
            connection.sendall(chunk(line(run_id, point) + b"\n"))
            wait_for(admin, run_id, list(range(step + 1)))
        connection.sendall(chunk(b""))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["runs"][0]["should_stop"] is True


def test_a_client_that_goes_away(admin: httpx.Client) -> None:
    """When the client goes in the middle of a line, what was stored stays, and half a line is none."""
    (run_id,) = opened(admin)
    with sending(admin) as connection:
        connection.sendall(chunk(b"".join(line(run_id, point) + b"\n" for point in FALLING[:3])))
        wait_for(admin, run_id, [0, 1, 2])
        connection.sendall(chunk(line(run_id, FALLING[3])[:-1]))
    whole = b"\n".join(line(run_id, point) for point in FALLING[:4])
    answer = expect_json(stream(admin, whole), 200)
    assert (answer["duplicates"], answer["accepted"]) == (3, 1)


@contextmanager
def limited(service: Service, admin: httpx.Client, **limits: Any) -> Iterator[httpx.Client]:
    """A client with the same key of the route alone, with other limits."""
    committer = Committer(service.database, RunCache(), utc_now, ServiceMetrics())
    app = FastAPI(lifespan=lambda _app: committer.run())
    pull_waiters = PullWaiters(service.database, utc_now)
    app.state.context = Context(service.database, utc_now, committer, KeyCache(service.database, 5.0), pull_waiters)
    problems.install(app)
    app.include_router(bulk.routes(StreamLimits(**limits)), prefix="/api/v1")
    with (
        serve_app(app) as url,
        httpx.Client(base_url=f"{url}/api/v1", headers=admin.headers, timeout=60, trust_env=False) as client,
    ):
        yield client


def test_a_body_that_is_too_large(service: Service, admin: httpx.Client) -> None:
    """What says that it is too large is not read; what turns out to be is stored up to there. Both are a 413."""
    (run_id,) = opened(admin)
    lines = b"\n".join(line(run_id, {"metric": "eval", "step": step, "value": 1}) for step in range(3000))
    with limited(service, admin, stream_bytes=len(lines) - 10) as client:
        assert "Nothing was stored" in expect_problem(stream(client, lines), 413)["detail"]
        assert steps(admin, run_id) == []
        broken = expect_problem(stream(client, PACKED["gzip"](lines), "gzip"), 413)
        assert 0 < broken["lines_stored"] < 3000
        assert broken["so_far"]["accepted"] == broken["lines_stored"]
    assert expect_json(stream(admin, lines), 200)["duplicates"] == broken["lines_stored"]


def test_a_sender_that_pauses(service: Service, admin: httpx.Client) -> None:
    """A stream that does not go on is a 408, and what came is stored."""
    (run_id,) = opened(admin)
    with limited(service, admin, idle_seconds=0.2) as client, sending(client) as connection:
        connection.sendall(chunk(line(run_id, FALLING[0]) + b"\n"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["lines_stored"] == 1
    assert steps(admin, run_id) == [0]


def test_as_many_streams_as_there_is_room_for(service: Service, admin: httpx.Client) -> None:
    """When all places are taken a stream waits, and is told to come again when that takes too long."""
    (run_id,) = opened(admin)
    with limited(service, admin, streams=1, wait_seconds=0.2) as client:
        with sending(client) as connection:
            connection.sendall(chunk(line(run_id, FALLING[0]) + b"\n"))
            wait_for(admin, run_id, [0])
            busy = stream(client, line(run_id, FALLING[1]))
            assert "Nothing was stored" in expect_problem(busy, 503)["detail"]
            assert int(busy.headers["retry-after"]) > 0
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (freed := stream(client, line(run_id, FALLING[1]))).status_code == 503:
            assert time.monotonic() < deadline
        assert expect_json(freed, 200)["accepted"] == 1
