"""The probability that the eval score's level has changed and now lies below the best level before.

Source      Adams & MacKay 2007 (Bayesian online changepoint detection): a distribution over how many evals the current
            level has lasted, with a Normal-Gamma prior of each level's mean and precision, so that predictions are
            Student's t. Constant hazard 1 / `level_evals`.
Evidence    A posterior: over the run lengths, the sum of their probability times that of the level being more than
            `margin_sigmas` below the best level before it. A level of fewer than `least_evals` evals has no evidence
            of its own; the evidence at its start stands. The turn is placed at the last eval before the change that
            carries most of it.
Best level  Adams & MacKay forget the levels before the last. Here each run length carries the best level before it: at
            its start the mean, over the run lengths of that moment, of the best level of each.
Units       The first 8 evals set zero and unit (their mean, and the noise by noise.py) for the whole run; the prior
            of a level's mean is `spread_sigmas` wide around that zero, that of the variance is worth 2 evals. Values
            are clipped at 1e6 units.
Departs     At most `run_lengths` are kept, the most probable ones, and none below 1e-9. The t distribution's tail is
            the approximation of Peizer & Pratt 1968, accurate to 2e-3. The last parameters are not in the paper.
State       The noise until the unit is known, then eight numbers for each run length. O(run_lengths).
Not done    A level is flat: on a slope the levels follow each other, and each new one is a change. Noise is assumed
            independent between evals; autocorrelation looks like changes. The detector reports that the level has
            fallen, not that it stays down.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from evalstop_detectors.checkpoint.noise import NoiseState, advance, clipped, estimate
from evalstop_detectors.detectors.detector import Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.summation import add_up
from evalstop_detectors.wording import format_count

_FIRST = 8
_LARGEST = 1e6
_LEAST_PROBABILITY = 1e-9
_ALPHA = 1.0


class RunLength(Struct, frozen=True, array_like=True):
    """The hypothesis that the current level has lasted for `evals`: its mean, `beta` (the Gamma's rate), the best level
    before it and the step of the last eval before it, both None for the first level of the run. `lower`: the evidence
    at its start, which stands until the level is long enough."""

    evals: int
    probability: float
    mean: float
    beta: float
    best: float | None = None
    turn_step: int | None = None
    lower: float = 0.0
    lower_turn: int | None = None


class BocpdState(Struct, frozen=True):
    """See the module's docstring; `first` holds the steps of the first evals, `unit` is 0 while it is not known."""

    noise: NoiseState = NoiseState()
    first: tuple[int, ...] = ()
    origin: float = 0.0
    zero: float = 0.0
    unit: float = 0.0
    run_lengths: tuple[RunLength, ...] = ()
    evidence: Evidence = Evidence(Kind.POSTERIOR, 0.0, None, "no evals yet")


class Bocpd(Detector[BocpdState], frozen=True):
    """Weighs how long the current level has lasted, and whether it is lower than the best before.

    `level_evals`: how long a level lasts before it changes, on average. `least_evals`: how many evals a level needs to
    count. `margin_sigmas`, `spread_sigmas`: standard deviations of one eval. `run_lengths`: how many are kept.

    A level of 10, up to noise of 1, that falls to 0 after 30 evals:

    >>> detector, state = Bocpd(), Bocpd().start()
    >>> for step in range(80):
    ...     score = (10 if step < 30 else 0) + step % 2
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: {evidence.value:.4f}, turn at step {evidence.turn_step}")
    ...         break
    step 33: 0.9995, turn at step 29
    """

    name: ClassVar[str] = "bocpd"
    kind: ClassVar[Kind] = Kind.POSTERIOR
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.EVAL})
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=0.5, stop_at=0.999)
    state_type: ClassVar[type[BocpdState]] = BocpdState

    level_evals: Annotated[float, Meta(gt=1, le=1e6)] = 100.0
    least_evals: Annotated[int, Meta(ge=1, le=1000)] = 3
    margin_sigmas: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    spread_sigmas: Annotated[float, Meta(gt=0, le=1e6)] = 10.0
    run_lengths: Annotated[int, Meta(ge=4, le=1000)] = 32

    def step(self, state: BocpdState, observation: Observation) -> tuple[BocpdState, Evidence]:
        if observation.finite:
            state = self._advance(state, observation) if state.unit else self._begin(state, observation)
        return state, state.evidence

    def _begin(self, state: BocpdState, observation: Observation) -> BocpdState:
        """Estimate the unit; once it is known, add the evals so far."""
        noise = advance(state.noise, observation.value, observation.stderr)
        first = (*state.first, observation.step)[-_FIRST:]
        unit = estimate(noise).sd if noise.seen >= _FIRST else 0.0
        if unit == 0:
            missing = format_count(_FIRST - noise.seen, "more eval")
            note = f"needs {missing}" if noise.seen < _FIRST else "the eval score has not moved yet"
            return BocpdState(noise, first, evidence=Evidence(Kind.POSTERIOR, 0.0, None, note))
        values = noise.recent[-_FIRST:]
        zero = add_up(values) / _FIRST
        state = BocpdState(NoiseState(), (), noise.origin, zero, unit, (RunLength(0, 1.0, 0.0, _ALPHA),))
        for value, step in zip(values, first, strict=True):
            state = self._folded(state, _in_units(value, zero, unit), step)
        return state

    def _advance(self, state: BocpdState, observation: Observation) -> BocpdState:
        value = clipped(clipped(observation.value) - state.origin)
        return self._folded(state, _in_units(value, state.zero, state.unit), observation.step)

    def _folded(self, state: BocpdState, value: float, step: int) -> BocpdState:
        """The distribution after one more value: every level continues, or a new one starts after this value."""
        kappa, hazard = 1 / self.spread_sigmas**2, 1 / self.level_evals
        fits = [_log_predictive(item, kappa, value) for item in state.run_lengths]
        top = max(fits)
        joint = [item.probability * math.exp(fit - top) for item, fit in zip(state.run_lengths, fits, strict=True)]
        places = self._kept(joint)
        total = add_up([joint[index] for index in places])
        lower, most, turn, length, best = 0.0, 0.0, None, 0, 0.0
        grown = []
        for index in places:
            share = joint[index] / total
            item = _longer(state.run_lengths[index], kappa, value, share * (1 - hazard))
            is_long_enough = item.evals >= self.least_evals
            best += share * _best(item, is_long_enough)
            below = item.lower
            if is_long_enough:
                below = 0.0 if item.best is None else _below(item, kappa, item.best - self.margin_sigmas)
            lower += share * below
            if share * below > most:
                most, length = share * below, item.evals
                turn = item.turn_step if is_long_enough else item.lower_turn
            grown.append(item)
        grown.append(RunLength(0, hazard, 0.0, _ALPHA, best, step, lower, turn))
        if turn is None:
            evidence = Evidence(Kind.POSTERIOR, 0.0, None, "no change of the eval score's level is likely")
        else:
            ago = format_count(length, "eval")
            note = f"probability that the eval score's level has fallen below its best, most likely {ago} ago"
            evidence = Evidence(Kind.POSTERIOR, min(lower, 1.0), turn, note)
        return BocpdState(state.noise, state.first, state.origin, state.zero, state.unit, tuple(grown), evidence)

    def _kept(self, joint: list[float]) -> list[int]:
        """The indices of the most probable ones, in order, with room for a new one; of equals the older ones stay."""
        least = _LEAST_PROBABILITY * max(joint)
        places = [index for index, mass in enumerate(joint) if mass >= least]
        if len(places) < self.run_lengths:
            return places
        return sorted(sorted(places, key=lambda index: -joint[index])[: self.run_lengths - 1])


