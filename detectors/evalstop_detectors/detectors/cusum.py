"""Cumulative sum of how far the eval score lies below its mean, in standard deviations.

Source      Page 1954 (cumulative sums); Hinkley 1971 for the sum against a mean that is learned on the way
            (Page-Hinkley). Capped steps: Hawkins 1993.
Kernel      S = max(0, S + min(max((mean - y) / sd, -largest), largest) - allowance), from 0, with the mean of all evals
            up to the current one. Scale: see noise.py, as known before the current value; with the autocorrelation.
Departs     Page assumes a known level before the change and a known scale; both are learned here, so his run lengths do
            not hold. Steps are capped, so that one eval cannot raise an alarm and depth counts less than duration.
State       The noise (see noise.py), the mean, the sum and where it was last 0. O(1).
Evidence    A statistic, 0 or more; at most `largest_sigmas` - `allowance` a step. The turn is placed at the last
            eval at which the sum was 0.
Not done    A dip that recovers is a change of the mean, and causes the false stops. The sum falls again only as fast as
            the eval score rises above the mean. A run that rose far must fall far to lie below its mean.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.detector import EvalDetector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.wording import format_count

_SOONEST = 4


class CusumState(Struct, frozen=True):
    """See the module's docstring; `mean` is relative to the first value, `turn_step` is where the sum was 0."""

    noise: NoiseState = NoiseState()
    mean: float = 0.0
    total: float = 0.0
    turn_step: int | None = None
    evidence: Evidence = Evidence(Kind.STATISTIC, 0.0, None, "no evals yet")


class Cusum(EvalDetector[CusumState], frozen=True):
    """Adds up falls below the mean.

    `allowance`: standard deviations an eval that are attributed to noise; the classic choice is half the relevant fall.
    `largest_sigmas`: the cap on the deviation of one eval.

    A run that rises for 30 evals and falls from then on:

    >>> detector, state = Cusum(), Cusum().start()
    >>> for step in range(80):
    ...     score = min(step, 60 - step)
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: {evidence.value:.1f}, turn at step {evidence.turn_step}")
    ...         break
    step 52: 27.7, turn at step 42
    """

    name: ClassVar[str] = "cusum"
    kind: ClassVar[Kind] = Kind.STATISTIC
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.EVAL})
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=8.0, stop_at=27.0)
    state_type: ClassVar[type[CusumState]] = CusumState

    allowance: Annotated[float, Meta(ge=0, le=100)] = 0.1
    largest_sigmas: Annotated[float, Meta(gt=0, le=1e6)] = 4.0

    def take_eval(self, state: CusumState, observation: Observation) -> CusumState:
        estimated = estimate(state.noise)
        sd = estimated.sd * estimated.inflation
        noise = advance(state.noise, observation.value, observation.stderr)
        seen, value, total = state.noise.seen, noise.recent[-1], 0.0
        if seen < _SOONEST:
            note = f"needs {format_count(_SOONEST - seen, 'more eval')}"
        elif sd == 0:
            note = "the eval score has not moved yet"
        else:
            below = (state.mean - value) * (seen / (seen + 1))  # with the current value in the mean, as in Hinkley
            sigmas = min(max(below / sd, -self.largest_sigmas), self.largest_sigmas)
            total = max(0.0, state.total + sigmas - self.allowance)
            note = "the eval score lies below its mean level, less noise: sum in standard deviations"
        turn = state.turn_step if total else observation.step
        evidence = Evidence(Kind.STATISTIC, total, turn if total else None, note)
        return CusumState(noise, state.mean + (value - state.mean) / noise.seen, total, turn, evidence)
