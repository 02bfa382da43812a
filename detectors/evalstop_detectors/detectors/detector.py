"""The protocol that every detector follows, and the evidence that it yields."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from msgspec import Meta, Struct

from evalstop_detectors.observation import Columns, MetricRole, Observation

# What a policy may set a parameter to. The upper ends keep out what JSON or a float cannot hold, such as infinity.
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Meta(ge=0, le=1_000_000)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class Kind(StrEnum):
    """What the number of an evidence means; it decides which way is alarming.

    `log_e_value` is the natural logarithm of an e-value, `statistic` a number on its detector's own scale, `posterior`
    a probability. Of p-values the small ones alarm, of all others the large ones.
    """

    COUNT = "count"
    FRACTION = "fraction"
    P_VALUE = "p_value"
    LOG_E_VALUE = "log_e_value"
    STATISTIC = "statistic"
    POSTERIOR = "posterior"


class Evidence(Struct, frozen=True):
    """A number with a meaning.

    `turn_step` is the step at which the detector believes the turn was, None while it sees none.
    `note` says in words what the number stands for, or what is missing; it holds no scores, because a detector sees
    minimized metrics with their sign turned.
    """

    kind: Kind
    value: float
    turn_step: int | None = None
    note: str = ""

    def reaches(self, threshold: float | None) -> bool:
        """Whether the value is at least as alarming as the threshold; None is never reached."""
        if threshold is None:
            return False
        return self.value <= threshold if self.kind is Kind.P_VALUE else self.value >= threshold


class Thresholds(Struct, frozen=True):
    """From which value on evidence is grounds to suspect and to stop; None means never."""

    suspect_at: float | None
    stop_at: float | None


S = TypeVar("S")


class Detector(Protocol[S]):
    """A pure function over one run's roles, folded one observation at a time.

    Implementations are frozen msgspec structs whose fields are the parameters that a policy may set; their types are
    the schema. States are frozen structs of finite JSON values. `step` is only called with observations of `roles`,
    in their `order`, each once. A detector that takes in several for less has a `fold`, too (see `Fold`).
    """

    name: ClassVar[str]
    state_type: ClassVar[type[Any]]

    @property
    def roles(self) -> frozenset[MetricRole]:
        """The roles that this detector is shown."""

    @property
    def thresholds(self) -> Thresholds:
        """The thresholds that its parameters imply, for policies that do not set their own."""

    def start(self) -> S:
        """The state before the first observation."""

    def step(self, state: S, observation: Observation) -> tuple[S, Evidence]:
        """Take in one observation."""


Changes = list[tuple[tuple[int, int], Evidence]]
"""The `order` of each observation at which the evidence became another object than before, and what it became."""

Fold = Callable[[Any, Evidence | None, Columns], tuple[Any, Changes]]
"""Takes in columns of the detector's roles: from the state and the evidence before them to the state after them. The
result is that of `step` for one observation after the other."""


def fold_of(detector: Detector[Any]) -> Fold | None:
    """The detector's own `fold`, if it has one."""
    own: Fold | None = getattr(detector, "fold", None)
    return own


def fold_steps(
    detector: Detector[S], state: S, evidence: Evidence | None, observations: Sequence[Observation]
) -> tuple[S, Changes]:
    """What every `fold` comes to: one step after the other."""
    changes: Changes = []
    for observation in observations:
        state, latest = detector.step(state, observation)
        if latest is not evidence:
            evidence = latest
            changes.append((observation.order, latest))
    return state, changes
