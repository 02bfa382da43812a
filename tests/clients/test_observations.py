"""LoggedValues what a trainer hands over: whatever it is, nothing is raised, and what is sent is what the API takes."""

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
anything = st.one_of(
    st.none(),
    st.text(),
    st.binary(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.lists(st.none()),
)


class Treacherous:
    """A value whose every conversion fails in its own way."""

    def __float__(self) -> float:
        raise RuntimeError("the device is gone")

    def __index__(self) -> int:
        raise MemoryError


@given(
    st.dictionaries(st.one_of(st.text(), st.integers()), anything),
    anything,
    st.none() | st.dictionaries(st.text(), anything),
)
def test_never_raises_and_yields_only_what_the_service_takes(values: Any, step: Any, stderr: Any) -> None:
    """Any input gives points of the documented shape, in strict JSON, and accounts for each value."""
    reading = read_values(values, step, stderr, NOW)
    json.dumps(reading.observations(), allow_nan=False)
    for point in reading.observations():
        assert point["metric"]
        assert 0 <= point["step"] < 2**63
        assert isinstance(point["value"], float) or point["value"] in ("NaN", "Infinity", "-Infinity")
        assert point.get("stderr", 0.0) >= 0
    lost = sum(count for kind, (count, _) in reading.problems.items() if kind != "stderr")
    assert lost + len(reading.observations()) >= len(values)


@pytest.mark.parametrize("rubbish", [None, 3, "loss", [("loss", 1.0)], Treacherous()])
def test_values_that_are_no_mapping_are_left_out(rubbish: Any) -> None:
    """log() given something else than a mapping yields a complaint and no point."""
    reading = read_values(rubbish, 1, None, NOW)
    assert reading.observations() == []
    assert set(reading.problems) == {"values"}


def test_treacherous_values_are_left_out() -> None:
    """A conversion that raises costs its own value alone."""
    reading = read_values({"a": Treacherous(), "b": 1}, 0, None, NOW)
    assert [point["metric"] for point in reading.observations()] == ["b"]
    assert read_values({"a": 1}, Treacherous(), None, NOW).observations() == []


def test_numpy_scalars_are_numbers() -> None:
    """Scalars and zero-dimensional arrays of numpy, and its integers as steps, are taken like Python's own."""
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


def test_what_was_said_is_what_is_sent() -> None:
    """What its maker changes after the call, before it is recorded, changes nothing."""
    values, stderrs = {"a": np.array(2.0)}, {"a": np.array(0.5)}
    reading = read_values(values, 1, stderrs, NOW)
    values["a"].fill(3.0)
    stderrs["a"].fill(0.75)
    values["b"] = np.array(4.0)
    assert [(one["metric"], one["value"], one["stderr"]) for one in reading.observations()] == [("a", 2.0, 0.5)]


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 1), max_size=9), st.integers(1, 4))
def test_a_reading_comes_in_parts(values: dict[str, float], most: int) -> None:
    """However many metrics there are, in parts of a bounded size they are all there, in their order."""
    reading = read_values(values, 1, values, NOW)
    parts = [part.observations() for part in reading.split(most)]
    assert [one for part in parts for one in part] == reading.observations()
    assert all(0 < len(part) <= most for part in parts)


def test_non_finite_values_travel_as_strings() -> None:
    """NaN and the infinities are sent as the strings that the API names."""
    values = {"a": math.nan, "b": math.inf, "c": -np.inf, "d": 1e308}
    points = read_values(values, 0, None, NOW).observations()
    assert [point["value"] for point in points] == ["NaN", "Infinity", "-Infinity", 1e308]


@pytest.mark.parametrize("error", [-0.1, math.nan, math.inf, "0.1", None])
def test_bad_standard_error_does_not_cost_the_value(error: Any) -> None:
    """A standard error that is none is left out; the value it belongs to is sent."""
    reading = read_values({"a": 1.0}, 0, {"a": error}, NOW)
    assert reading.observations() == [{"metric": "a", "step": 0, "value": 1.0, "time": "2026-01-01T00:00:00Z"}]
    assert set(reading.problems) == {"stderr"}


@pytest.mark.parametrize("step", [-1, 1.5, "3", None, 2**63])
def test_bad_step_costs_all_values_of_the_call(step: Any) -> None:
    """Without a step there is no observation; as many are counted as values were given."""
    reading = read_values({"a": 1.0, "b": 2.0}, step, None, NOW)
    assert reading.observations() == []
    assert reading.problems["step"][0] == 2


def test_standard_error_of_nothing_is_noticed() -> None:
    """A misspelt metric among the standard errors is complained about."""
    assert set(read_values({"gold": 1.0}, 0, {"god": 0.1}, NOW).problems) == {"stderr"}
