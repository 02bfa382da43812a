"""Runs as read from logs: the points of each role in step order; of a step that occurs twice the last value counts."""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, repeat
from typing import Any

import numpy as np
from evalstop_detectors import (
    ROLES,
    Column,
    Columns,
    EvalValue,
    MetricRole,
    Observation,
    Score,
    Scores,
    combine_values,
    start_combining,
)

from evalstop_lab.errors import UnreadableInput

MAX_STEP = 2**53 - 1
"""The largest step, the same as in the service."""


@dataclass(frozen=True)
class Roles:
    """The columns (JSON keys, TensorBoard tags) by role, those that are minimized, and the one that counts steps.

    The standard error of a column is in the column with the suffix `_stderr`. A role without a column was not
    recognized in the log. `guessed`: the roles whose column, or its direction, is a guess: they stop no run.
    `combined`: the columns of several evals, in the place of that of the eval, which is then their mean.
    """

    columns: Mapping[MetricRole, str] = field(default_factory=lambda: {role: role.value for role in MetricRole})
    minimized: frozenset[str] = frozenset({"loss"})
    step: str = "step"
    guessed: frozenset[MetricRole] = frozenset()
    combined: tuple[str, ...] = ()

    @property
    def eval_name(self) -> str:
        """The name of what is watched as the eval, for people."""
        return f"the mean of {', '.join(self.combined)}" if self.combined else self.columns[MetricRole.EVAL]

    @cached_property
    def cells(self) -> list[tuple[MetricRole, str]]:
        """The columns that are read, with their roles."""
        return [*self.columns.items(), *((MetricRole.EVAL, column) for column in self.combined)]

    def with_more(self, more_roles: Roles) -> Roles:
        """These roles, completed by those of `more_roles`."""
        return replace(
            self,
            columns={**more_roles.columns, **self.columns},
            minimized=frozenset(self.minimized | more_roles.minimized),
            guessed=self.guessed | (more_roles.guessed - self.columns.keys()),
            combined=self.combined if MetricRole.EVAL in self.columns else more_roles.combined,
        )

    def sign(self, role: MetricRole) -> float:
        """The factor that makes higher values better. A KL is a distance, not a quality: it stays unchanged."""
        column = self.columns.get(MetricRole.EVAL if role is MetricRole.PAIRED else role)
        return ROLES[role].choose_sign(column in self.minimized)


