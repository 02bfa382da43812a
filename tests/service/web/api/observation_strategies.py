"""Hypothesis strategies of observations as JSON, valid and invalid."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

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
