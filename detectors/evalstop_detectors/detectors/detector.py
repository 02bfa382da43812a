"""The base class of all detectors, and the evidence that they return."""

from __future__ import annotations

import math
import sys
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from msgspec import Meta, Struct

from evalstop_detectors.observation import MetricRole, Observation

# The range of a parameter in a policy. The upper bounds exclude what JSON or a float cannot hold, such as infinity.
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Meta(ge=0, le=1_000_000)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class Kind(StrEnum):
    """The meaning of an evidence's number; larger numbers are more alarming.

    `statistic` is a number on its detector's own scale, `posterior` a probability.
    """

    COUNT = "count"
    FRACTION = "fraction"
    STATISTIC = "statistic"
    POSTERIOR = "posterior"

    @property
    def upper_bound(self) -> float:
        """The largest value of such evidence; infinity if it has none."""
        return 1.0 if self in (Kind.FRACTION, Kind.POSTERIOR) else math.inf


class Evidence(Struct, frozen=True):
    """A number with a meaning.

    `turn_step` is the step at which the detector believes the turn was, None while it sees none.
    `note` explains the number, or what is missing; it contains no scores, because a detector sees
    minimized metrics with their sign turned.
    `outlook` is evidence on another question, whether the run has levelled off: the share of its final range that it
    has covered, a lower bound with 90 % probability. None if the detector does not estimate it.
    """

    kind: Kind
    value: float
    turn_step: int | None = None
    note: str = ""
    outlook: Evidence | None = None

    def reaches(self, threshold: float | None) -> bool:
        """Whether the value is at least as alarming as the threshold; None is never reached."""
        return threshold is not None and self.value >= threshold


class Thresholds(Struct, frozen=True):
    """The values from which evidence is grounds to suspect and to stop; None means never."""

    suspect_at: float | None
    stop_at: float | None


class EvalRequests(Struct, frozen=True, forbid_unknown_fields=True):
    """When a detector asks for a paired evaluation: of the best checkpoint and the current one, on the same prompts."""

    at: Annotated[float, Meta(gt=0, lt=1, description="the probability of a turn from which it asks")] = 0.3
    most: Annotated[int, Meta(ge=1, le=16, description="the most requests in a run")] = 3
    multiplier: Annotated[int, Meta(ge=1, le=64, description="prompts, as a multiple of a usual eval")] = 4
    eval_share: Annotated[
        float, Meta(ge=0, le=1, description="the share of the run's time that one eval takes; 0 if unknown")
    ] = 0.0

    def are_affordable(self, progress: float | None) -> bool:
        """Whether another request costs at most a tenth of the rest of the run."""
        remaining = 1.0 - min(max(progress, 0.0), 1.0) if progress is not None and progress == progress else 1.0
        return 2 * self.multiplier * self.eval_share <= 0.1 * remaining


class EvalRequest(Struct, frozen=True):
    """A detector's request for a paired evaluation: its `number`, and its step."""

    step: int
    number: int
    multiplier: int


S = TypeVar("S")


class Detector(Struct, Generic[S], frozen=True, forbid_unknown_fields=True):
    """A pure function over one run's roles, folded one observation at a time.

    The fields are the parameters that a policy may set; their types are the schema. States are frozen structs of finite
    JSON values. `step` is only called with observations of `roles`, sorted by `order`, each once.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    state_type: ClassVar[type[Any]]
    judges_first_evals: ClassVar[bool] = False
    """Whether it may stop a run during its opening (`policy.opening`): it counts what a policy asks it to count, and
    claims no turn."""

    @property
    def roles(self) -> frozenset[MetricRole]:
        """The roles that this detector sees."""
        raise NotImplementedError

    @property
    def thresholds(self) -> Thresholds:
        """The thresholds implied by its parameters, for policies that set none."""
        raise NotImplementedError

    def state_risk(self, stop_at: float) -> float | None:
        """The largest share of healthy runs that it stops at this threshold; None: not known."""
        return None

    def start(self) -> S:
        """The state before the first observation."""
        state: S = self.state_type()
        return state

    def start_anew(self, state: S) -> S:
        """The state from which to continue when the eval's measurement changes: earlier levels become meaningless."""
        return self.start()

    def step(self, state: S, observation: Observation) -> tuple[S, Evidence]:
        """Process one observation."""
        raise NotImplementedError

    def with_requests(self, requests: EvalRequests) -> Detector[S]:
        """The detector, set to ask for paired evaluations; itself if it never asks."""
        return self

    def find_open_request(self, state: S) -> EvalRequest | None:
        """Its latest request for a paired evaluation, unless answered; most detectors never ask."""
        return None


class StateWithEvidence(Protocol):
    """A state that holds its latest evidence."""

    @property
    def evidence(self) -> Evidence: ...


E = TypeVar("E", bound=StateWithEvidence)


class EvalDetector(Detector[E], frozen=True):
    """A detector whose evidence changes only at evals and at answers to its requests, which are finite."""

    def take_eval(self, state: E, observation: Observation) -> E:
        """The state after an eval."""
        raise NotImplementedError

    def take_proxy(self, state: E, value: float) -> E:
        """The state after a value of the proxy."""
        raise NotImplementedError

    def take_kl(self, state: E, value: float) -> E:
        """The state after a value of KL."""
        raise NotImplementedError

    def take_answer(self, state: E, observation: Observation) -> E:
        """The state after a paired evaluation."""
        raise NotImplementedError

    def step(self, state: E, observation: Observation) -> tuple[E, Evidence]:
        role, value = observation.role, observation.value
        if math.isfinite(value):
            if role is MetricRole.PROXY:
                state = self.take_proxy(state, value)
            elif role is MetricRole.KL:
                state = self.take_kl(state, value)
            elif role is MetricRole.EVAL:
                state = self.take_eval(state, observation)
            else:
                state = self.take_answer(state, observation)
        return state, state.evidence
