"""Requests of MLflow's clients: numbers in protobuf's JSON, tags as labels, filters and statuses."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from evalstop_service.domain.fields import check_text
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.store.mlflow import STATUSES
from evalstop_service.store.observations import MAX_STEP
from evalstop_service.web.api.schemas import encode_number
from evalstop_service.web.mlflow import requests
from evalstop_service.web.mlflow.protocol import MlflowError
from evalstop_service.web.mlflow.requests import Item, LogBatch, MetricIn, merge_params, merge_tags
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

KEYS = st.text("abc/ -.:_@0", min_size=1, max_size=8).filter(lambda key: "/" not in key and key.strip("."))
TEXTS = st.text(max_size=20)
ITEMS = st.lists(st.tuples(st.text(min_size=1, max_size=8), TEXTS), max_size=20)


@given(
    key=KEYS,
    value=st.floats(allow_nan=True, allow_infinity=True),
    step=st.integers(0, MAX_STEP),
    milliseconds=st.integers(1, 253_402_300_799_999),
    as_text=st.booleans(),
)
def test_metric_is_read_exactly(key: str, value: float, step: int, milliseconds: int, as_text: bool) -> None:
    """Every double, step and time is read exactly, as number or string."""
    sent: dict[str, Any] = {"key": key, "value": encode_number(value), "timestamp": milliseconds, "step": step}
    if as_text:
        sent |= {"timestamp": str(milliseconds), "step": str(step)}
    metric = MetricIn.model_validate(sent)
    observation = metric.to_observation()
    assert observation is not None
    assert (observation.metric, observation.step) == (key, step)
    assert struct.pack("d", observation.value) == struct.pack("d", value) or (
        math.isnan(observation.value) and math.isnan(value)
    )
    assert observation.time is not None
    assert abs(observation.time.timestamp() * 1000 - milliseconds) < 1


@pytest.mark.parametrize("value", [None, [], {}, "", "many", "0x1", 10**400])
def test_value_that_is_no_number_is_refused(value: object) -> None:
    """Null, other strings and numbers out of range are refused."""
    with pytest.raises(ValidationError):
        MetricIn.model_validate({"key": "m", "value": value, "timestamp": 1})


@pytest.mark.parametrize("key", ["", "a(b)", "../x", "/x", "a//b", "x" * 251, "a\x00", "."])
def test_key_that_mlflow_refuses_is_refused(key: str) -> None:
    """The rules for metric names are those of MLflow."""
    with pytest.raises(ValidationError):
        MetricIn.model_validate({"key": key, "value": 1.0, "timestamp": 1})


def test_missing_step_is_0_and_impossible_time_is_none() -> None:
    """A metric without a step is at step 0."""
    for fields in ({"timestamp": 0}, {"timestamp": -5}, {"timestamp": 10**18}, {"step": None, "timestamp": 0}):
        observation = MetricIn.model_validate({"key": "m", "value": 1.0} | fields).to_observation()
        assert observation is not None
        assert (observation.step, observation.time) == (0, None)


def test_step_out_of_range_is_no_observation() -> None:
    """A step that is negative, or larger than JSON integers are exact, yields nothing."""
    for step in (-1, MAX_STEP + 1, "-9223372036854775808"):
        assert (
            MetricIn.model_validate({"key": "m", "value": 1.0, "timestamp": 1, "step": step}).to_observation() is None
        )


def test_unknown_fields_are_ignored() -> None:
    """Newer clients may send more fields."""
    metric = {"key": "m", "value": 1, "timestamp": 1, "model_id": "x"}
    batch = LogBatch.model_validate({"run_id": "0" * 32, "metrics": [metric], "new": 1})
    assert len(batch.metrics) == 1


@given(params=ITEMS, tags=ITEMS)
def test_merged_items_are_valid_and_idempotent(params: list[Item], tags: list[Item]) -> None:
    """Labels and params stay within their limits, and merging the same items again changes nothing."""
    for merge, items in ((merge_params, params), (merge_tags, tags)):
        merged = merge({}, items).labels
        assert all(check_text(name) == name and check_text(value) == value for name, value in merged.items())
        assert all(len(value) <= requests.LONGEST_VALUE for value in merged.values())
        assert merge(merged, items).labels == merged


def test_items_over_the_limit_are_dropped_and_counted() -> None:
    """Existing labels can still be changed, and labels of the service cannot be set."""
    too_many = [(f"p{number}", "v") for number in range(requests.MOST_LABELS + 10)]
    merged, dropped = merge_tags({}, too_many)
    assert (len(merged), dropped) == (requests.MOST_LABELS, 10)
    assert merge_params({}, too_many).dropped == 0
    assert merge_tags(merged, [("p0", "w")]).labels["p0"] == "w"
    assert merge_tags({}, [("x" * 257, "v")]).dropped == 1
    told = {"evalstop.preset": "verl", "evalstop.eval": "eval_wer:minimize"}
    assert merge_tags({}, [("evalstop.should_stop", "true"), *told.items()]).labels == told


def test_filter_is_read_as_in_mlflow() -> None:
    """Keys may be quoted, and words be of either case."""
    text = "attributes.run_name != 'x' and tags.`a b` = \"c\" AND params.lr = '1'"
    assert [tuple(clause) for clause in requests.parse_filter(text)] == [
        ("attributes", "run_name", "!=", "x"),
        ("tags", "a b", "=", "c"),
        ("params", "lr", "=", "1"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "metrics.a > 1",
            "start_time = 5",
            "tags.a = 'b' and",
            "tags.a",
            "tags.a = b",
            "tags.a = 'b' or tags.c = 'd'",
            "x" * 9000,
        ),
        *(
            "tags.a > 'b'",
            "params.a = 1",
            "status IN 'RUNNING'",
            "status IN (RUNNING)",
            "color = 'red'",
        ),
        *("shapes.a = 'b'", "tags.a = 'b\x00'", "tags.`a\"b` = 'c'", "tags.`a\\` = 'c'"),
        " AND ".join(["tags.a = 'b'"] * 21),
    ],
)
def test_invalid_filter_is_refused_with_the_right_form(text: str) -> None:
    """The error names what would be valid."""
    with pytest.raises(MlflowError, match=r"join comparisons|may have"):
        requests.parse_filter(text)


@pytest.mark.parametrize(
    "text", ["status" + " " * 9980 + "x", "status = 'a'" + " " * 9980 + "x", "a" * 9999, "a" + " " * 9999 + "!"]
)
def test_cost_of_a_refusal_is_linear_in_its_text(text: str) -> None:
    """A regular expression that backtracks takes seconds for each, and all exceed the test's timeout."""
    for _ in range(500):
        with pytest.raises(MlflowError):
            requests.parse_filter(text)


@pytest.mark.parametrize("status", RunStatus)
def test_every_status_maps_to_an_mlflow_status(status: RunStatus) -> None:
    """MLflow's clients know five statuses."""
    assert STATUSES[status] in ("RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED")


def test_parked_run_is_scheduled() -> None:
    """A parked run is neither running nor ended, as its job waits to be started again."""
    assert STATUSES[RunStatus.PARKED] == "SCHEDULED"
