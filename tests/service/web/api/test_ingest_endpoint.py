"""The ingest endpoint takes what the FastAPI route would take, with the same answer, and hands on the rest."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.api import ingest_endpoint
from evalstop_service.web.api.reading import json_body
from evalstop_service.web.api.reading.batch import BatchIn, decode_batch
from evalstop_service.web.problems import Problem
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

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
def observations(draw: st.DrawFn) -> dict[str, Any]:
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


good = st.builds(
    lambda metric, step, value, stderr: (
        {"metric": metric, "step": step, "value": value} | ({} if stderr is None else {"stderr": stderr})
    ),
    st.sampled_from(["eval", "loss", "step", "rewards/ü"]),
    st.integers(0, 2**53 - 1),
    st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60),
    st.none() | st.floats(0, 1e300),
)


def read_by_route(body: bytes) -> tuple[PostedObservation, ...] | None:
    """The points that the FastAPI route would store."""
    try:
        explained = BatchIn.model_validate(json_body.parse(body)).observations
    except (Problem, ValidationError):
        return None
    read = decode_batch(body)
    assert repr([vars(item) for item in explained]) == repr([msgspec.structs.asdict(point) for point in read])
    return read


@given(st.lists(observations() | good, max_size=4), st.booleans(), st.booleans())
def test_takes_nothing_that_is_not_valid(points: list[dict[str, Any]], ascii_only: bool, twice: bool) -> None:
    """Whatever the ingest endpoint reads from a body, the FastAPI route reads the very same."""
    text = json.dumps({"observations": points}, ensure_ascii=ascii_only)
    if twice:
        text = text.replace('"value": ', '"value": 7, "value": ', 1)
    agree(text.encode())


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
@example(b'{"observations":' + b"[" * 100_000)
def test_hostile_bodies(body: bytes) -> None:
    """Neither a broken body nor a body that says a thing twice is taken for something else."""
    agree(body)


@given(st.lists(good, min_size=1, max_size=6))
def test_takes_what_is_plain(points: list[dict[str, Any]]) -> None:
    """Plain batches do go through the ingest endpoint, but for those that name a metric as a field is named."""
    body = json.dumps({"observations": points}, ensure_ascii=False).encode()
    taken = ingest_endpoint.read(body)
    assert (taken is None) == any(point["metric"] == "step" for point in points)


def agree(body: bytes) -> None:
    taken = ingest_endpoint.read(body)
    if taken is not None:
        expected = read_by_route(body)
        assert expected is not None
        assert taken == expected
        assert [math.copysign(1, point.value) for point in taken] == [math.copysign(1, p.value) for p in expected]
