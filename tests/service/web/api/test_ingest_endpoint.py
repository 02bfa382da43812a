"""The fast ingest endpoint reads what the FastAPI route would read, and leaves the rest to that route."""

from __future__ import annotations

import json
import math
from typing import Any

from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.api import ingest_endpoint, json_body
from evalstop_service.web.api.observations import BatchIn
from evalstop_service.web.problems import Problem
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError


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
