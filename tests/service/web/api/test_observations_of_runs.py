"""Observations of one run and of many in one body: read alike by each way, decompressed, accepted run by run."""

from __future__ import annotations

import gzip
import json
import math
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.api import ingest_endpoint, json_body
from evalstop_service.web.api.observations import BatchIn
from evalstop_service.web.body import decompress
from evalstop_service.web.problems import Problem, ProblemKind
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.service.web.api.api_calls import FALLING, expect_json, expect_problem, open_run
from tests.service.web.api.conftest import Service

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"identity": bytes, "gzip": gzip.compress, "zstd": zstd.compress}
UNKNOWN_RUN = "00000000-0000-7000-8000-000000000000"

Point = dict[str, Any]


def post(client: httpx.Client, batches: dict[str, list[Point]], encoding: str = "identity") -> httpx.Response:
    runs = [{"run_id": run_id, "observations": points} for run_id, points in batches.items()]
    body = COMPRESS[encoding](json.dumps({"runs": runs}).encode())
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return client.post("/observations", content=body, headers=headers)


def list_steps(client: httpx.Client, run_id: str) -> list[int]:
    items = expect_json(client.get(f"/runs/{run_id}/observations", params={"metric": "eval"}), 200)["items"]
    return [item["step"] for item in items]


def test_each_run_is_stored_or_refused_by_itself(admin: httpx.Client) -> None:
    """A run gets the receipt of a single post, with its conflicts; an unknown one is refused, and the others stand."""
    falling, other = open_run(admin)["id"], open_run(admin)["id"]
    expect_json(post(admin, {other: FALLING[:1]}), 200)
    again = [{"metric": "eval", "step": 0, "value": 7}, {"metric": "loss", "step": 0, "value": "NaN"}]
    answer = expect_json(post(admin, {falling: FALLING, UNKNOWN_RUN: FALLING, other: again}), 200)
    first, second = answer["runs"]
    assert (first["run_id"], first["accepted"], first["verdict"]["verdict"], first["should_stop"]) == (
        *(falling, 5, "stop", True),
    )
    assert (second["run_id"], second["accepted"], second["conflict_count"]) == (other, 1, 1)
    assert second["conflicts"] == [{"metric": "eval", "step": 0, "stored_value": 0.5, "sent_value": 7.0}]
    (refused,) = answer["refused"]
    assert (refused["run_id"], refused["code"], refused["title"]) == (UNKNOWN_RUN, "not_found", "Not found")
    assert UNKNOWN_RUN in refused["detail"]
    single = expect_json(admin.post(f"/runs/{falling}/observations", json={"observations": FALLING}), 200)
    counts = {"accepted": 0, "duplicates": 5}
    assert {name: value for name, value in first.items() if name != "run_id"} | counts == single | counts


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
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    observations=st.lists(observation_lists, min_size=1, max_size=3),
    data=st.data(),
    encoding=st.sampled_from(sorted(COMPRESS)),
)
def test_runs_get_the_verdicts_of_single_posts(
    admin: httpx.Client, observations: list[list[Point]], data: st.DataObject, encoding: str
) -> None:
    """Observations of several runs, cut into any bodies, yield the verdicts of posting each by itself."""
    pairs = [(open_run(admin)["id"], open_run(admin)["id"]) for _ in observations]
    for (run_id, _), points in zip(pairs, observations, strict=True):
        for point in points:
            expect_json(admin.post(f"/runs/{run_id}/observations", json={"observations": [point]}), 200)
    remaining = {run_id: list(points) for (_, run_id), points in zip(pairs, observations, strict=True)}
    while any(remaining.values()):
        body = {}
        for run_id, points in remaining.items():
            count = data.draw(st.integers(0, len(points)))
            if count:
                body[run_id], remaining[run_id] = points[:count], points[count:]
        if body:
            assert expect_json(post(admin, body, encoding), 200)["refused"] == []
    for single_id, run_id in pairs:
        expected, actual = (expect_json(admin.get(f"/runs/{each}"), 200) for each in (single_id, run_id))
        for name in ("verdict", "should_stop", "last_step", "raw_maximum"):
            assert actual[name] == expected[name]