@dataclass
class Series:
    """One role of one run; the standard error is NaN if there is none."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    stderrs: array[float] = field(default_factory=lambda: array("d"))
    ascending: bool = True

    def add(self, step: int, value: float, stderr: float | None) -> None:
        """Add one point, in any order."""
        if self.steps and step <= self.steps[-1]:
            self.ascending = False
        self.steps.append(step)
        self.values.append(value)
        self.stderrs.append(math.nan if stderr is None else stderr)

    def settle(self) -> int:
        """Sort the points by step; of a step that occurs twice the last one counts, as of a trainer that started again.
        Returns the number of values that were replaced by different ones."""
        if self.ascending:
            return 0
        last: dict[int, int] = {}
        replaced = 0
        for index, step in enumerate(self.steps):
            before, after = self.values[last.get(step, index)], self.values[index]
            replaced += before != after and not (math.isnan(before) and math.isnan(after))
            last[step] = index
        order = [last[step] for step in sorted(last)]
        self.steps = array("q", [self.steps[index] for index in order])
        self.values = array("d", [self.values[index] for index in order])
        self.stderrs = array("d", [self.stderrs[index] for index in order])
        self.ascending = True
        return replaced


@dataclass
class Run:
    """One run. `total_steps` is its planned end; None if unknown, like `gpus` and `seconds`.

    `seconds`: its duration, from the first recorded time to the last. `eval_versions`: the eval version at a step, if
    known. `eval_changes`: the steps where the eval changed. `stopped_early`: how it is known that the
    trainer's own early stopping ended it, if it did. `doubts_plan`: its planned end is only an upper bound and is not
    shown to detectors. `parts`: each of several evals by its column, until the run is settled.
    """

    name: str
    total_steps: int | None = None
    roles: Roles = field(default_factory=Roles)
    series: dict[MetricRole, Series] = field(default_factory=dict)
    gpus: float | None = None
    seconds: float | None = None
    eval_versions: dict[int, str] = field(default_factory=dict)
    eval_changes: list[int] = field(default_factory=list)
    stopped_early: str = ""
    doubts_plan: bool = False
    parts: dict[str, Series] = field(default_factory=dict)

    @property
    def gpu_hours(self) -> float | None:
        """The GPU-hours of the run; None if its GPUs or duration are unknown."""
        return None if self.gpus is None or self.seconds is None else self.gpus * self.seconds / 3600

    @property
    def is_guessed(self) -> bool:
        """Whether its eval, or the direction of it, is a guess."""
        return MetricRole.EVAL in self.roles.guessed and MetricRole.EVAL in self.series

    @property
    def last_step(self) -> int:
        """The last logged step; 0 without any."""
        return max((max(series.steps) for series in self.series.values()), default=0)

    def add(self, role: MetricRole, step: int, value: float, stderr: float | None) -> None:
        series = self.series.get(role)
        if series is None:
            series = self.series[role] = Series()
        series.add(step, value, stderr)

    def settle(self) -> int:
        """Settle each series, and watch several evals by their mean, as the service does; one alone is the eval.
        Returns the number of values that were replaced by different ones."""
        replaced = sum(series.settle() for series in (*self.series.values(), *self.parts.values()))
        parts, self.parts = dict(sorted(self.parts.items())), {}
        if parts:
            self.roles = replace(self.roles, combined=tuple(parts))
        if len(parts) == 1:
            ((column, self.series[MetricRole.EVAL]),) = parts.items()
            self.roles = replace(self.roles, columns={**self.roles.columns, MetricRole.EVAL: column}, combined=())
        elif parts:
            changes = self._list_changes()
            values = sorted(
                EvalValue(step, place, sign * value, None if math.isnan(err) else err, bisect_right(changes, step))
                for place, (column, item) in enumerate(parts.items())
                for sign in (-1 if column in self.roles.minimized else 1,)
                for step, value, err in zip(item.steps, item.values, item.stderrs, strict=True)
            )
            for score in combine_values((1.0,) * len(parts), start_combining(len(parts)), values)[1]:
                self.add(MetricRole.EVAL, score.step, score.value, score.stderr)
        return replaced

    def observations(self) -> list[Observation]:
        """The observations of the settled run for detectors, in order, with higher values being better."""
        observations = [item for role in self.series for item in self._list_observations(role)]
        return sorted(observations, key=lambda item: item.order)

    def columns(self) -> Columns | None:
        """The same by role; None if the eval was measured in several ways."""
        return None if self._list_changes() else {role: self._column(role) for role in self.series}

    def scores(self) -> list[Score]:
        """The finite eval scores of the settled run."""
        return self.score_columns().list_scores()

    def score_columns(self, until: int = MAX_STEP) -> Scores:
        """The same up to this step as arrays, with a checkpoint of each."""
        series = self.series.get(MetricRole.EVAL)
        if series is None:
            return Scores()
        values = self.roles.sign(MetricRole.EVAL) * np.frombuffer(series.values)
        steps = np.frombuffer(series.steps, dtype=np.int64)
        kept = np.isfinite(values) & (steps <= until)
        versions = np.searchsorted(self._list_changes(), steps, side="right")
        stderrs = np.frombuffer(series.stderrs)
        return Scores(steps[kept], values[kept], stderrs[kept], versions[kept], saved=steps[kept])

    def _list_observations(self, role: MetricRole) -> Iterator[Observation]:
        if role not in self.series:
            return
        column, changes = self._column(role), self._list_changes()
        stderrs, progress = (item or repeat(None) for item in (column.stderrs, column.progress))
        for step, value, stderr, done in zip(column.steps, column.values, stderrs, progress, strict=False):
            yield Observation(role, step, value, stderr, done, bisect_right(changes, step) if changes else 0)

    def _column(self, role: MetricRole) -> Column:
        series, sign, total = self.series[role], self.roles.sign(role), None if self.doubts_plan else self.total_steps
        stderrs = np.frombuffer(series.stderrs)
        finite_stderrs = None if np.isnan(stderrs).all() else [None if err != err else err for err in series.stderrs]
        steps = np.frombuffer(series.steps, dtype=np.int64)
        progress = np.minimum(1.0, steps / total).tolist() if total else None
        return Column(steps.tolist(), (sign * np.frombuffer(series.values)).tolist(), finite_stderrs, progress)

    def _list_changes(self) -> list[int]:
        """The steps from which the eval was measured differently."""
        named = sorted(self.eval_versions.items())
        return sorted({*self.eval_changes, *(step for (_, old), (step, new) in pairwise(named) if new != old)})


@dataclass
class ReadErrors:
    """Read errors: `strict` raises the first one; otherwise they are collected and reading continues.

    `repeats`: another reading of the same log will warn of the same.
    """

    strict: bool = True
    repeats: bool = False
    collected: list[UnreadableInput] = field(default_factory=list)

    def add(self, error: UnreadableInput) -> None:
        """Raise the error, or collect it."""
        if self.strict:
            raise error
        self.collected.append(error)

    def warn(self, error: UnreadableInput) -> None:
        """Collect the error, or print it: what could be read before it counts."""
        if self.repeats:
            return
        if self.strict:
            sys.stderr.write(f"evalstop-lab: {error.detail}\n")
        else:
            self.collected.append(error)


@dataclass
class Runs:
    """All runs by name, in the order of their first point. Rows of one run may be anywhere."""

    by_name: dict[str, Run] = field(default_factory=dict)

    def run(self, name: str, roles: Roles) -> Run:
        """The run of this name, created if needed; an existing one keeps its roles."""
        run = self.by_name.get(name)
        if run is None:
            run = self.by_name[name] = Run(name, roles=roles)
        elif run.roles is not roles and not roles.columns.items() <= run.roles.columns.items():
            run.roles = run.roles.with_more(roles)
        return run

    def settle(self) -> int:
        """Settle every run; returns the number of values that were replaced by different ones."""
        return sum(run.settle() for run in self.by_name.values())


NOT_FINITE = {"nan": math.nan, "infinity": math.inf, "-infinity": -math.inf, "inf": math.inf, "-inf": -math.inf}


Number = Callable[[Any, str], float | None]
"""Parses a cell of this column; None for an empty one."""

STEPS = (
    *("step", "train/global_step", "trainer/global_step", "global_step", "time/total_timesteps", "current_steps"),
    *("_step", "Step", "epoch"),
)
"""Columns that count steps, in order of preference; W&B's own `_step` counts calls of its logger. Epochs count where
nothing else does, as in Ultralytics' results.csv."""

