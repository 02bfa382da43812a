"""Converts what a trainer logs into observations of the API. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

LARGEST_STEP = 2**63 - 1
TEXT = (str, bytes, bytearray)


@dataclass(slots=True)
class LoggedValues:
    """The values of one call of `log` and their standard errors, by metric; `time` in seconds since 1970.

    The trainer waits only until they are read; the recorder's thread does the rest. `problems`: what was dropped,
    kind -> (how often, an example).
    """

    time: float
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    stderrs: dict[str, float] = field(default_factory=dict)
    problems: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def observation_count(self) -> int:
        return len(self.values)

    def observations(self) -> list[dict[str, Any]]:
        time = format_time(datetime.fromtimestamp(self.time, UTC))
        items: list[dict[str, Any]] = []
        for metric, value in self.values.items():
            point = {"metric": metric, "step": self.step, "value": encode_value(value), "time": time}
            if metric in self.stderrs:
                point["stderr"] = self.stderrs[metric]
            items.append(point)
        return items

    def add_problem(self, kind: str, example: str, count: int = 1) -> None:
        """Record that `count` items of this kind were dropped."""
        dropped, first = self.problems.get(kind, (0, example))
        self.problems[kind] = (dropped + count, first)


def read_values(values: Mapping[str, Any], step: Any, stderr: Mapping[str, Any] | None, time: float) -> LoggedValues:
    """Read `values` and their standard errors by metric, all at one `step`."""
    logged = LoggedValues(time)
    if not isinstance(values, Mapping):
        logged.add_problem("values", f"log() takes a mapping of metric to value, not {_describe(values)}")
        return logged
    whole_step = parse_step(step)
    if whole_step is None:
        logged.add_problem("step", f"step {_describe(step)} is not a non-negative integer", max(1, len(values)))
        return logged
    logged.step = whole_step
    errors = stderr if isinstance(stderr, Mapping) else {}
    if stderr is not None and (errors is not stderr or not errors.keys() <= values.keys()):
        logged.add_problem("stderr", f"stderr {_describe(stderr)} has no value")
    for metric, raw in values.items():
        value = parse_number(raw)
        if not isinstance(metric, str) or not metric:
            logged.add_problem("metric", f"{_describe(metric)} is not the name of a metric")
        elif value is None:
            logged.add_problem("value", f"{_describe(metric)} has the value {_describe(raw)}, which is not a number")
        else:
            logged.values[metric] = value
            if metric in errors:
                _add_stderr(logged, metric, errors[metric])
    return logged


def parse_step(step: Any) -> int | None:
    """The step as an int, or None if it is not one; accepts integers of numpy and torch."""
    try:
        whole = operator.index(step)
    except Exception:  # whatever a foreign type's conversion raises
        return None
    return whole if 0 <= whole <= LARGEST_STEP else None


def parse_number(raw: Any) -> float | None:
    """The value as a float, or None if it is not a number; accepts scalars of numpy and torch."""
    if type(raw) is float:  # the usual case, and the trainer waits for it
        return raw
    if isinstance(raw, TEXT):  # float() would parse strings, and hide a mistake
        return None
    try:
        return float(raw.detach() if hasattr(raw, "detach") else raw)  # torch warns about tensors with a gradient
    except Exception:  # whatever a foreign type's conversion raises
        return None


def format_time(moment: datetime, timespec: str = "auto") -> str:
    """A time with its zone, as the API writes it."""
    return moment.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def encode_value(value: float) -> float | str:
    """The value for JSON: NaN and the infinities become strings."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _describe(value: Any) -> str:
    """The beginning of a value's repr, which may raise: that of a tensor reads it from its device."""
    try:
        return f"{value!r:.80}"
    except Exception:  # whatever a foreign type raises
        return f"<{type(value).__name__}>"


def _add_stderr(logged: LoggedValues, metric: str, raw: Any) -> None:
    error = parse_number(raw)
    if error is None or not math.isfinite(error) or error < 0:
        logged.add_problem("stderr", f"stderr of {_describe(metric)} is {_describe(raw)}, not a non-negative number")
    else:
        logged.stderrs[metric] = error
