"""Streams of lines over HTTP: same verdicts as single posts, stored on arrival, safe to repeat after a break."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.ingest import Committer, RunCache
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.web import problems
from evalstop_service.web.api import stream
from evalstop_service.web.api.reading.stream import StreamLimits
from evalstop_service.web.context import Context
from evalstop_service.web.limits import Entrance, Limits
from evalstop_service.web.pull_waiters import PullWaiters
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.http_server import serve_app
from tests.service.web.api.api_calls import FALLING, expect_json, expect_problem
from tests.service.web.api.conftest import Service
from tests.service.web.api.line_streams import (
    COMPRESS,
    DEADLINE_SECONDS,
    Point,
    encode_chunk,
    encode_line,
    list_steps,
    open_runs,
    open_stream,
    post_lines,
    read_response,
    wait_for_steps,
)


def test_response_covers_each_run_and_each_invalid_line(admin: httpx.Client) -> None:
    """A stream of single and batch lines for several runs is answered with each run's verdict and each line's error."""
    falling, other = open_runs(admin, 2)
    unknown_run = "00000000-0000-7000-8000-000000000000"
    lines = [
        encode_line(falling, FALLING[0]),
        encode_line(other, FALLING[0]),
        b"oops",
        json.dumps({"run_id": falling, "observations": FALLING}).encode(),
        b"",
        encode_line(unknown_run, FALLING[0]),
        encode_line(other, {"metric": "eval", "step": 0, "value": 7, "time": "2026-01-01T00:00:00Z"}),
        encode_line(other, {"metric": "lo\x01ss", "step": 0, "value": "NaN"}),
        encode_line(other.upper(), {"metric": "loss", "step": 0, "value": "NaN"}),
    ]
    answer = expect_json(post_lines(admin, b"\n".join(lines)), 200)
    runs, errors = answer.pop("runs"), answer.pop("errors")
    assert answer == {"lines": 9, "accepted": 7, "duplicates": 1, "conflict_count": 1, "error_count": 4}
    assert [(run["run_id"], run["accepted"], run["verdict"], run["should_stop"]) for run in runs] == [
        (falling, 5, "stop", True),
        (other, 2, "continue", False),
    ]
    assert [(error["line"], error["title"]) for error in errors] == [
        (3, "The line is not valid JSON"),
        (6, "Not found"),
        (7, "Conflict with what is recorded"),
        (8, "The line is not valid"),
    ]
    assert unknown_run in errors[1]["detail"]
    assert "0.5" in errors[2]["detail"]
    assert list_steps(admin, falling) == [0, 1, 2, 3, 4]
    assert list_steps(admin, other, "loss") == [0]


observation_lists = st.lists(
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


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    observations=st.lists(observation_lists, min_size=1, max_size=3),
    data=st.data(),
    encoding=st.sampled_from(sorted(COMPRESS)),
)
def test_streamed_runs_get_the_verdicts_of_single_posts(
    admin: httpx.Client, observations: list[list[Point]], data: st.DataObject, encoding: str
) -> None:
    """Lines of several runs, mixed, cut and compressed, yield the verdicts of posting each observation by itself."""
    single_ids, streamed_ids = open_runs(admin, len(observations)), open_runs(admin, len(observations))
    for run_id, points in zip(single_ids, observations, strict=True):
        for point in points:
            expect_json(admin.post(f"/runs/{run_id}/observations", json={"observations": [point]}), 200)
    remaining = [list(points) for points in observations]
    lines = []
    while any(remaining):
        index = data.draw(st.sampled_from([number for number, points in enumerate(remaining) if points]))
        lines.append(encode_line(streamed_ids[index], remaining[index].pop(0)))
        lines += data.draw(st.sampled_from([[], [], [b"garbage"], [b""]]))
    body = COMPRESS[encoding](b"\n".join(lines))
    # A fraction, as the length of the body depends on random ids.
    size = max(1, len(body) * data.draw(st.integers(0, 1000)) // 1000)
    answer = expect_json(
        post_lines(admin, iter([body[at : at + size] for at in range(0, len(body), size)]), encoding), 200
    )
    assert answer["error_count"] == answer["conflict_count"] + lines.count(b"garbage")
    results = {run["run_id"]: run for run in answer["runs"]}
    for single_id, streamed_id in zip(single_ids, streamed_ids, strict=True):
        expected, streamed = (expect_json(admin.get(f"/runs/{run_id}"), 200) for run_id in (single_id, streamed_id))
        for name in ("verdict", "should_stop", "last_step", "raw_maximum"):
            assert streamed[name] == expected[name]
        assert results[streamed_id]["verdict"] == expected["verdict"]["verdict"]
        assert results[streamed_id]["should_stop"] == expected["should_stop"]


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "", "application/x-ndjsonx"])
def test_other_content_type_is_refused(admin: httpx.Client, content_type: str) -> None:
    """A body of another type is a 415 that names the right type."""
    response = admin.post("/observations", content=b"{}", headers={"content-type": content_type})
    assert "application/x-ndjson" in expect_problem(response, 415)["detail"]


def test_unsupported_encoding_is_refused(admin: httpx.Client) -> None:
    """An unsupported or doubled encoding is a 415 that names the supported ones."""
    for encoding in ("br", "deflate", "gzipx", "gzip, gzip", "gzip, zstd", "*", "zstd;q=1"):
        response = post_lines(admin, b"", encoding)
        assert "gzip, zstd, identity" in expect_problem(response, 415)["detail"]
        assert response.headers["accept-encoding"] == "gzip, zstd, identity"


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_truncated_file_stores_its_readable_lines(admin: httpx.Client, encoding: str) -> None:
    """The lines before the cut are stored and counted, and the whole file can be sent again."""
    (run_id,) = open_runs(admin)
    body = b"\n".join(encode_line(run_id, {"metric": "eval", "step": step, "value": step}) for step in range(5))
    truncated = expect_problem(post_lines(admin, COMPRESS[encoding](body)[:-3], encoding), 400)
    stored = truncated["lines_stored"]
    assert truncated["totals"]["lines"] == stored
    assert list_steps(admin, run_id) == list(range(stored))
    assert "harmless" in truncated["detail"]
    answer = expect_json(post_lines(admin, COMPRESS[encoding](body), encoding), 200)
    assert (answer["duplicates"], answer["accepted"]) == (stored, 5 - stored)


def test_body_with_a_wrong_encoding_is_refused(admin: httpx.Client) -> None:
    """A body that is not compressed as declared is a 400, and nothing is stored."""
    assert expect_problem(post_lines(admin, b"not packed", "gzip"), 400)["lines_stored"] == 0
    assert expect_problem(post_lines(admin, COMPRESS["gzip"](b""), "zstd"), 400)["totals"]["runs"] == []


def test_lines_are_stored_before_the_stream_ends(admin: httpx.Client) -> None:
    """Each line is stored on arrival; the response comes at the end."""
    (run_id,) = open_runs(admin)
    with open_stream(admin) as connection:
        for step, point in enumerate(FALLING):
            connection.sendall(encode_chunk(encode_line(run_id, point) + b"\n"))
            wait_for_steps(admin, run_id, list(range(step + 1)))
        connection.sendall(encode_chunk(b""))
        answer = read_response(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["runs"][0]["should_stop"] is True


def test_disconnect_keeps_complete_lines_only(admin: httpx.Client) -> None:
    """When a client disconnects in the middle of a line, the lines before it stay stored."""
    (run_id,) = open_runs(admin)
    with open_stream(admin) as connection:
        connection.sendall(encode_chunk(b"".join(encode_line(run_id, point) + b"\n" for point in FALLING[:3])))
        wait_for_steps(admin, run_id, [0, 1, 2])
        connection.sendall(encode_chunk(encode_line(run_id, FALLING[3])[:-1]))
    whole = b"\n".join(encode_line(run_id, point) for point in FALLING[:4])
    answer = expect_json(post_lines(admin, whole), 200)
    assert (answer["duplicates"], answer["accepted"]) == (3, 1)


@contextmanager
def serve_with_limits(
    service: Service, admin: httpx.Client, shutdown: Event | None = None, **limits: Any
) -> Iterator[httpx.Client]:
    """A client of a server that has only the stream route, with these limits."""
    committer = Committer(service.database, RunCache(), utc_now, ServiceMetrics())
    app = FastAPI(lifespan=lambda _app: committer.run())
    shutdown = shutdown or Event()
    pull_waiters = PullWaiters(service.database, utc_now, shutdown)
    app.state.context = Context(
        service.database,
        utc_now,
        committer,
        KeyCache(service.database, 5.0),
        pull_waiters,
        shutdown=shutdown,
    )
    problems.install(app)
    app.add_middleware(Entrance, limits=Limits(), key_cache=app.state.context.key_cache)
    app.include_router(stream.routes(StreamLimits(**limits)), prefix="/api/v1")
    with (
        serve_app(app) as url,
        httpx.Client(base_url=f"{url}/api/v1", headers=admin.headers, timeout=60, trust_env=False) as client,
    ):
        yield client


def test_stream_over_the_size_limit_is_refused(service: Service, admin: httpx.Client) -> None:
    """A declared size over the limit is refused unread; otherwise lines up to the limit are stored. Both are a 413."""
    (run_id,) = open_runs(admin)
    lines = b"\n".join(encode_line(run_id, {"metric": "eval", "step": step, "value": 1}) for step in range(3000))
    with serve_with_limits(service, admin, stream_bytes=len(lines) - 1) as client:
        assert "Nothing was stored" in expect_problem(post_lines(client, lines), 413)["detail"]
        assert list_steps(admin, run_id) == []
        for encoding in ("gzip", "zstd"):
            refused = expect_problem(post_lines(client, COMPRESS[encoding](lines), encoding), 413)
            assert 0 < refused["lines_stored"] < 3000
            assert refused["totals"]["lines"] == refused["lines_stored"]
    with serve_with_limits(service, admin, stream_bytes=len(lines)) as client:
        assert expect_json(post_lines(client, lines), 200)["lines"] == 3000


def test_idle_stream_times_out(service: Service, admin: httpx.Client) -> None:
    """A stream without data for the idle timeout is a 408, and the lines before it are stored."""
    (run_id,) = open_runs(admin)
    with serve_with_limits(service, admin, idle_seconds=0.2) as client, open_stream(client) as connection:
        connection.sendall(encode_chunk(encode_line(run_id, FALLING[0]) + b"\n"))
        answer = read_response(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["lines_stored"] == 1
    assert list_steps(admin, run_id) == [0]


def test_stream_ends_when_the_server_shuts_down(service: Service, admin: httpx.Client) -> None:
    """A stream that is still arriving when the server shuts down is a retryable 503, and its lines are stored."""
    (run_id,) = open_runs(admin)
    shutdown = Event()
    with serve_with_limits(service, admin, shutdown=shutdown) as client, open_stream(client) as connection:
        connection.sendall(encode_chunk(encode_line(run_id, FALLING[0]) + b"\n"))
        wait_for_steps(admin, run_id, [0])
        shutdown.set()
        connection.sendall(encode_chunk(encode_line(run_id, FALLING[1]) + b"\n"))
        wait_for_steps(admin, run_id, [0, 1])
        connection.sendall(encode_chunk(b""))
        answer = read_response(connection)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["lines_stored"] == 2


def test_stream_over_the_concurrency_limit_gets_503(service: Service, admin: httpx.Client) -> None:
    """A stream waits for a free slot and is refused with Retry-After when that takes too long."""
    (run_id,) = open_runs(admin)
    with serve_with_limits(service, admin, streams=1, wait_seconds=0.2) as client:
        with open_stream(client) as connection:
            connection.sendall(encode_chunk(encode_line(run_id, FALLING[0]) + b"\n"))
            wait_for_steps(admin, run_id, [0])
            refused = post_lines(client, encode_line(run_id, FALLING[1]))
            assert "Nothing was stored" in expect_problem(refused, 503)["detail"]
            assert int(refused.headers["retry-after"]) > 0
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (retried := post_lines(client, encode_line(run_id, FALLING[1]))).status_code == 503:
            assert time.monotonic() < deadline
        assert expect_json(retried, 200)["accepted"] == 1
