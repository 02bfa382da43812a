"""The observations of a run: values of a role at steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr


class MetricRole(StrEnum):
    """The role that a metric plays for a run.

    Members are in the order in which detectors see the roles of one step: the eval score comes after the others, so
    that a detector that compares the proxy with it has the whole step when the eval score arrives.
    `paired` is not a trainer's metric: the eval score of this step's checkpoint less that of the best one so far,
    both evaluated on the same prompts on request. The learning rate is known by its name and cannot be assigned.
    """

    LEARNING_RATE = "learning_rate"
    ENTROPY = "entropy"
    LENGTH = "length"
    TRUNCATED = "truncated"
    GRADIENT_NORM = "gradient_norm"
    KL = "kl"
    LOSS = "loss"
    PROXY = "proxy"
    EVAL = "eval"
    PAIRED = "paired"

    # That of enums is written in Python, and each observation is looked up by its role several times.
    __hash__ = str.__hash__


RANK = {role: rank for rank, role in enumerate(MetricRole)}


class RoleTraits(NamedTuple):
    """What holds for all metrics of a role.

    `meaning`: what they measure. `minimized`: lower is better unless the trainer says otherwise. `keeps_sign`: a
    distance, not a quality, whose values detectors see as they are logged. `hints`: it may only raise a suspicion.
    """

    meaning: str
    minimized: bool = False
    keeps_sign: bool = False
    hints: bool = False

    def choose_sign(self, is_minimized: bool) -> float:
        """The factor that makes higher values better."""
        return -1.0 if is_minimized and not self.keeps_sign else 1.0


ROLES: Mapping[MetricRole, RoleTraits] = {
    MetricRole.LEARNING_RATE: RoleTraits("the learning rate", keeps_sign=True),
    MetricRole.EVAL: RoleTraits("the eval score"),
    MetricRole.PROXY: RoleTraits("the proxy reward"),
    MetricRole.KL: RoleTraits("the KL to the initial policy", minimized=True, keeps_sign=True),
    MetricRole.LOSS: RoleTraits("the loss", minimized=True),
    MetricRole.ENTROPY: RoleTraits("the entropy of the policy", keeps_sign=True, hints=True),
    MetricRole.LENGTH: RoleTraits("the mean length of the answers", keeps_sign=True, hints=True),
    MetricRole.TRUNCATED: RoleTraits("the share of truncated or malformed answers", keeps_sign=True, hints=True),
    MetricRole.GRADIENT_NORM: RoleTraits("the norm of the gradient", keeps_sign=True, hints=True),
    MetricRole.PAIRED: RoleTraits("paired evaluations, the current score less the best one's"),
}


Order = tuple[int, int]
"""The position of an observation in its run: step and rank of its role."""


class Observation(Struct, frozen=True):
    """One value of one role, with the sign such that higher is better (KL is unchanged).

    `stderr` is the standard error of `value`, in its unit; None when unknown.
    `progress` is the share of the planned steps that are done, 0 to 1; None when the run has no planned end.
    `eval_version` counts the changes in the eval's measurement by this step, whatever the role.
    `critical`: 0, or the number (from 1 on) of the critical eval in `Policy.critical` whose value this is.
    """

    role: MetricRole
    step: int
    value: float
    stderr: float | None = None
    progress: float | None = None
    eval_version: int = 0
    critical: int = 0

    def __post_init__(self) -> None:
        # Convert integers and numpy numbers to floats: beyond 2**53 an integer compares differently from the float
        # restored from a stored state, and JSON has no numpy types.
        if type(self.step) is not int:
            force_setattr(self, "step", operator.index(self.step))
        if type(self.value) is not float:
            force_setattr(self, "value", float(self.value))
        if self.stderr is not None and type(self.stderr) is not float:
            force_setattr(self, "stderr", float(self.stderr))
        if self.progress is not None and type(self.progress) is not float:
            force_setattr(self, "progress", float(self.progress))

    @property
    def order(self) -> Order:
        """The position of this observation in its run: by step, then by role."""
        return self.step, RANK[self.role]

    @property
    def finite(self) -> bool:
        """False for NaN and the infinities, which are evidence themselves and enter no arithmetic."""
        return math.isfinite(self.value)