def test_malformed_body_stores_nothing(admin: httpx.Client) -> None:
    """A body with a malformed observation, a repeated run or too many observations is refused as a whole."""
    run_id = open_run(admin)["id"]
    batch = {"run_id": run_id, "observations": FALLING}
    many = {"run_id": UNKNOWN_RUN, "observations": [{"metric": "eval", "step": 1, "value": 1}] * 9_996}
    for runs, pointer, detail in (
        ([batch, {"run_id": UNKNOWN_RUN, "observations": [{"metric": "eval", "value": 1}]}], "/runs/1/", "required"),
        ([batch, batch], "/runs", "twice"),
        ([batch, many], "/runs", "10001 observations"),
        ([{"run_id": run_id, "observations": None}], "/runs/0/observations", "valid list"),
        ([], "/runs", "at least 1"),
    ):
        problem = expect_problem(admin.post("/observations", json={"runs": runs}), 422)
        (error,) = problem["errors"]
        assert error["pointer"].startswith(pointer)
        assert detail in error["detail"]
    assert list_steps(admin, run_id) == []


def test_compressed_body_of_a_stranger_is_not_decompressed(service: Service) -> None:
    """Without a valid key even a damaged body is a 401."""
    client = service.open_client_with_key("esk_wrong")
    response = client.post("/observations", content=b"not packed", headers={"content-encoding": "gzip"})
    expect_problem(response, 401)


def test_compressed_bodies_are_refused_if_they_cannot_be_read(admin: httpx.Client) -> None:
    """Another encoding is a 415 that names the supported ones, a damaged body a 400, one that is too large a 413."""
    for encoding in ("br", "deflate", "gzip, gzip", "*", "zstd;q=1"):
        response = admin.post("/observations", content=b"{}", headers={"content-encoding": encoding})
        assert "gzip, zstd, identity" in expect_problem(response, 415)["detail"]
        assert response.headers["accept-encoding"] == "gzip, zstd, identity"
    bombs = {"gzip": gzip.compress(bytes(9 * 2**20)), "zstd": zstd.compress(bytes(9 * 2**20))}
    for encoding, bomb in bombs.items():
        for content, status in ((b"not packed", 400), (COMPRESS[encoding](b"{}")[:-3], 400), (bomb, 413)):
            response = admin.post("/observations", content=content, headers={"content-encoding": encoding})
            assert "othing was stored" in expect_problem(response, status)["detail"]


def read_by_route(body: bytes) -> tuple[PostedObservation, ...] | None:
    """The observations that the FastAPI route would store, or None if it refuses the body."""
    try:
        return BatchIn.model_validate(json_body.parse(body)).to_content().points
    except (Problem, ValidationError):
        return None


NAMES = st.sampled_from(
    ["eval", "loss", "metric", "step", "value", "stderr", "observations", "ü", "a\x00b", "", "x" * 257]
)
NUMBERS = st.one_of(
    st.integers(-1, 5),
    st.integers(),
    st.floats(),
    st.sampled_from([2**53 - 1, 2**53, 1e400, 120.0, 0.5, -0.0, 10**400, True, None, "NaN", "Infinity", "1"]),
)


@st.composite
def possibly_invalid_observations(draw: st.DrawFn) -> dict[str, Any]:
    """The JSON of an observation, often invalid in one field."""
    fields: dict[str, Any] = {"metric": draw(NAMES), "step": draw(NUMBERS), "value": draw(NUMBERS)}
    for name, values in (
        ("stderr", NUMBERS),
        ("time", st.sampled_from(["2026-01-01T00:00:00Z", "now", 1])),
        ("x", NUMBERS),
    ):
        if draw(st.integers(0, 5)) == 0:
            fields[name] = draw(values)
    if draw(st.integers(0, 9)) == 0:
        del fields[draw(st.sampled_from(sorted(fields)))]
    return fields


valid_observations = st.builds(
    lambda metric, step, value, stderr: (
        {"metric": metric, "step": step, "value": value} | ({} if stderr is None else {"stderr": stderr})
    ),
    st.sampled_from(["eval", "loss", "step", "rewards/ü"]),
    st.integers(0, 2**53 - 1),
    st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60),
    st.none() | st.floats(0, 1e300),
)


