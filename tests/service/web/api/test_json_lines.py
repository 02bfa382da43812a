"""Lines of JSON: how they are cut out of a stream, and that the fast readers accept no invalid line."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.api.reading import json_body
from evalstop_service.web.api.reading.json_lines import (
    LINE,
    MOST_LINE_BYTES,
    BadLine,
    BatchLine,
    LineSplitter,
    RunObservations,
    decode_flat_lines,
    parse_line,
)
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.service.web.api.observation_strategies import possibly_invalid_observations, valid_observations

RUN = "0199aa10-7c3e-7b51-9d3f-5a0d6f2c8e11"

runs = st.sampled_from([RUN, RUN.replace("1", "2"), RUN.upper(), RUN.replace("-", ""), "", "x" * 36, 1, None])

valid_lines = st.builds(lambda point: json.dumps({"run_id": RUN} | point).encode(), valid_observations)


@st.composite
def possibly_invalid_lines(draw: st.DrawFn) -> bytes:
    """A line as a client might write it, often invalid in one way."""
    point = draw(possibly_invalid_observations() | valid_observations)
    document: dict[str, Any] = {"run_id": draw(runs)}
    if draw(st.integers(0, 3)) == 0:
        document["observations"] = [point, *draw(st.lists(valid_observations, max_size=2))]
    else:
        document |= point
    text = json.dumps(document, ensure_ascii=draw(st.booleans()))
    match draw(st.integers(0, 9)):
        case 0:
            text = text.replace('"value": ', '"value": 7, "value": ', 1)
        case 1:
            text = text.replace(", ", "\n", 1)
        case 2:
            text = f" {text}\r"
        case 3:
            text = f"{text} {text}"
        case 4:
            text = f"{text},{text}"
    return text.encode()


HOSTILE_LINES = [
    b'{"run_id":"%s","metric":"a","step":1,\n"value":1}{"run_id":"%s","metric":"b","step":1,"value":1}',
    b'{"run_id":"%s","metric":"a","step":1,\n"value":1}\n{"run_id":"%s","metric":"a","step":1,"value":1}{}',
    b'{"run_id":"%s","metric":"a}\n{","step":1,"value":1}\n',
    b'{"run_id":"%s","metric":"a}\n{","step":1,"value":1}{"run_id":"%s","metric":"b","step":1,"value":1}',
    b'{"run_id":"%s","metric":"a","metric":"b","step":1,"value":1}',
    b'{"run_id":"%s","run_id":"%s","metric":"a","step":1,"value":1}',
    b'{"run_id":"%s","metric":"a","step":1,"value":1,"stderr":null,"time":null}',
    b'{"run_id":"%s","metric":"a","step":1,"value":1e999}',
    b'{"run_id":"%s","metric":"a","step":1,"value":NaN}',
    b'{"run_id":"%s","metric":"a\x01","step":1,"value":1}',
    b'{"run_id":"%s","metric":"a\xff","step":1,"value":1}',
    b'{"run_id":"%s","metric":"a\xc2\x9f","step":1,"value":1}',
    b'{"run_id":"%s","metric":"run_id","step":1,"value":1,"stderr":0.5,"time":"2026-01-01T00:00:00Z"}',
    b'{"run_id":"%s","observations":[]}',
    b'{"run_id":"%s","observations":[{"metric":"a","step":1,"value":1}],"metric":"a"}',
    b'{"run_id":"%s","observations":' + b"[" * 100_000,
    b"\xef\xbb\xbf{}",
    b"",
]


def read_by_model(line: bytes) -> RunObservations | None:
    """The observations of a line according to the pydantic model, or None if that refuses it."""
    try:
        parsed = LINE.validate_python(json_body.load(line))
    except (json_body.NotJson, ValidationError):
        return None
    items = parsed.observations if isinstance(parsed, BatchLine) else [parsed]
    points = tuple(PostedObservation(item.metric, item.step, item.value, item.stderr, item.time) for item in items)
    return RunObservations(str(parsed.run_id), points)


def assert_equal(actual: RunObservations, expected: RunObservations | None) -> None:
    assert expected is not None
    assert actual.run_id == expected.run_id
    assert len(actual.points) == len(expected.points)
    for actual_point, expected_point in zip(actual.points, expected.points, strict=True):
        assert (actual_point.metric, actual_point.step, actual_point.stderr, actual_point.time) == (
            expected_point.metric,
            expected_point.step,
            expected_point.stderr,
            expected_point.time,
        )
        assert repr(actual_point.value) == repr(expected_point.value)
        assert math.copysign(1, actual_point.value) == math.copysign(1, expected_point.value)


def assert_readers_agree(block: bytes) -> None:
    """The fast readers of blocks and of lines return what the model returns, or refuse the line."""
    block_points = decode_flat_lines(block)
    if block_points is not None:
        for point, line in zip(block_points, block.split(b"\n"), strict=True):
            assert_equal(RunObservations(point.run_id, (point,)), read_by_model(line))
    for line in block.split(b"\n"):
        try:
            observations = parse_line(line)
        except BadLine:
            assert read_by_model(line) is None
        else:
            assert_equal(observations, read_by_model(line))


@given(st.lists(possibly_invalid_lines() | valid_lines, min_size=1, max_size=4))
def test_fast_readers_agree_with_the_model(block: list[bytes]) -> None:
    """A line is read as the pydantic model reads it, and refused where that refuses it."""
    assert_readers_agree(b"\n".join(block))


@pytest.mark.parametrize("block", HOSTILE_LINES)
def test_malformed_or_ambiguous_lines_are_not_misread(block: bytes) -> None:
    """Broken lines and lines with a repeated name are refused or read as the model reads them."""
    assert_readers_agree(block.replace(b"%s", RUN.encode()))


@given(st.lists(valid_lines, min_size=1, max_size=6))
def test_valid_lines_take_the_fast_path(block: list[bytes]) -> None:
    """A block of valid lines without escapes is read at once."""
    if not any(b"\\" in line for line in block):
        assert decode_flat_lines(b"\n".join(block)) is not None


@given(
    st.lists(st.text("ab\r ", max_size=8).map(str.encode) | st.just(b"x" * (MOST_LINE_BYTES + 1)), max_size=6),
    st.lists(st.integers(1, 6), max_size=8),
    st.booleans(),
)
@example([b"x" * MOST_LINE_BYTES, b"x" * (MOST_LINE_BYTES + 1), b"y"], [], False)
def test_lines_do_not_depend_on_how_the_stream_is_cut(
    expected: list[bytes], sizes: list[int], ends_with_newline: bool
) -> None:
    """Whatever the size of the pieces, the same lines come out; lines over the limit are dropped."""
    body = b"\n".join(expected) + (b"\n" if ends_with_newline else b"")
    cutter, lines, position = LineSplitter(), list[bytes | None](), 0
    for size in [*sizes, *[60_000] * (len(body) // 60_000 + 1)]:
        for block in cutter.split(body[position : position + size]):
            lines += block.split(b"\n") if block is not None else [None]
        position += size
    lines.append(cutter.rest())
    expected_lines = [line if len(line) <= MOST_LINE_BYTES else None for line in body.split(b"\n")]
    assert lines == expected_lines


@pytest.mark.parametrize(
    ("line", "expected_detail"),
    [
        (b"oops", "column 1"),
        (b"[", "column 2"),
        (b'{"run_id": "%s", "metric": "a", "step": 1, "value": NaN}', '"NaN"'),
        (b'{"metric": "a", "step": 1, "value": 1}', "/run_id: Field required"),
        (b'{"run_id": "x", "metric": "a", "step": 1, "value": 1}', "/run_id: "),
        (b'{"run_id": "%s", "metric": "a\\u0001", "step": 1, "value": 1}', "/metric: it must not contain control"),
        (b'{"run_id": "%s", "metric": "a", "step": -1, "value": "x"}', "/step: Input should be greater"),
        (b'{"run_id": "%s", "observations": [{"metric": "a", "step": 1}]}', "/observations/0/value: Field required"),
        (b'{"run_id": "%s", "observations": [' + b"0," * 9 + b"0]}", "; and 7 more"),
        (b"[" * 100_000, "too deep"),
        (b"\xff", "byte 0"),
        (b"[]", "valid dictionary"),
    ],
)
def test_bad_line_is_explained_briefly_with_its_place(line: bytes, expected_detail: str) -> None:
    """The error names the column or field, and stays under 700 characters."""
    with pytest.raises(BadLine) as error:
        parse_line(line.replace(b"%s", RUN.encode()))
    assert expected_detail in error.value.detail
    assert len(error.value.detail) < 700
    assert "Nothing was stored" not in error.value.detail
