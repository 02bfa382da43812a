"""What a run reports: values of a role at steps, one by one or as columns."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr


class MetricRole(StrEnum):
    """The role that a metric plays for a run.

    Members stand in the order in which detectors see the roles of one step: the eval score comes after the others, so
    that a detector that weighs the proxy against it has the whole step before it when the eval score arrives.
    `paired` is no metric of its own: the eval score of this step's checkpoint less that of the best one until then,
    both evaluated now on the same prompts.
    """

    KL = "kl"
    LOSS = "loss"
    PROXY = "proxy"
    EVAL = "eval"
    PAIRED = "paired"


RANK = {role: rank for rank, role in enumerate(MetricRole)}


class Observation(Struct, frozen=True):
    """One value of one role, turned so that higher is better (KL is left as it is).

    `stderr` is the standard error of `value`, in its unit; None when the trainer did not say.
    `progress` is the share of the planned steps that are done, 0 to 1; None when the run has no planned end.
    `eval_version` counts how often the measurement of the eval had changed by this step, whatever the role.
    `critical`: 0, or the number of the critical eval of `Policy.critical` whose value this is, from 1 on.
    """

    role: MetricRole
    step: int
    value: float
    stderr: float | None = None
    progress: float | None = None
    eval_version: int = 0
    critical: int = 0

    def __post_init__(self) -> None:
        # Integers and numpy's numbers become plain floats here: past 2**53 an integer compares otherwise than the float
        # that comes back out of a stored state, and JSON knows no numpy.
        if type(self.step) is not int:
            force_setattr(self, "step", operator.index(self.step))
        if type(self.value) is not float:
            force_setattr(self, "value", float(self.value))
        if self.stderr is not None and type(self.stderr) is not float:
            force_setattr(self, "stderr", float(self.stderr))
        if self.progress is not None and type(self.progress) is not float:
            force_setattr(self, "progress", float(self.progress))

    @property
    def order(self) -> tuple[int, int]:
        """The place of this observation in its run: by step, then by role."""
        return self.step, RANK[self.role]

    @property
    def finite(self) -> bool:
        """False for NaN and the infinities, which are evidence of their own and enter no arithmetic."""
        return math.isfinite(self.value)


class Column(NamedTuple):
    """Several values of one role, by ascending step, with higher values better as in Observation.

    `values` and `stderrs` are plain floats. `stderrs` or `progress` is None when no observation has one. The eval was
    measured in one way throughout.
    """

    steps: Sequence[int]
    values: Sequence[float]
    stderrs: Sequence[float | None] | None = None
    progress: Sequence[float | None] | None = None


Columns = Mapping[MetricRole, Column]
"""Observations of one run by role; no column is empty."""


def to_columns(observations: Iterable[Observation]) -> dict[MetricRole, Column]:
    """The observations, which are in their `order`, as columns."""
    by_role: dict[MetricRole, list[Observation]] = defaultdict(list)
    for item in observations:
        by_role[item.role].append(item)
    return {
        role: Column(
            [item.step for item in items],
            [item.value for item in items],
            [item.stderr for item in items],
            [item.progress for item in items],
        )
        for role, items in by_role.items()
    }


def to_observations(columns: Columns) -> list[Observation]:
    """The observations of these columns in their `order`."""
    observations = [
        Observation(
            role,
            step,
            value,
            None if column.stderrs is None else column.stderrs[index],
            None if column.progress is None else column.progress[index],
        )
        for role, column in columns.items()
        for index, (step, value) in enumerate(zip(column.steps, column.values, strict=True))
    ]
    return observations if len(columns) == 1 else sorted(observations, key=lambda item: item.order)