@given(st.lists(possibly_invalid_observations() | valid_observations, max_size=4), st.booleans(), st.booleans())
def test_fast_endpoint_agrees_with_the_route(
    points: list[dict[str, Any]], ascii_only: bool, repeat_a_name: bool
) -> None:
    """Every body that the fast endpoint reads is read alike by the FastAPI route."""
    text = json.dumps({"observations": points}, ensure_ascii=ascii_only)
    if repeat_a_name:
        text = text.replace('"value": ', '"value": 7, "value": ', 1)
    assert_readers_agree(text.encode())


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@example(b'{"observations":[{"metric":"a","step":1,"value":1}]} ')
@example(b'\xef\xbb\xbf{"observations":[{"metric":"a","step":1,"value":1}]}')
@example(b'{"observations":[{"metric":"a","step":1,"value":1}],"observations":[]}')
@example(b'{"observations":[{"metric":"a","metric":"b","step":1,"value":1}]}')
@example(b'{"observations":[{"metric":"a","m\\u0065tric":"b","step":1,"value":1}]}')
@example(b'{"observations":[{"metric":"a","step":1,"value":01}]}')
@example(b'{"observations":[{"metric":"a","step":1e0,"value":1}]}')
@example(b'{"observations":[{"metric":"a","step":1,"value":1e999}]}')
@example(b'{"observations":[{"metric":"a","step":1,"value":NaN}]}')
@example(b'{"observations":[{"metric":"a\xed\xa0\x80","step":1,"value":1}]}')
@example(b'{"observations":[{"metric":"a\x01","step":1,"value":1}]}')
@example(b'{"observations":[{"metric":"a","step":1,"value":1,"time":"2026-01-01T00:00:00"}]}')
@example(b'{"observations":' + b"[" * 100_000)
def test_malformed_or_ambiguous_bodies_are_not_misread(body: bytes) -> None:
    """Broken bodies are left to the route; of a repeated name the last value counts on both ways."""
    assert_readers_agree(body)


@given(st.lists(valid_observations, min_size=1, max_size=6))
def test_valid_batches_take_the_fast_path(points: list[dict[str, Any]]) -> None:
    """Valid batches are read by the fast endpoint."""
    body = json.dumps({"observations": points}).encode()
    assert ingest_endpoint.read(body) is not None


def assert_readers_agree(body: bytes) -> None:
    """The fast endpoint returns what the FastAPI route stores, or leaves the body to it."""
    fast_result = ingest_endpoint.read(body)
    if fast_result is not None:
        expected = read_by_route(body)
        assert expected is not None
        assert fast_result == expected
        assert [math.copysign(1, point.value) for point in fast_result] == [math.copysign(1, p.value) for p in expected]


if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MEBIBYTE = 2**20

contents = st.binary(max_size=300) | st.builds(bytes.__mul__, st.binary(max_size=3), st.integers(0, 50_000))


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@given(content=contents)
def test_content_within_the_limit_is_whole(encoding: str, content: bytes) -> None:
    """The limit holds to the byte."""
    body = COMPRESS[encoding](content)
    assert decompress(body, encoding, len(content)) == content
    if content:
        with pytest.raises(Problem) as refused:
            decompress(body, encoding, len(content) - 1)
        assert refused.value.kind is ProblemKind.BODY_TOO_LARGE


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@given(content=contents, lost=st.integers(1, 10**6), tail=st.binary(min_size=1, max_size=50))
def test_damaged_file_is_refused(encoding: str, content: bytes, lost: int, tail: bytes) -> None:
    """A body whose end, or all of it, is missing is refused, and so is other content, also behind a whole file."""
    body = COMPRESS[encoding](content)
    for damaged in (body[: -(1 + lost % len(body))], b"\x00" + tail, body + b"\x00" + tail, body + body):
        with pytest.raises(Problem) as refused:
            decompress(damaged, encoding, MEBIBYTE)
        assert refused.value.kind is ProblemKind.INVALID_JSON


def test_gzip_checksum_is_verified() -> None:
    """A body with a flipped bit is refused."""
    body = bytearray(gzip.compress(b"observations" * 100))
    body[-6] ^= 1
    with pytest.raises(Problem, match="incorrect data check"):
        decompress(bytes(body), "gzip", MEBIBYTE)


def test_zstd_window_is_limited_to_8_mib() -> None:
    """A window of 8 MiB covers every usual level; a file that asks for a larger one is refused."""
    content = b"observations" * MEBIBYTE
    assert decompress(zstd.compress(content, level=19), "zstd", len(content)) == content
    huge = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27}).compress(content)
    with pytest.raises(Problem, match="too much memory"):
        decompress(huge, "zstd", len(content))


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_decompression_bomb_takes_little_memory(encoding: str) -> None:
    """A small body that decompresses to 100 MiB is refused once it exceeds the limit."""
    packer = zlib.compressobj(9, wbits=31) if encoding == "gzip" else zstd.ZstdCompressor()
    zeros = bytes(MEBIBYTE)
    bomb = b"".join([*(packer.compress(zeros) for _ in range(100)), packer.flush()])
    tracemalloc.start()
    try:
        with pytest.raises(Problem, match="too large"):
            decompress(bomb, encoding, MEBIBYTE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MEBIBYTE
