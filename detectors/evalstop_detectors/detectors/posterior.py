"""The probability that the run has turned for good, from everything that was seen of it so far.

Source      Our own. Amortised inference: a small recurrent network is trained on runs drawn from a wide prior
            (`evalstop_lab.posterior.prior`), of which it is known whether and when they turned, to say the probability
            that this one has. Trained by cross-entropy it approximates the posterior under that prior. Of a calibrated
            probability the first time that it reaches c is a right stop in at least a share c of the cases, however
            often one looks (optional stopping).
Sees        27 numbers an eval (`posterior.features`), free of unit and origin: how far below the best, for how long,
            against noise and range, falls that have healed, the proxy and KL since the best, and how much of the plan
            is left. A run without proxy, KL, standard errors or a plan is judged without.
Length      A dip that heals is short against the run. Where the planned length is not told, the probability rises
            later. A plan that is overrun counts as not told.
Evidence    A posterior, 0 to 1 in steps of 2^-14. The turn is placed at the eval of the best median of three.
State       64 whole numbers of the network and 28 of the features. O(1).
Not done    The proxy between two evals counts by its mean. KL and proxy alone change nothing before the next eval.
            Dips as wide as a third of the run look like turns to whoever only looks at a curve.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from evalstop_detectors.checkpoint.noise import LARGEST, clipped
from evalstop_detectors.detectors.detector import Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.posterior.arithmetic import ONE
from evalstop_detectors.posterior.features import FeatureState, Given, advance
from evalstop_detectors.posterior.network import HIDDEN, load_network, round_features, to_probability

SOONEST = 3  # evals before which it says nothing
SAID_FROM = 0.1  # below this the note says no numbers, and the evidence stays the same object

_NO_EVALS = Evidence(Kind.POSTERIOR, 0.0, None, "no evals yet")
_QUIET = Evidence(Kind.POSTERIOR, 0.0, None, f"less than {SAID_FROM:.0%} likely to have turned")


class Outlook(NamedTuple):
    """What the network expects of a run: the probabilities that it has turned for good and that it will in the end, and
    the 10, 50 and 90 % quantiles of what its eval score may still gain, in the unit of the (maximized) eval metric."""

    turned: float
    will_turn: float
    to_gain: tuple[float, float, float]


class PosteriorState(Struct, frozen=True):
    """See the module's docstring. `waiting_*` are sum and count of the proxies since the last eval, counted from the
    first; `kl` is the latest of them since the last eval; `best_step` is where the eval score was best."""

    features: FeatureState = FeatureState()
    hidden: tuple[int, ...] = (0,) * HIDDEN
    proxy_origin: float | None = None
    waiting: int = 0
    waiting_proxy: float = 0.0
    kl: float | None = None
    best_step: int | None = None
    evidence: Evidence = _NO_EVALS


class Posterior(Struct, frozen=True, forbid_unknown_fields=True):
    """Says how likely it is that the run has turned for good.

    `model`: the network; its name never changes its meaning.

    A run of 40 planned evals that rises for 20 and falls from then on:

    >>> detector, state = Posterior(), Posterior().start()
    >>> for step in range(40):
    ...     score = min(step, 40 - step) + 0.3 * (step % 3)
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score, progress=step / 40))
    ...     if evidence.reaches(0.9):
    ...         print(f"step {step}: turned at step {evidence.turn_step}")
    ...         break
    step 24: turned at step 21
    """

    name: ClassVar[str] = "posterior"
    state_type: ClassVar[type[PosteriorState]] = PosteriorState

    model: Literal["gru-1"] = "gru-1"

    @property
    def roles(self) -> frozenset[MetricRole]:
        return frozenset({MetricRole.EVAL, MetricRole.PROXY, MetricRole.KL})

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(suspect_at=0.5, stop_at=0.9)

    def start(self) -> PosteriorState:
        return PosteriorState()

    def step(self, state: PosteriorState, observation: Observation) -> tuple[PosteriorState, Evidence]:
        if not observation.finite:
            return state, state.evidence
        value = clipped(observation.value)
        if observation.role is MetricRole.PROXY:
            origin = value if state.proxy_origin is None else state.proxy_origin
            waiting = clipped(state.waiting_proxy + clipped(value - origin))
            state = replace(state, proxy_origin=origin, waiting=state.waiting + 1, waiting_proxy=waiting)
        elif observation.role is MetricRole.KL:
            state = replace(state, kl=value)
        else:
            state = self._with_eval(state, observation, value)
        return state, state.evidence

    def _with_eval(self, state: PosteriorState, observation: Observation, value: float) -> PosteriorState:
        features, found = advance(ONE, state.features, _given(state, observation, value))
        network = load_network(self.model)
        hidden = network.step(np.array(state.hidden, dtype=np.float64), round_features(found))
        best_step = observation.step if features.since == 0.0 else state.best_step
        return PosteriorState(
            features=features,
            hidden=tuple(map(int, hidden.tolist())),
            proxy_origin=state.proxy_origin,
            best_step=best_step,
            evidence=_weigh(features, network.read_turned(hidden), best_step, observation.progress),
        )

    def outlook(self, state: PosteriorState) -> Outlook:
        """What the network expects of a run in this state."""
        outputs = load_network(self.model).read(np.array(state.hidden, dtype=np.float64))
        turned, will_turn = (to_probability(float(logit)) for logit in outputs[:2])
        features = state.features
        unit = features.best - features.low + features.first
        low, middle, high = sorted(max(float(share), 0.0) * unit for share in outputs[2:])
        return Outlook(turned, will_turn, (low, middle, high))


def _given(state: PosteriorState, observation: Observation, value: float) -> Given:
    stderr, progress = observation.stderr, observation.progress
    has_stderr = stderr is not None and 0 < stderr < math.inf
    proxy = state.waiting_proxy / state.waiting if state.waiting else 0.0
    return Given(
        value,
        min(stderr, LARGEST) if stderr is not None and has_stderr else 0.0,
        float(has_stderr),
        proxy,
        float(state.waiting > 0),
        0.0 if state.kl is None else state.kl,
        float(state.kl is not None),
        0.0 if progress is None else progress,
        float(progress is not None),
    )


def _weigh(features: FeatureState, probability: float, best_step: int | None, progress: float | None) -> Evidence:
    evals = int(features.evals)
    if evals < SOONEST:
        return Evidence(Kind.POSTERIOR, 0.0, None, f"needs {SOONEST - evals} more evals")
    if probability < SAID_FROM:
        return _QUIET
    width = features.best - features.low
    below = (features.best - features.level) / width if width > 0 else 0.0
    plan = "known" if progress is not None and 0 < progress < 1 else "not known"
    note = (
        f"{probability:.1%} likely to have turned for good: {int(features.since)} evals since the best,"
        f" {below:.0%} of the range below it, length of the run {plan}"
    )
    turn_step = best_step if features.since else None  # a run that is at its best has not turned yet
    return Evidence(Kind.POSTERIOR, probability, turn_step, note)
