"""What MLflow's clients send, read: numbers as protobuf writes them, params and tags as labels."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from evalstop_service.rules.fields import check_text
from evalstop_service.web.api.schemas import MAX_STEP, encode_number
from evalstop_service.web.mlflow import labels, search
from evalstop_service.web.mlflow.errors import MlflowError
from evalstop_service.web.mlflow.labels import Item, merge_labels
from evalstop_service.web.mlflow.requests import LogBatch, MetricIn
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

KEYS = st.text("abc/ -.:_@0", min_size=1, max_size=8).filter(lambda key: "/" not in key and key.strip("."))
TEXTS = st.text(max_size=20)
ITEMS = st.lists(st.builds(Item, st.text(min_size=1, max_size=8), TEXTS), max_size=20)


@given(
    key=KEYS,
    value=st.floats(allow_nan=True, allow_infinity=True),
    step=st.integers(0, MAX_STEP),
    milliseconds=st.integers(1, 253_402_300_799_999),
    as_text=st.booleans(),
)
def test_a_metric_comes_through(key: str, value: float, step: int, milliseconds: int, as_text: bool) -> None:
    """Every double, step and time comes through to the bit, integers as numbers or as texts, and can be passed on."""
    sent: dict[str, Any] = {"key": key, "value": encode_number(value), "timestamp": milliseconds, "step": step}
    if as_text:
        sent |= {"timestamp": str(milliseconds), "step": str(step)}
    metric = MetricIn.model_validate(sent)
    point = metric.to_observation()
    assert point is not None
    assert (point.metric, point.step) == (key, step)
    assert struct.pack("d", point.value) == struct.pack("d", value) or (math.isnan(point.value) and math.isnan(value))
    assert point.time is not None
    assert abs(point.time.timestamp() * 1000 - milliseconds) < 1
    again = MetricIn.model_validate(metric.model_dump(mode="json"))
    assert repr(again) == repr(metric)


@pytest.mark.parametrize("value", [None, True, [], {}, "", "many", "0x1", 10**400])
def test_no_number(value: object) -> None:
    """What is no number is refused."""
    with pytest.raises(ValidationError):
        MetricIn.model_validate({"key": "m", "value": value})


@pytest.mark.parametrize("key", ["", "a(b)", "../x", "/x", "a//b", "x" * 251, "a\x00", "."])
def test_bad_names(key: str) -> None:
    """A name that MLflow refuses is refused."""
    with pytest.raises(ValidationError):
        MetricIn.model_validate({"key": key, "value": 1.0})


def test_missing_step_and_time() -> None:
    """A metric without a step is at step 0, one without a time, or with an impossible one, has none."""
    for said in ({}, {"timestamp": 0}, {"timestamp": -5}, {"timestamp": 10**18}, {"step": None, "timestamp": None}):
        point = MetricIn.model_validate({"key": "m", "value": 1.0} | said).to_observation()
        assert point is not None
        assert (point.step, point.time) == (0, None)


def test_steps_without_a_place() -> None:
    """A step that is negative, or larger than JSON keeps exact, is no point."""
    for step in (-1, MAX_STEP + 1, "-9223372036854775808"):
        assert MetricIn.model_validate({"key": "m", "value": 1.0, "step": step}).to_observation() is None


def test_unknown_fields_are_passed_over() -> None:
    """What a newer client sends along does not matter."""
    batch = LogBatch.model_validate({"run_id": "r", "metrics": [{"key": "m", "value": 1, "model_id": "x"}], "new": 1})
    assert len(batch.metrics) == 1


@given(params=ITEMS, tags=ITEMS)
def test_labels_can_be_stored(params: list[Item], tags: list[Item]) -> None:
    """Labels keep to their limits whatever comes; the same items, sent again, change nothing."""
    found, dropped = merge_labels({}, params, tags)
    assert dropped == 0
    assert all(check_text(name) == name and check_text(value) == value for name, value in found.items())
    assert all(len(value) <= labels.LONGEST_VALUE for value in found.values())
    assert merge_labels(found, params, tags).labels == found


def test_first_param_last_tag() -> None:
    """A param keeps its first value, a tag takes its last; both come back under their own names."""
    found, _ = merge_labels({}, [Item("lr", "1"), Item("lr", "2")], [Item("t", "1"), Item("t", "2")])
    found, _ = merge_labels(found, [Item("lr", "3")], [Item("t", "3")])
    assert labels.read_params(found) == [Item("lr", "1")]
    assert labels.read_tags(found) == [Item("t", "3")]


def test_labels_are_bounded() -> None:
    """What is past the limits is left out and counted; what is there can still be changed. The service's own stay."""
    many = [Item(f"p{number}", "v") for number in range(labels.MOST_LABELS + 10)]
    found, dropped = merge_labels({}, many)
    assert (len(found), dropped) == (labels.MOST_LABELS, 10)
    long = [Item("x" * 250, "v"), Item("evalstop.should_stop", "true"), Item("evalstop.preset", "verl")]
    assert merge_labels({}, long[:1]).dropped == 1
    assert merge_labels({}, tags=long[1:]).labels == {"evalstop.preset": "verl"}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("  ", 0),
        ("tags.a = 'b'", 1),
        ("params.`a b` != 'c' and attributes.run_name = \"x and y\" AND tags.\"mlflow.user\"='z'", 3),
    ],
)
def test_filters(text: str, count: int) -> None:
    """Comparisons of texts joined by `and` are understood."""
    assert len(search.parse_filter(text)) == count


@pytest.mark.parametrize(
    "text", ["metrics.a > 1", "tags.a", "tags.a = b", "tags.a = 'b' or tags.c = 'd'", "tags.a LIKE 'b%'", "x" * 9000]
)
def test_filters_that_are_not_understood(text: str) -> None:
    """Anything else is refused, and the error says what would be understood."""
    with pytest.raises(MlflowError, match="join comparisons"):
        search.parse_filter(text)
