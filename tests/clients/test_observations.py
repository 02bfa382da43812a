"""Reading what a trainer passes to log(): nothing raises, and only valid observations are sent."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from evalstop_client.observations import read_values
from hypothesis import given
from hypothesis import strategies as st

NOW = 1767225600.0
any_values = st.one_of(
    st.none(),
    st.text(),
    st.binary(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.lists(st.none()),
)


class FailingValue:
    """A value whose conversions raise."""

    def __float__(self) -> float:
        raise RuntimeError("the device is gone")

    def __index__(self) -> int:
        raise MemoryError

    def __repr__(self) -> str:
        raise RuntimeError("the device is gone")


@given(
    st.dictionaries(st.one_of(st.text(), st.integers()), any_values),
    any_values,
    st.none() | st.dictionaries(st.text(), any_values),
)
def test_any_input_gives_valid_observations(values: Any, step: Any, stderr: Any) -> None:
    """Any input gives observations in strict JSON, and each value is sent or counted as a problem."""
    reading = read_values(values, step, stderr, NOW)
    json.dumps(reading.observations(), allow_nan=False)
    for point in reading.observations():
        assert point["metric"]
        assert 0 <= point["step"] < 2**63
        assert isinstance(point["value"], float) or point["value"] in ("NaN", "Infinity", "-Infinity")
        assert point.get("stderr", 0.0) >= 0
    lost = sum(count for kind, (count, _) in reading.problems.items() if kind != "stderr")
    assert lost + len(reading.observations()) >= len(values)


@pytest.mark.parametrize("invalid", [None, 3, "loss", [("loss", 1.0)], FailingValue()])
def test_values_that_are_not_a_mapping_are_a_problem(invalid: Any) -> None:
    """log() with something other than a mapping gives a problem and no observation."""
    reading = read_values(invalid, 1, None, NOW)
    assert reading.observations() == []
    assert set(reading.problems) == {"values"}


def test_values_that_raise_are_left_out() -> None:
    """A value whose conversion raises is left out, and the others are sent."""
    reading = read_values({"a": FailingValue(), "b": 1}, 0, None, NOW)
    assert [point["metric"] for point in reading.observations()] == ["b"]
    assert read_values({"a": 1}, FailingValue(), None, NOW).observations() == []


def test_numpy_scalars_are_numbers() -> None:
    """numpy scalars, 0-d arrays and integer steps are read like Python's numbers."""
    values = {"a": np.float32(0.5), "b": np.array(2), "c": np.int64(3), "d": np.bool_(True)}
    reading = read_values(values, np.int32(7), {"a": np.float64(0.25)}, NOW)
    assert [point["value"] for point in reading.observations()] == [0.5, 2.0, 3.0, 1.0]
    assert reading.observations()[0] == {
        "metric": "a",
        "step": 7,
        "value": 0.5,
        "stderr": 0.25,
        "time": "2026-01-01T00:00:00Z",
    }
    assert reading.problems == {}


def test_values_are_copied_when_logged() -> None:
    """Changes to arrays or the mapping after the call have no effect."""
    values, stderrs = {"a": np.array(2.0)}, {"a": np.array(0.5)}
    reading = read_values(values, 1, stderrs, NOW)
    values["a"].fill(3.0)
    stderrs["a"].fill(0.75)
    values["b"] = np.array(4.0)
    assert [(item["metric"], item["value"], item["stderr"]) for item in reading.observations()] == [("a", 2.0, 0.5)]


def test_non_finite_values_are_sent_as_strings() -> None:
    """NaN and the infinities are sent as the strings that the API defines."""
    values = {"a": math.nan, "b": math.inf, "c": -np.inf, "d": 1e308}
    points = read_values(values, 0, None, NOW).observations()
    assert [point["value"] for point in points] == ["NaN", "Infinity", "-Infinity", 1e308]


@pytest.mark.parametrize("error", [-0.1, math.nan, math.inf, "0.1", None])
def test_invalid_stderr_is_left_out(error: Any) -> None:
    """An invalid standard error is left out, and its value is sent."""
    reading = read_values({"a": 1.0}, 0, {"a": error}, NOW)
    assert reading.observations() == [{"metric": "a", "step": 0, "value": 1.0, "time": "2026-01-01T00:00:00Z"}]
    assert set(reading.problems) == {"stderr"}


@pytest.mark.parametrize("step", [-1, 1.5, "3", None, 2**63])
def test_invalid_step_drops_all_values(step: Any) -> None:
    """Without a valid step every value of the call is counted as lost."""
    reading = read_values({"a": 1.0, "b": 2.0}, step, None, NOW)
    assert reading.observations() == []
    assert reading.problems["step"][0] == 2


def test_stderr_of_an_unknown_metric_is_a_problem() -> None:
    """A standard error whose metric is not logged is reported, since it may be mistyped."""
    assert set(read_values({"score": 1.0}, 0, {"scroe": 0.1}, NOW).problems) == {"stderr"}
