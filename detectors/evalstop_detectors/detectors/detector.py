"""The protocol of all detectors, and the evidence that they return."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from msgspec import Meta, Struct

from evalstop_detectors.observation import Columns, MetricRole, Observation, to_observations

# The range of a parameter in a policy. The upper bounds exclude what JSON or a float cannot hold, such as infinity.
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Meta(ge=0, le=1_000_000)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class Kind(StrEnum):
    """The meaning of an evidence's number; larger numbers are more alarming.

    `log_e_value` is the natural logarithm of an e-value, `statistic` a number on its detector's own scale, `posterior`
    a probability.
    """

    COUNT = "count"
    FRACTION = "fraction"
    LOG_E_VALUE = "log_e_value"
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


S = TypeVar("S")


class Detector(Protocol[S]):
    """A pure function over one run's roles, folded one observation at a time.

    Implementations are frozen msgspec structs whose fields are the parameters that a policy may set; their types are
    the schema. States are frozen structs of finite JSON values. `step` is only called with observations of `roles`,
    sorted by `order`, each once. A detector that is faster on several observations also has a `fold` (see `Fold`), and
    one that is faster on many runs has `trace_runs` (see `TraceRuns`).
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    state_type: ClassVar[type[Any]]

    @property
    def roles(self) -> frozenset[MetricRole]:
        """The roles that this detector sees."""

    @property
    def thresholds(self) -> Thresholds:
        """The thresholds implied by its parameters, for policies that set none."""

    def start(self) -> S:
        """The state before the first observation."""

    def step(self, state: S, observation: Observation) -> tuple[S, Evidence]:
        """Process one observation."""


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

Fold = Callable[[Any, Evidence | None, Columns], tuple[Any, Changes]]
"""Processes columns of the detector's roles: from a state and its evidence to the state after them, with the same
result as `step` on each observation."""

Trace = Iterable[tuple[tuple[int, int], Evidence]]
"""The `Changes` of a whole run from its start; each evidence is computed on demand."""

TraceRuns = Callable[[Sequence[Columns]], Sequence[Trace]]
"""The traces of many whole runs, each as columns of the detector's roles, at lower cost than one by one."""


def tells_outlook(detector: Detector[Any]) -> bool:
    """Whether the detector's evidence has an `outlook`."""
    return bool(getattr(detector, "has_outlook", False))


def start_anew(detector: Detector[S], state: S) -> S:
    """The state from which to continue when the eval's measurement changes: earlier levels become meaningless.

    This is the initial state, unless the detector has a `start_anew` that keeps more.
    """
    method: Callable[[S], S] | None = getattr(detector, "start_anew", None)
    return detector.start() if method is None else method(state)


def fold_of(detector: Detector[Any]) -> Fold | None:
    """The detector's own `fold`, if it has one."""
    method: Fold | None = getattr(detector, "fold", None)
    return method


def with_requests(detector: Detector[Any], requests: EvalRequests) -> Detector[Any]:
    """The detector, set to ask for paired evaluations; itself if it never asks."""
    method: Callable[[EvalRequests], Detector[Any]] | None = getattr(detector, "with_requests", None)
    return detector if method is None else method(requests)


def find_open_request(detector: Detector[Any], state: Any) -> EvalRequest | None:
    """The detector's latest request for a paired evaluation, unless answered; most detectors never ask."""
    method: Callable[[Any], EvalRequest | None] | None = getattr(detector, "find_open_request", None)
    return None if method is None else method(state)


def fold_steps(
    detector: Detector[S], state: S, evidence: Evidence | None, observations: Sequence[Observation]
) -> tuple[S, Changes]:
    """The reference result of every `fold`: one step after the other."""
    changes: Changes = []
    for observation in observations:
        state, latest = detector.step(state, observation)
        if latest is not evidence:
            evidence = latest
            changes.append((observation.order, latest))
    return state, changes


def trace_runs(detector: Detector[Any], runs: Sequence[Columns]) -> Sequence[Trace]:
    """The changes of the evidence over each of these runs: by the detector's own `trace_runs`, else run by run."""
    method: TraceRuns | None = getattr(detector, "trace_runs", None)
    return [trace_run(detector, columns) for columns in runs] if method is None else method(runs)


def trace_run(detector: Detector[Any], columns: Columns) -> Changes:
    """The changes of the evidence over one run."""
    fold = fold_of(detector)
    if fold is None:
        return fold_steps(detector, detector.start(), None, to_observations(columns))[1]
    return fold(detector.start(), None, columns)[1]
