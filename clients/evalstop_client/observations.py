"""Converts what a trainer logs into observations of the API. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any

LARGEST_STEP = 2**63 - 1
TEXT = (str, bytes, bytearray)


@dataclass(slots=True)
class LoggedValues:
    """The values of one call of `log` and their standard errors, by metric; `time` in seconds since 1970.

    Reading them is all that a trainer waits for; the recorder's thread does the rest. `problems`: what was left out,
    kind -> (how often, an example).
    """

    time: float
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    stderrs: dict[str, float] = field(default_factory=dict)
    problems: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def observation_count(self) -> int:
        """How many observations it holds."""
        return len(self.values)

    def observations(self) -> list[dict[str, Any]]:
        """The observations as the API takes them."""
        time = datetime.fromtimestamp(self.time, UTC).isoformat().replace("+00:00", "Z")
        items: list[dict[str, Any]] = []
        for metric, value in self.values.items():
            point = {"metric": metric, "step": self.step, "value": encode_value(value), "time": time}
            if metric in self.stderrs:
                point["stderr"] = self.stderrs[metric]
            items.append(point)
        return items

    def split(self, points: int) -> Iterator[LoggedValues]:
        """The logged in parts of so many observations at most, of which each can be sent alone."""
        if self.observation_count <= points:
            if self.values:
                yield self
            return
        values = iter(self.values.items())
        while part := dict(islice(values, points)):
            yield LoggedValues(self.time, self.step, part, self.stderrs)

    def add_problem(self, kind: str, example: str, count: int = 1) -> None:
        """Note that `count` things of this kind were left out."""
        so_far, first = self.problems.get(kind, (0, example))
        self.problems[kind] = (so_far + count, first)


def read_values(values: Mapping[str, Any], step: Any, stderr: Mapping[str, Any] | None, time: float) -> LoggedValues:
    """Read `values` and their standard errors by metric, all at one `step`."""
    logged = LoggedValues(time)
    if not isinstance(values, Mapping):
        logged.add_problem("values", f"log() takes a mapping of metric to value, not {values!r:.80}")
        return logged
    whole_step = parse_step(step)
    if whole_step is None:
        logged.add_problem("step", f"step {step!r:.80} is not a whole number from 0 on", max(1, len(values)))
        return logged
    logged.step = whole_step
    errors = stderr if isinstance(stderr, Mapping) else {}
    if stderr is not None and (errors is not stderr or not errors.keys() <= values.keys()):
        logged.add_problem("stderr", f"stderr {stderr!r:.80} has no value beside it")
    for metric, raw in values.items():
        value = parse_number(raw)
        if not isinstance(metric, str) or not metric:
            logged.add_problem("metric", f"{metric!r:.80} is not the name of a metric")
        elif value is None:
            logged.add_problem("value", f"{metric!r:.80} has the value {raw!r:.80}, which is no number")
        else:
            logged.values[metric] = value
            if metric in errors:
                _add_stderr(logged, metric, errors[metric])
    return logged


def parse_step(step: Any) -> int | None:
    """The step as an int, or None when it is none; integers of numpy and torch are integers too."""
    try:
        whole = operator.index(step)
    except Exception:  # whatever a foreign type's conversion raises
        return None
    return whole if 0 <= whole <= LARGEST_STEP else None


def parse_number(raw: Any) -> float | None:
    """The value as a float, or None when it is no number; scalars of numpy and torch are numbers too."""
    if type(raw) is float:  # nearly always, and a trainer waits for it
        return raw
    if isinstance(raw, TEXT):  # float() would read them, and hide a mistake
        return None
    try:
        return float(raw.detach() if hasattr(raw, "detach") else raw)  # torch warns of what still has a gradient
    except Exception:  # whatever a foreign type's conversion raises
        return None


def encode_value(value: float) -> float | str:
    """The value as JSON can hold it: NaN and the infinities travel as strings."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _add_stderr(logged: LoggedValues, metric: str, raw: Any) -> None:
    error = parse_number(raw)
    if error is None or not math.isfinite(error) or error < 0:
        logged.add_problem("stderr", f"stderr of {metric!r:.80} is {raw!r:.80}, not a number from 0 on")
    else:
        logged.stderrs[metric] = error
