"""Runs as read from logs: the points of each role in step order; of a step that occurs twice the last value counts."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from evalstop_detectors import (
    ROLES,
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

ReadErrors = list[UnreadableInput]
"""What could not be read of a log; all else of it counts."""


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
        series, sign, total = self.series[role], self.roles.sign(role), None if self.doubts_plan else self.total_steps
        changes = self._list_changes()
        for step, value, stderr in zip(series.steps, series.values, series.stderrs, strict=True):
            progress = min(1.0, step / total) if total else None
            version = bisect_right(changes, step) if changes else 0
            yield Observation(role, step, sign * value, None if stderr != stderr else stderr, progress, version)

    def _list_changes(self) -> list[int]:
        """The steps from which the eval was measured differently."""
        named = sorted(self.eval_versions.items())
        return sorted({*self.eval_changes, *(step for (_, old), (step, new) in pairwise(named) if new != old)})


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