SECONDS = ("seconds", "_runtime")
"""Columns with the seconds since the start of the run."""

MOST_GPUS = 1_000_000
"""Larger numbers are errors, which would dominate all costs."""

TOTAL_STEPS = "total_steps"
"""A column with the planned number of steps of its run, in any of its rows."""

NO_METRICS = frozenset({"run", "gpus", "_timestamp", TOTAL_STEPS, *STEPS, *SECONDS})


def add_row(run: Run, step: int, row: Mapping[str, Any], number: Number) -> int:
    """Add the values of one row to the run; `number` parses a cell. Returns the number of added values."""
    added = 0
    combined = run.roles.combined
    for role, column in run.roles.cells:
        cell = row.get(column)
        if cell is None or (value := number(cell, column)) is None:
            continue
        stderr = row.get(f"{column}_stderr")
        error = None if stderr is None else check_stderr(number(stderr, f"{column}_stderr"), role)
        if combined and column in combined:
            run.parts.setdefault(column, Series()).add(step, value, error)
        else:
            run.add(role, step, value, error)
        added += 1
        if role is MetricRole.EVAL and (version := row.get(f"{column}_version")) not in (None, ""):
            run.eval_versions[step] = str(version)
    for column in SECONDS:
        if (cell := row.get(column)) is not None and (seconds := number(cell, column)) is not None:
            run.seconds = max(run.seconds or 0.0, _check_cost(seconds, column))
    if (cell := row.get(TOTAL_STEPS)) not in (None, "", run.total_steps):
        run.total_steps = parse_total_steps(cell)
    if (cell := row.get("gpus")) is not None and (gpus := number(cell, "gpus")) is not None:
        run.gpus = _check_cost(gpus, "gpus")
    return added


