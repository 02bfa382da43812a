"""The probability that the run has turned for good, from all of its observations so far.

Source      Original. Amortised inference: a small recurrent network is trained on runs drawn from a wide prior
            (`evalstop_lab.worlds.prior`), for which it is known whether and when they turned, to predict the
            probability that this one has. Trained by cross-entropy it approximates the posterior under that prior. For
            a calibrated probability, the first time that it reaches c is a right stop in at least a share c of the
            cases, however often one looks (optional stopping).
Sees        34 numbers an eval (`posterior.features`), free of unit and origin: how far below the best, for how long,
            relative to noise and range, falls that have healed, how much of the fall came in one eval and what KL and
            proxy did then, how quiet it has been since, and how much of the plan is left. Proxy, KL, standard errors
            and a plan are optional.
Length      A dip that heals is short relative to the run. Without a planned length, the probability rises
            later. A plan that is overrun counts as none. A plan never makes it lower than it would be
            without one, as a plan may be longer than anybody means; where it would, the plan is not used. Where the
            measurement of the eval changes, the rest of the plan is that of a run that starts there.
Paired      An evaluation of the best and the current checkpoint on the same prompts adds the result of
            `posterior.paired` to the log odds, until the run is at a new best. Answers that find a sudden fall each add
            as much again, without a limit; one that finds less than half of it shows that the eval has changed: the run
            starts anew at its level. For runs with an evaluator (`requests`), the detector asks for one: from a
            probability on, or once half of the gain was lost at once, a limited number of times, each once the last is
            answered and the run has been below its best 1.6 times as long as then, and only if that costs at most a
            tenth of what is left of the run.
Shifts      A sudden fall while the proxy was still may be caused by the grader. While an answer is awaited, such a fall
            does not call for a stop at the eval that asked and at the next one; then it does, answered or not.
Evidence    A posterior, 0 to 1 in steps of 2^-14. The turn is placed at the eval of the best median of three.
Outlook     In addition, how much of its final range the run has covered: by the network's quantiles of the gain still
            to come. A run near 1 has levelled off, whether or not it has turned.
State       64 numbers of the network and its 34 features, of 16 bits each, 36 of the features' state, and those of the
            latest answer. O(1).
Not done    The proxy between two evals counts by its mean. KL and proxy alone change nothing before the next eval.
            From the curve alone, dips as wide as a third of the run look like turns.
Short       Of a run with few evals each is a large share, so waiting for another one costs more than a false stop is
            likely to. With `most_evals` the detector judges only such runs, from half of their plan on, and a policy
            gives it a lower threshold.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from evalstop_detectors.checkpoint.noise import clipped
from evalstop_detectors.detectors.detector import (
    EvalDetector,
    EvalRequest,
    EvalRequests,
    Evidence,
    Kind,
    Thresholds,
)
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.posterior.features import FEATURES, FeatureState, Given, advance, measure_scale
from evalstop_detectors.posterior.network import (
    HIDDEN,
    Outlook,
    Whole,
    forget_plan,
    load_network,
    round_features,
    to_outlook,
)
from evalstop_detectors.posterior.paired import (
    CONFIRMATION,
    LEAST_STDERR,
    Answer,
    add_log_odds,
    describe_answer,
    describe_effect,
)
from evalstop_detectors.summation import LARGEST
from evalstop_detectors.wording import format_count, format_percent

SOONEST = 3  # evals; no evidence before
APART = 1.6  # times as long below the best as at the last request
HELD_EVALS = 2
CLIFF_SHARE, CLIFF_SIGMAS = 0.6, 4.0  # of the fall, in one eval, and in multiples of the noise: a sudden fall
DEEP_SHARE = 0.5  # of the gain: asked for a paired evaluation whatever the probability
_ABOVE, _BELOW = 3.0, 2.0  # standard errors, from half of the fall
STILL = 2.09  # asinh(4): the proxy moved by less than four times its usual move
_PROXY_CHANGE = 13  # index among the network's features
SAID_FROM = 0.1  # below this the note gives no probability

_NO_EVALS = Evidence(Kind.POSTERIOR, 0.0, None, "no evals yet")
_CLEARED = Evidence(Kind.POSTERIOR, 0.0, None, "a paired evaluation found no fall: the eval has changed")
_LATE = 0.5  # of the plan: a dip at the start of a short run has healed by then
_NOT_SHORT = Evidence(Kind.POSTERIOR, 0.0, None, "only for short runs, from half of their plan on")
_QUIET = f"less than {format_percent(SAID_FROM)} likely to have turned"


class PosteriorState(Struct, frozen=True):
    """See the module's docstring. `waiting_*` are sum and count of the proxies since the last eval, relative to the
    first; `kl` is the latest KL since the last eval; `best_step` is where the eval score was best.
    `progress` is that of the last eval, `planned_from` where the measurement began.

    `hidden` is the network's state and `seen` its features of the last eval, as little-endian 16-bit integers. `cliff`
    is the deepest fall from one eval to the next since the best, while the proxy was still. `asked` counts requests;
    the last was made at `asked_step`, after `asked_evals` evals, `asked_since` of them since the best, and is `awaited`
    until it is answered. `confirmed` counts the latest answers that found a sudden fall.
    """

    features: FeatureState = FeatureState()
    hidden: bytes = bytes(2 * HIDDEN)
    proxy_origin: float | None = None
    waiting: int = 0
    waiting_proxy: float = 0.0
    kl: float | None = None
    best_step: int | None = None
    progress: float = 0.0
    planned_from: float = 0.0
    evidence: Evidence = _NO_EVALS
    seen: bytes = bytes(2 * FEATURES)
    cliff: float = 0.0
    asked: int = 0
    asked_step: int | None = None
    asked_evals: int = 0
    asked_since: int = 0
    awaited: bool = False
    answer: Answer | None = None
    confirmed: int = 0


class Posterior(EvalDetector[PosteriorState], frozen=True):
    """Estimates the probability that the run has turned for good.

    `requests`: when it asks for paired evaluations, null: never. A policy's `evaluate_now` sets it for runs that can
    answer. `most_evals`: judge only runs planned for at most so many evals, from half of the plan on, and never ask.
    Evals before a plan is known do not count.

    A run of 40 planned evals that rises for 20 and then falls:

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
    kind: ClassVar[Kind] = Kind.POSTERIOR
    roles: ClassVar[frozenset[MetricRole]] = frozenset(
        {MetricRole.EVAL, MetricRole.PROXY, MetricRole.KL, MetricRole.PAIRED}
    )
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=0.5, stop_at=0.9)
    state_type: ClassVar[type[PosteriorState]] = PosteriorState

    requests: EvalRequests | None = None
    most_evals: Annotated[int, Meta(ge=SOONEST, le=1000)] | None = None

    def state_risk(self, stop_at: float) -> float | None:
        # Of 714 healthy runs of 10 evals it stops 3 and 9; of the 10,000 of the calibration, few so short, none.
        return {0.8: 0.005, 0.7: 0.02}.get(stop_at) if self == Posterior(most_evals=12) else None

    def start_anew(self, state: PosteriorState) -> PosteriorState:
        """Drops the levels; keeps the rest of the plan and of the requests."""
        return PosteriorState(progress=state.progress, planned_from=state.progress, asked=state.asked)

    def take_eval(self, state: PosteriorState, observation: Observation) -> PosteriorState:
        if self._is_too_long(state) or (
            self.most_evals is not None and not state.features.evals and observation.progress is None
        ):
            return state if state.evidence is _NOT_SHORT else replace(state, evidence=_NOT_SHORT)
        features, features_seen = advance(state.features, _given(state, observation, clipped(observation.value)))
        seen = round_features(features_seen)
        hidden = load_network().step(_from_bytes(state.hidden), seen)
        is_best = features.since == 0.0
        fell = state.features.last - features.last if abs(features_seen[_PROXY_CHANGE]) < STILL else 0.0
        state = replace(
            state,
            features=features,
            hidden=_to_bytes(hidden),
            waiting=0,
            waiting_proxy=0.0,
            kl=None,
            best_step=observation.step if is_best else state.best_step,
            seen=_to_bytes(seen),
            cliff=max(0.0 if is_best else state.cliff, fell),
            asked_since=0 if is_best else state.asked_since,
            awaited=state.awaited and not is_best,
            answer=None if is_best else state.answer,
            confirmed=0 if is_best else state.confirmed,
            progress=min(max(state.progress, observation.progress or 0.0), 1.0),  # NaN is never the larger one
        )
        outlook, added = self._weigh_answer(state, hidden, seen)
        if self._is_to_ask(state, outlook.turned, observation.progress):
            request = {"asked": state.asked + 1, "asked_step": observation.step, "awaited": True}
            state = replace(state, **request, asked_evals=int(features.evals), asked_since=int(features.since))
        return self._with_evidence(state, outlook, added, observation.progress)

    def take_proxy(self, state: PosteriorState, value: float) -> PosteriorState:
        if self._is_too_long(state):
            return state
        value = clipped(value)
        origin = value if state.proxy_origin is None else state.proxy_origin
        total = clipped(state.waiting_proxy + clipped(value - origin))
        return replace(state, proxy_origin=origin, waiting=state.waiting + 1, waiting_proxy=total)

    def take_kl(self, state: PosteriorState, value: float) -> PosteriorState:
        return state if self._is_too_long(state) else replace(state, kl=clipped(value))

    def take_answer(self, state: PosteriorState, observation: Observation) -> PosteriorState:
        """Process a paired evaluation. One without a standard error, or for a run that never moved, is ignored."""
        features, value, stderr = state.features, clipped(observation.value), observation.stderr
        if stderr is None or not 0 <= stderr < math.inf or features.best <= features.low:
            return replace(state, awaited=False)
        _, unit = measure_scale(features)
        answer_stderr = max(min(stderr, LARGEST), LEAST_STDERR * unit)
        answer, is_sudden, half = None, _fell_at_once(features, features.cliff), 0.5 * (features.best - features.level)
        if is_sudden and -value + _BELOW * answer_stderr < half:
            return replace(self.start_anew(state), evidence=_CLEARED)
        is_deep = _fell_at_once(features, features.cliff, DEEP_SHARE)
        is_found = is_deep and -value - _ABOVE * answer_stderr >= half
        if features.since:
            before = (state.answer.fall, 1.0) if state.answer is not None else (0.0, 0.0)
            answer = Answer(-value, answer_stderr, features.best - features.level, features.since, *before)
        confirmed = state.confirmed + 1 if is_found else 0
        state = replace(state, awaited=False, answer=answer, confirmed=confirmed)
        outlook, added = self._weigh_answer(state, _from_bytes(state.hidden), _from_bytes(state.seen))
        return self._with_evidence(state, outlook, added, observation.progress)

    def _weigh_answer(self, state: PosteriorState, hidden: Whole, seen: Whole) -> tuple[Outlook, float]:
        """The outlook, and what the latest answer adds to the log odds that the run has turned."""
        planned, unplanned = load_network().read(hidden, seen)
        added = (0.0, 0.0)
        if state.answer is not None:
            answer = round_features(describe_answer(state.features, state.answer))
            both = (seen, seen if unplanned is planned else forget_plan(seen))
            again = CONFIRMATION * max(state.confirmed - 1, 0)
            added = (add_log_odds(both[0], answer) + again, add_log_odds(both[1], answer) + again)
        return to_outlook(planned, unplanned, added), added[0]

    def _is_to_ask(self, state: PosteriorState, probability: float, progress: float | None) -> bool:
        requests, features = self.requests, state.features
        return (
            requests is not None
            and features.evals >= SOONEST
            and (probability >= requests.at or _fell_at_once(features, features.cliff, DEEP_SHARE))
            and state.asked < requests.most
            and not state.awaited
            and features.since > 0
            and features.since >= APART * state.asked_since
            and requests.are_affordable(progress)
        )

    def with_requests(self, requests: EvalRequests) -> Posterior:
        return self if self.most_evals is not None else replace(self, requests=requests)

    def find_open_request(self, state: PosteriorState) -> EvalRequest | None:
        if self.requests is None or not state.awaited or state.asked_step is None:
            return None
        return EvalRequest(state.asked_step, state.asked, self.requests.multiplier)

    def _with_evidence(
        self, state: PosteriorState, outlook: Outlook, added: float, progress: float | None
    ) -> PosteriorState:
        evidence = _weigh(state.features, outlook, state.best_step, progress)
        if self._skips(state.features.evals, progress, state.planned_from):
            evidence = _NOT_SHORT
        if evidence.value >= SAID_FROM:
            note, value = evidence.note, evidence.value
            if state.answer is not None:
                note += f"; {describe_effect(added)}"
            if self.requests is not None and self._is_held(state) and value > self.requests.at:
                value = self.requests.at
                note += f"; held at {format_percent(value)}: a sudden fall, and a paired evaluation is awaited"
            evidence = replace(evidence, value=value, note=note)
        return state if evidence == state.evidence else replace(state, evidence=evidence)

    def _is_too_long(self, state: PosteriorState) -> bool:
        """Whether no later eval can change the evidence."""
        return self.most_evals is not None and state.features.evals >= self.most_evals

    def _skips(self, evals: float, progress: float | None, planned_from: float = 0.0) -> bool:
        """Whether the run is too long to be judged, or too early in its plan; or its plan is not known."""
        if self.most_evals is None:
            return False
        done = progress if progress is not None and _LATE <= progress <= 1 else 0.0
        return evals > self.most_evals * (done - planned_from)

    def _is_held(self, state: PosteriorState) -> bool:
        """Whether the fall was sudden and the answer to a request of this or the last eval is awaited."""
        is_waiting = state.awaited and state.features.evals - state.asked_evals < HELD_EVALS
        return is_waiting and _fell_at_once(state.features, state.cliff)


