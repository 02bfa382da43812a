"""Lines of JSON: cut out of a stream as they stand in it, and the fast readers take nothing that is not valid."""

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
    Cutter,
    RunObservations,
    flat,
    read,
)
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.service.web.api.test_ingest_endpoint import good, observations

RUN = "0199aa10-7c3e-7b51-9d3f-5a0d6f2c8e11"

runs = st.sampled_from([RUN, RUN.replace("1", "2"), RUN.upper(), RUN.replace("-", ""), "", "x" * 36, 1, None])

whole = st.builds(lambda point: json.dumps({"run_id": RUN} | point).encode(), good)


@st.composite
def written(draw: st.DrawFn) -> bytes:
    """A line as somebody might write it, often wrong in one thing."""
    point = draw(observations() | good)
    document: dict[str, Any] = {"run_id": draw(runs)}
    if draw(st.integers(0, 3)) == 0:
        document["observations"] = [point, *draw(st.lists(good, max_size=2))]
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


hostile = [
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
    b'{"run_id":"%s","metric":"run_id","step":1,"value":1,"stderr":0.5,"time":"2026-01-01T00:00:00Z"}',
    b'{"run_id":"%s","observations":[]}',
    b'{"run_id":"%s","observations":[{"metric":"a","step":1,"value":1}],"metric":"a"}',
    b'{"run_id":"%s","observations":' + b"[" * 100_000,
    b"\xef\xbb\xbf{}",
    b"",
]


def read_by_model(line: bytes) -> RunObservations | None:
    """What a reader on the model that explains refusals would take a line for."""
    try:
        told = LINE.validate_python(json_body.load(line))
    except (json_body.NotJson, ValidationError):
        return None
    items = told.observations if isinstance(told, BatchLine) else [told]
    points = tuple(PostedObservation(item.metric, item.step, item.value, item.stderr, item.time) for item in items)
    return RunObservations(str(told.run_id), points)


def same(found: RunObservations, expected: RunObservations | None) -> None:
    assert expected is not None
    assert found.run_id == expected.run_id
    assert len(found.points) == len(expected.points)
    for one, other in zip(found.points, expected.points, strict=True):
        assert (one.metric, one.step, one.stderr, one.time) == (other.metric, other.step, other.stderr, other.time)
        assert repr(one.value) == repr(other.value)
        assert math.copysign(1, one.value) == math.copysign(1, other.value)


def agree(block: bytes) -> None:
    """The reader of blocks and that of lines take a line for what the model takes it for, or refuse it."""
    found = flat(block)
    if found is not None:
        for point, line in zip(found, block.split(b"\n"), strict=True):
            same(RunObservations(point.run_id, (point,)), read_by_model(line))
    for line in block.split(b"\n"):
        try:
            told = read(line)
        except BadLine:
            assert read_by_model(line) is None
        else:
            same(told, read_by_model(line))


@given(st.lists(written() | whole, min_size=1, max_size=4))
def test_takes_nothing_that_is_not_valid(block: list[bytes]) -> None:
    """Lines are taken for what the model that explains refusals takes them for, and refused where it refuses them."""
    agree(b"\n".join(block))


@pytest.mark.parametrize("block", hostile)
def test_hostile_lines(block: bytes) -> None:
    """Neither broken lines nor lines that say a thing twice are taken for something else."""
    agree(block.replace(b"%s", RUN.encode()))


@given(st.lists(whole, min_size=1, max_size=6))
def test_takes_what_is_plain(block: list[bytes]) -> None:
    """Plain lines do go the fast way, all at once."""
    if not any(b"\\" in line for line in block):
        assert flat(b"\n".join(block)) is not None


@given(
    st.lists(st.text("ab\r ", max_size=8).map(str.encode) | st.just(b"x" * (MOST_LINE_BYTES + 1)), max_size=6),
    st.lists(st.integers(1, 6), max_size=8),
    st.booleans(),
)
@example([b"x" * MOST_LINE_BYTES, b"x" * (MOST_LINE_BYTES + 1), b"y"], [], False)
def test_cutting(expected: list[bytes], sizes: list[int], ended: bool) -> None:
    """Lines are the same however the stream is cut into pieces, but for those that are too long."""
    body = b"\n".join(expected) + (b"\n" if ended else b"")
    cutter, found, at = Cutter(), list[bytes | None](), 0
    for size in [*sizes, *[60_000] * (len(body) // 60_000 + 1)]:
        for block in cutter.blocks(body[at : at + size]):
            found += block.split(b"\n") if block is not None else [None]
        at += size
    found.append(cutter.rest())
    wanted = [line if len(line) <= MOST_LINE_BYTES else None for line in body.split(b"\n")]
    assert found == wanted


@pytest.mark.parametrize(
    ("line", "words"),
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
def test_says_what_is_wrong(line: bytes, words: str) -> None:
    """A bad line is told in few words, with the place in it."""
    with pytest.raises(BadLine) as caught:
        read(line.replace(b"%s", RUN.encode()))
    assert words in caught.value.detail
    assert len(caught.value.detail) < 700
    assert "Nothing was stored" not in caught.value.detail
