"""The base class of all detectors, and the evidence that they return."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from msgspec import Meta, Struct

from evalstop_detectors.observation import NO_VALUES, RANK, Columns, MetricRole, Observation, to_observations

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


Changes = list[tuple[tuple[int, int], Evidence]]
"""The `order` of each observation at which the evidence became a new object, and that object."""


S = TypeVar("S")


class Detector(Struct, Generic[S], frozen=True, forbid_unknown_fields=True):
    """A pure function over one run's roles, folded one observation at a time.

    The fields are the parameters that a policy may set; their types are the schema. States are frozen structs of finite
    JSON values. `step` is only called with observations of `roles`, sorted by `order`, each once. A detector that is
    faster on several observations overrides `fold`.
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

    def fold(self, state: S, evidence: Evidence | None, columns: Columns) -> tuple[S, Changes]:
        """Process columns of its roles from a state and its evidence, with the same result as one `step` after the
        other."""
        return self.fold_steps(state, evidence, to_observations(columns))

    def fold_steps(self, state: S, evidence: Evidence | None, observations: Sequence[Observation]) -> tuple[S, Changes]:
        """The reference result of every `fold`."""
        changes: Changes = []
        for observation in observations:
            state, latest = self.step(state, observation)
            if latest is not evidence:
                evidence = latest
                changes.append((observation.order, latest))
        return state, changes

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

    def take_values(self, state: E, proxies: Sequence[float], kls: Sequence[float]) -> E:
        """The state after these values of proxy and KL, finite or not, that came since the last eval."""
        raise NotImplementedError

    def take_answer(self, state: E, observation: Observation) -> E:
        """The state after a paired evaluation."""
        raise NotImplementedError

    def step(self, state: E, observation: Observation) -> tuple[E, Evidence]:
        if observation.finite:
            match observation.role:
                case MetricRole.EVAL:
                    state = self.take_eval(state, observation)
                case MetricRole.PROXY:
                    state = self.take_values(state, (observation.value,), ())
                case MetricRole.KL:
                    state = self.take_values(state, (), (observation.value,))
                case _:
                    state = self.take_answer(state, observation)
        return state, state.evidence

    def fold(self, state: E, evidence: Evidence | None, columns: Columns) -> tuple[E, Changes]:
        if not columns or MetricRole.PAIRED in columns:
            return self.fold_steps(state, evidence, to_observations(columns))
        changes: Changes = []
        first, rank = min((column.steps[0], RANK[role]) for role, column in columns.items()), RANK[MetricRole.EVAL]
        if state.evidence is not evidence and first[1] != rank:
            evidence = state.evidence
            changes.append((first, state.evidence))
        proxies, kls = columns.get(MetricRole.PROXY, NO_VALUES), columns.get(MetricRole.KL, NO_VALUES)
        proxy = kl = 0
        for item in to_observations({role: column for role, column in columns.items() if role is MetricRole.EVAL}):
            proxies_end, kls_end = bisect_right(proxies.steps, item.step, proxy), bisect_right(kls.steps, item.step, kl)
            if proxies_end > proxy or kls_end > kl:
                state = self.take_values(state, proxies.values[proxy:proxies_end], kls.values[kl:kls_end])
                proxy, kl = proxies_end, kls_end
            state, latest = self.step(state, item)
            if latest is not evidence:
                evidence = latest
                changes.append(((item.step, rank), latest))
        if len(proxies.steps) > proxy or len(kls.steps) > kl:
            state = self.take_values(state, proxies.values[proxy:], kls.values[kl:])
        return state, changes