def _best(item: RunLength, is_long_enough: bool) -> float:
    """The best level so far under this run length."""
    if item.best is None:
        return item.mean
    return max(item.best, item.mean) if is_long_enough else item.best


def _in_units(value: float, zero: float, unit: float) -> float:
    return min(max((value - zero) / unit, -_LARGEST), _LARGEST)


def _longer(item: RunLength, kappa: float, value: float, probability: float) -> RunLength:
    """The Normal-Gamma posterior with one more value; kappa and alpha follow from the number of evals."""
    weight = kappa + item.evals
    deviation = value - item.mean
    return RunLength(
        item.evals + 1,
        probability,
        item.mean + deviation / (weight + 1),
        item.beta + weight * deviation * deviation / (2 * (weight + 1)),
        item.best,
        item.turn_step,
        item.lower,
        item.lower_turn,
    )


def _log_predictive(item: RunLength, kappa: float, value: float) -> float:
    """The log density of the next value under Student's t, up to a constant."""
    weight, alpha = kappa + item.evals, _ALPHA + item.evals / 2
    spread = 2 * item.beta * (weight + 1) / weight
    deviation = value - item.mean
    gammas = _GAMMAS[item.evals] if item.evals < len(_GAMMAS) else _log_gammas(item.evals)
    return gammas - 0.5 * math.log(spread) - (alpha + 0.5) * math.log1p(deviation * deviation / spread)


def _log_gammas(evals: int) -> float:
    alpha = _ALPHA + evals / 2
    return math.lgamma(alpha + 0.5) - math.lgamma(alpha)


_GAMMAS = tuple(_log_gammas(evals) for evals in range(1024))


def _below(item: RunLength, kappa: float, level: float) -> float:
    """The probability that the mean of this run length lies below the level."""
    weight, alpha = kappa + item.evals, _ALPHA + item.evals / 2
    t = (level - item.mean) * math.sqrt(weight * alpha / item.beta)
    freedom = 2 * alpha
    root = math.sqrt(math.log1p(t * t / freedom) / (freedom - 5 / 6))
    z = math.copysign((freedom - 2 / 3 + 0.1 / freedom) * root, t)
    return 0.5 * math.erfc(-z / math.sqrt(2))