def _fell_at_once(features: FeatureState, cliff: float, share: float = 0.0) -> bool:
    """Whether this fall from one eval to the next made most of the fall, which is this share of the gain or more."""
    noise, _ = measure_scale(features)
    fall, gain = features.best - features.level, features.best - features.start
    return bool(cliff >= max(CLIFF_SHARE * fall, CLIFF_SIGMAS * noise) and fall >= share * gain)


def _to_bytes(numbers: Whole) -> bytes:
    return numbers.astype("<i2").tobytes()


def _from_bytes(integers: bytes) -> Whole:
    return np.frombuffer(integers, "<i2").astype(np.float64)


def _given(state: PosteriorState, observation: Observation, value: float) -> Given:
    stderr, progress, planned_from = observation.stderr, observation.progress, state.planned_from
    if progress is not None and planned_from:
        progress = (progress - planned_from) / (1.0 - planned_from) if planned_from < 1 else 1.0
    known_stderr = min(stderr, LARGEST) if stderr is not None and 0 < stderr < math.inf else None
    proxy = state.waiting_proxy / state.waiting if state.waiting else None
    return Given(value, known_stderr, proxy, state.kl, progress)


def _weigh(features: FeatureState, outlook: Outlook, best_step: int | None, progress: float | None) -> Evidence:
    evals, probability = int(features.evals), outlook.turned
    if evals < SOONEST:
        return Evidence(Kind.POSTERIOR, 0.0, None, f"needs {format_count(SOONEST - evals, 'more eval')}")
    low, _, high = map(format_percent, outlook.to_gain)
    words = f"{low} to {high} of the range so far may still be gained (10 to 90 % quantile)"
    levelled = Evidence(Kind.FRACTION, outlook.covered, None, words)
    if probability < SAID_FROM:
        return Evidence(Kind.POSTERIOR, 0.0, None, _QUIET, levelled)
    width = features.best - features.low
    below = (features.best - features.level) / width if width > 0 else 0.0
    plan = "not known" if not progress or math.isnan(progress) else "known" if progress < 1 else "reached"
    plan = "not used" if outlook.is_doubted and plan == "known" else plan
    note = (
        f"{format_percent(probability, 1)} likely to have turned for good:"
        f" {format_count(int(features.since), 'eval')} since the best,"
        f" {format_percent(below)} of the range below it, length of the run {plan}"
    )
    turn_step = best_step if features.since else None  # a run at its best has not turned yet
    return Evidence(Kind.POSTERIOR, probability, turn_step, note, levelled)