def parse_number(cell: object, column: str) -> float | None:
    """Parse a JSON value: a number, null, or the name of a non-finite number."""
    if cell is None:
        return None
    if type(cell) is float:
        return cell
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return float(cell) if abs(cell) < 2**1023 else _refuse_number(cell, column)
    if isinstance(cell, str) and cell.lower() in NOT_FINITE:
        return NOT_FINITE[cell.lower()]
    return _refuse_number(cell, column)


def parse_text_number(cell: str, column: str) -> float | None:
    """Parse a text cell: a number, nan, inf, or empty."""
    text = cell.strip()
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        return _refuse_number(cell, column)


def check_stderr(value: float | None, role: MetricRole) -> float | None:
    """Check a standard error; NaN counts as missing."""
    if value is None or math.isnan(value):
        return None
    if value < 0 or math.isinf(value):
        raise ValueError(
            f"the standard error of {role} is {value:g}; give a finite number of at least 0, or leave it out"
        )
    return value


def parse_step(cell: object) -> int:
    """Parse a step: an integer, also as 10.0 or as text."""
    if type(cell) is int and 0 <= cell <= MAX_STEP:
        return cell
    number = cell
    if isinstance(cell, str):
        number = int(cell) if cell.strip().isdecimal() else parse_text_number(cell, "step")
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MAX_STEP:
        return number
    raise ValueError(f"the step is {format_cell(cell)}; give a whole number from 0 to 2**53 - 1")


def parse_total_steps(cell: object) -> int:
    """Parse the planned length of a run: a positive integer."""
    try:
        steps = parse_step(cell)
    except ValueError:
        steps = 0
    if steps < 1:
        raise ValueError(
            f"{TOTAL_STEPS} is {format_cell(cell)}; give a whole number from 1 to 2**53 - 1, or leave it out"
        )
    return steps


def parse_gpus(text: str) -> float | None:
    """Parse a label, parameter or tag `gpus`; None if it is not a number of GPUs."""
    gpus = float(text) if text.replace(".", "", 1).isdecimal() else -1.0
    return gpus if 0 <= gpus <= MOST_GPUS else None


def parse_run_name(cell: object) -> str:
    """Parse the name of a run: text or an integer."""
    if isinstance(cell, int) and not isinstance(cell, bool):
        return str(cell)
    if isinstance(cell, str) and cell:
        return cell
    raise ValueError(f"the run is {format_cell(cell)}; give its name as text")


def _check_cost(value: float, column: str) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{column} is {value:g}; give a finite number of at least 0, or leave it out")
    return value


def format_cell(cell: object) -> str:
    """The cell for a message, shortened and escaped."""
    text = ascii(cell)
    return "missing" if cell is None else text if len(text) <= 60 else f"{text[:57]}..."


def _refuse_number(cell: object, column: str) -> float:
    raise ValueError(f"{column} is {format_cell(cell)}; give a number, NaN, Infinity or -Infinity, or leave it out")
