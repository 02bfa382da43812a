"""What was read: the runs, each role's points in step order, the first value of a step standing."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, repeat

import numpy as np
from evalstop_detectors import Column, Columns, MetricRole, Observation, Score

from evalstop_lab.errors import UnreadableInput

MAX_STEP = 2**53 - 1
"""The largest step that the service takes, too."""


@dataclass(frozen=True)
class Roles:
    """Which column (JSON key, TensorBoard tag) plays which role, which are better when lower, which counts steps.

    The standard error of a column stands in a column of its name with `_stderr` at the end. A role without a column
    is one that nothing in the log was recognised as.
    """

    columns: Mapping[MetricRole, str] = field(default_factory=lambda: {role: role.value for role in MetricRole})
    minimized: frozenset[str] = frozenset({"loss"})
    step: str = "step"

    def with_more(self, others: Roles) -> Roles:
        """These, and what others say of roles that have no column here."""
        return replace(
            self, columns={**others.columns, **self.columns}, minimized=frozenset(self.minimized | others.minimized)
        )

    def sign(self, role: MetricRole) -> float:
        """What turns the column so that higher is better. A KL is a distance, not a quality: it stays as it is."""
        column = self.columns.get(MetricRole.EVAL if role is MetricRole.PAIRED else role)
        return -1.0 if role is not MetricRole.KL and column in self.minimized else 1.0


@dataclass(frozen=True)
class Conflict:
    """A step that was logged twice with different values."""

    run: str
    column: str
    step: int
    first: float
    second: float


@dataclass
class Series:
    """One role of one run as it was read; the standard error is NaN where there is none."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    stderrs: array[float] = field(default_factory=lambda: array("d"))
    ascending: bool = True

    def add(self, step: int, value: float, stderr: float | None) -> None:
        """Take in one point, in any order."""
        if self.steps and step <= self.steps[-1]:
            self.ascending = False
        self.steps.append(step)
        self.values.append(value)
        self.stderrs.append(math.nan if stderr is None else stderr)

    def settle(self) -> list[tuple[int, float, float]]:
        """Bring the points in step order; of a step the first one read stands. Returns what was in conflict with it."""
        if self.ascending:
            return []
        first: dict[int, int] = {}
        conflicts = []
        for index, step in enumerate(self.steps):
            kept = first.setdefault(step, index)
            before, after = self.values[kept], self.values[index]
            if before != after and not (math.isnan(before) and math.isnan(after)):
                conflicts.append((step, before, after))
        order = [first[step] for step in sorted(first)]
        self.steps = array("q", [self.steps[index] for index in order])
        self.values = array("d", [self.values[index] for index in order])
        self.stderrs = array("d", [self.stderrs[index] for index in order])
        self.ascending = True
        return conflicts


@dataclass
class Run:
    """One run. `total_steps` is its planned end; None there, as in `gpus` and `seconds`, for what nobody said.

    `seconds`: how long it ran, from its first moment on record to its last. `eval_versions`: what the measurement of
    the eval was called at a step, where that was said; `eval_changes`: steps from which on it was another.
    """

    name: str
    total_steps: int | None = None
    roles: Roles = field(default_factory=Roles)
    series: dict[MetricRole, Series] = field(default_factory=dict)
    gpus: float | None = None
    seconds: float | None = None
    eval_versions: dict[int, str] = field(default_factory=dict)
    eval_changes: list[int] = field(default_factory=list)

    @property
    def gpu_hours(self) -> float | None:
        """What the run cost; None when its GPUs or its length are not known."""
        return None if self.gpus is None or self.seconds is None else self.gpus * self.seconds / 3600

    @property
    def last_step(self) -> int:
        """The last step at which anything was logged; 0 of nothing."""
        return max((max(series.steps) for series in self.series.values()), default=0)

    def add(self, role: MetricRole, step: int, value: float, stderr: float | None) -> None:
        """Take in one value as it was logged."""
        series = self.series.get(role)
        if series is None:
            series = self.series[role] = Series()
        series.add(step, value, stderr)

    def observations(self) -> list[Observation]:
        """The settled run as detectors see it, in order, turned so that higher is better."""
        found = [item for role in self.series for item in self._of(role)]
        return sorted(found, key=lambda item: item.order)

    def columns(self) -> Columns | None:
        """The same by role; None where the eval was measured in several ways."""
        return None if self._list_changes() else {role: self._column(role) for role in self.series}

    def scores(self, until: int | None = None) -> list[Score]:
        """The finite eval scores of the settled run, up to the step at which it was stopped."""
        return [
            Score(item.step, item.value, item.stderr, item.eval_version)
            for item in self._of(MetricRole.EVAL)
            if item.finite and (until is None or item.step <= until)
        ]

    def _of(self, role: MetricRole) -> Iterator[Observation]:
        if role not in self.series:
            return
        column, changes = self._column(role), self._list_changes()
        stderrs, progress = (item or repeat(None) for item in (column.stderrs, column.progress))
        for step, value, stderr, done in zip(column.steps, column.values, stderrs, progress, strict=False):
            yield Observation(role, step, value, stderr, done, bisect_right(changes, step) if changes else 0)

    def _column(self, role: MetricRole) -> Column:
        series, sign, total = self.series[role], self.roles.sign(role), self.total_steps
        stderrs = np.frombuffer(series.stderrs)
        known = None if np.isnan(stderrs).all() else [None if err != err else err for err in series.stderrs]
        steps = np.frombuffer(series.steps, dtype=np.int64)
        progress = np.minimum(1.0, steps / total).tolist() if total else None
        return Column(steps.tolist(), (sign * np.frombuffer(series.values)).tolist(), known, progress)

    def _list_changes(self) -> list[int]:
        """The steps from which on the eval was measured otherwise."""
        named = sorted(self.eval_versions.items())
        return sorted({*self.eval_changes, *(step for (_, old), (step, new) in pairwise(named) if new != old)})


@dataclass
class Troubles:
    """What could not be read. A strict reader raises the first of it, another one keeps it and reads on."""

    strict: bool = True
    found: list[UnreadableInput] = field(default_factory=list)

    def add(self, error: UnreadableInput) -> None:
        """Raise the error, or remember it."""
        if self.strict:
            raise error
        self.found.append(error)


@dataclass
class Runs:
    """All runs that were read, by name in the order of their first point. Rows of one run may be anywhere."""

    by_name: dict[str, Run] = field(default_factory=dict)

    def run(self, name: str, roles: Roles) -> Run:
        """The run of this name, new if there is none yet; one that another log began keeps the roles that it has."""
        run = self.by_name.get(name)
        if run is None:
            run = self.by_name[name] = Run(name, roles=roles)
        elif run.roles is not roles and not roles.columns.items() <= run.roles.columns.items():
            run.roles = run.roles.with_more(roles)
        return run

    def settle(self) -> list[Conflict]:
        """Bring every run in order; returns the points that were logged twice with different values."""
        return [
            Conflict(run.name, run.roles.columns[role], *conflict)
            for run in self.by_name.values()
            for role, series in run.series.items()
            for conflict in series.settle()
        ]
