"""The probability that the run is past its turn for good, by a small calibrated model over other detectors' evidence.

Source      Boosted trees of one split each feature at a time (Friedman 2001), which add up to a generalized additive
            model: the log-odds are a sum of one step function a feature (Lou, Caruana & Gehrke 2012). Fitted in the lab
            by scikit-learn, `evalstop-lab train-fusion`; here it is looked up, and no training library is needed.
Members     Other detectors, run inside with the parameters below, and what their evidence is as a share of the evals
            so far, because a sum that grows with the run means less in a long one. And `healed`: the largest
            plateau_drop that a later best of gold has undone. What a member does not know yet counts as 0.
Monotone    No step function falls, but that of `healed` does not rise: more evidence never lowers the probability, and
            a run that has dipped and come back is rather believed to come back again. It holds on any dip.
Target      At an eval: the noiseless gold of a hacking run has passed its peak. Half of the runs it was fitted on hack:
            where far fewer do, the probability is too high, and thresholds are to be calibrated, as anywhere.
State       Those of the members, and two numbers. O(log n).
Evidence    A posterior, at every finite eval: gold decides. The turn is where the first member of an order of trust
            places it.
Not done    No member is weighed by what another says (no interactions): trees that do so found no more turns. Nor does
            fusion find more than plateau_drop at few false stops, see the documentation. A model belongs to its
            members as they were: when one changes, it is to be fitted again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from evalstop_detectors.detectors.cusum import Cusum, CusumState
from evalstop_detectors.detectors.detector import Detector, Evidence, Kind, Thresholds
from evalstop_detectors.detectors.e_process import EProcess, EProcessState
from evalstop_detectors.detectors.ema_decline import EmaDecline, EmaDeclineState
from evalstop_detectors.detectors.floor import Floor, FloorState
from evalstop_detectors.detectors.focus import Focus, FocusState
from evalstop_detectors.detectors.fusion_model import MODELS
from evalstop_detectors.detectors.k_decline import KDecline, KDeclineState
from evalstop_detectors.detectors.plateau_drop import PlateauDrop, PlateauDropState
from evalstop_detectors.observation import MetricRole, Observation

# In the order in which they are trusted to place the turn. Parameters are written out: a default that changes must not
# change what the model was fitted on.
MEMBERS: dict[str, Detector[Any]] = {
    "plateau_drop": PlateauDrop(sigmas=1.5, use_proxy=True),
    "gold_drop": PlateauDrop(sigmas=1.5, use_proxy=False),
    "floor": Floor(k=3, sigmas=3.0, share=0.2),
    "focus": Focus(rise_sigmas=None, candidates=32),
    "cusum": Cusum(reference="mean", window=5, allowance=0.1, largest_sigmas=4.0, scale="estimated", sd=None),
    "e_process": EProcess(alpha=0.01, tolerance=0.0),
    "ema_decline": EmaDecline(k=5, weight=0.3, min_delta=0.0, warmup_evals=0, role=MetricRole.EVAL),
    "k_decline": KDecline(k=3, min_delta=0.0, warmup_evals=0, role=MetricRole.EVAL),
}

Feature = Literal[
    "plateau_drop",
    "gold_drop",
    "floor",
    "focus",
    "cusum",
    "e_process",
    "ema_decline",
    "k_decline",
    "focus_share",
    "cusum_share",
    "e_process_share",
    "ema_decline_share",
    "healed",
]
FEATURES: tuple[Feature, ...] = get_args(Feature)

# Of these more is less alarming.
CALMING: frozenset[Feature] = frozenset({"healed"})

_SHARED = ("focus", "cusum", "e_process", "ema_decline")
_EVALS_BEFORE = 8

_FiniteNumber = Annotated[float, Meta(ge=-1e300, le=1e300)]
_Shift = Annotated[float, Meta(ge=-1e6, le=1e6)]


class StepFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """What one feature adds to the log-odds: `log_odds[i]` from above `at[i - 1]` up to and including `at[i]`."""

    feature: Feature
    at: tuple[_FiniteNumber, ...]
    log_odds: tuple[_Shift, ...]

    def __post_init__(self) -> None:
        if len(self.log_odds) != len(self.at) + 1:
            raise ValueError(f"{self.feature}: `log_odds` holds one number more than `at`")
        if any(a >= b for a, b in pairwise(self.at)):
            raise ValueError(f"{self.feature}: the numbers of `at` rise")
        sign = -1 if self.feature in CALMING else 1
        if any(sign * a > sign * b for a, b in pairwise(self.log_odds)):
            raise ValueError(f"{self.feature}: the numbers of `log_odds` {'rise' if sign < 0 else 'fall'} nowhere")

    def __call__(self, value: float) -> float:
        """Look up what this value adds."""
        return self.log_odds[bisect_left(self.at, value)]


class FusionModel(Struct, frozen=True, forbid_unknown_fields=True):
    """Log-odds without any evidence, and what each feature adds; a feature that does not occur adds nothing."""

    log_odds: _Shift
    functions: Annotated[tuple[StepFunction, ...], Meta(max_length=len(FEATURES))]

    def __post_init__(self) -> None:
        if len({item.feature for item in self.functions}) < len(self.functions):
            raise ValueError("each feature occurs once")

    def posterior(self, values: tuple[float, ...]) -> float:
        """The probability at these values of all `FEATURES`, in their order."""
        log_odds = self.log_odds
        for function in self.functions:
            log_odds += function(values[_INDEX[function.feature]])
        if log_odds < 0:
            odds = math.exp(max(log_odds, -700.0))
            return odds / (1 + odds)
        return 1 / (1 + math.exp(-min(log_odds, 700.0)))


class FusionState(Struct, frozen=True):
    """See the module's docstring. `values` holds the last evidence of each member, `largest` the largest plateau_drop
    since gold was last at a new best, `healed` the largest of those before."""

    plateau_drop: PlateauDropState = PlateauDropState()
    gold_drop: PlateauDropState = PlateauDropState()
    floor: FloorState = FloorState()
    focus: FocusState = FocusState()
    cusum: CusumState = CusumState()
    e_process: EProcessState = EProcessState()
    ema_decline: EmaDeclineState = EmaDeclineState()
    k_decline: KDeclineState = KDeclineState()
    seen: int = 0
    values: tuple[float, ...] = (0.0,) * len(MEMBERS)
    turns: tuple[int | None, ...] = (None,) * len(MEMBERS)
    largest: float = 0.0
    healed: float = 0.0
    evidence: Evidence = Evidence(Kind.POSTERIOR, 0.0, None, "no evals yet")


class Fusion(Struct, frozen=True, forbid_unknown_fields=True):
    """Weighs the evidence of other detectors together.

    `model`: one that comes with EvalStop, by its name, or one's own as `evalstop-lab train-fusion` prints it.
    """

    name: ClassVar[str] = "fusion"
    state_type: ClassVar[type[FusionState]] = FusionState

    model: FusionModel | Literal["worlds-1"] = "worlds-1"

    @property
    def roles(self) -> frozenset[MetricRole]:
        return _SIGNALS

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(suspect_at=0.983, stop_at=0.9997)

    def start(self) -> FusionState:
        return FusionState()

    def step(self, state: FusionState, observation: Observation) -> tuple[FusionState, Evidence]:
        state = with_members(state, observation)
        if observation.role is MetricRole.EVAL and observation.finite:
            model = self.model if isinstance(self.model, FusionModel) else _SHIPPED[self.model]
            state = replace(state, evidence=_evidence(state, model.posterior(features(state))))
        return state, state.evidence


def with_members(state: FusionState, observation: Observation) -> FusionState:
    """The state after every member that watches this role has seen it; the evidence stays as it was."""
    changed: dict[str, Any] = {}
    values, turns = list(state.values), list(state.turns)
    for index, (name, detector, roles) in enumerate(_WATCHING):
        if observation.role in roles:
            changed[name], evidence = detector.step(getattr(state, name), observation)
            values[index], turns[index] = evidence.value, evidence.turn_step
    changed |= {"values": tuple(values), "turns": tuple(turns)}
    if observation.role is MetricRole.EVAL and observation.finite:
        new_best = changed["plateau_drop"].top > state.plateau_drop.top
        changed["seen"] = state.seen + 1
        changed["healed"] = max(state.healed, state.largest) if new_best else state.healed
        changed["largest"] = values[0] if new_best else max(state.largest, values[0])
    return replace(state, **changed)


def features(state: FusionState) -> tuple[float, ...]:
    """What the model looks at, in the order of `FEATURES`."""
    evals = state.seen + _EVALS_BEFORE
    return (*state.values, *(state.values[index] / evals for index in _SHARED_INDEX), state.healed)


def _evidence(state: FusionState, posterior: float) -> Evidence:
    turn = next((step for step in state.turns if step is not None), None)
    alarmed = [f"{name} {value:.3g}" for name, value in zip(MEMBERS, state.values, strict=True) if value > 0]
    note = f"probability {posterior:.3f} that the run is past its turn, by {', '.join(alarmed) or 'no evidence'}"
    return Evidence(Kind.POSTERIOR, posterior, turn, note)


_WATCHING = tuple((name, detector, detector.roles) for name, detector in MEMBERS.items())
_SIGNALS = frozenset(role for _, _, roles in _WATCHING for role in roles)
_SHARED_INDEX = tuple(list(MEMBERS).index(name) for name in _SHARED)
_INDEX = {name: index for index, name in enumerate(FEATURES)}
_SHIPPED = {name: msgspec.convert(document["model"], FusionModel) for name, document in MODELS.items()}
