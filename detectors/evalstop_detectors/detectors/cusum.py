"""Cumulative sum of how far the eval score lies below its best level, in standard deviations.

Source      Page 1954 (cumulative sums); Hinkley 1971 for the sum against a mean that is learned on the way, which is
            `reference="mean"` here and Page-Hinkley elsewhere. Capped steps: Hawkins 1993.
Kernel      S = max(0, S + min(max((reference - y) / sd, -largest), largest) - allowance), from 0.
Reference   `mean`: the mean of all evals up to the current one. `best`: the best mean of `window` consecutive evals
            before the current one, less the selection bias of the maximum of that many means of pure noise. Against the
            best a fall is seen sooner, and so is a dip that recovers: at one false stop in a hundred the mean finds
            more turns, which is why it is the default.
Scale       `estimated`: see noise.py, as known before the current value; with the autocorrelation. `given`: the
            standard error of the value, else those before it, else the estimate. Or a known `sd`.
Departs     Page assumes a known level before the change and a known scale; both are learned here, so his run lengths do
            not hold. Steps are capped, so that one eval cannot raise an alarm and depth counts less than duration.
State       The noise (see noise.py), the best mean, the sum and where it was last 0. O(1).
Evidence    A statistic, 0 or more; at most `largest_sigmas` - `allowance` a step. The turn is placed at the last
            eval at which the sum was 0.
Not done    A dip that recovers is a change of the mean, and causes the false stops. The sum falls again only as fast as
            the eval score rises above the reference. A run that rose far must fall far to lie below its mean.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.detector import Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.summation import LARGEST, add_up
from evalstop_detectors.wording import format_count

_SOONEST = 4


class CusumState(Struct, frozen=True):
    """See the module's docstring; `reference` is relative to the first value, `turn_step` is where the sum was 0."""

    noise: NoiseState = NoiseState()
    reference: float = 0.0
    total: float = 0.0
    turn_step: int | None = None
    evidence: Evidence = Evidence(Kind.STATISTIC, 0.0, None, "no evals yet")


class Cusum(Detector[CusumState], frozen=True):
    """Adds up falls below a reference.

    `allowance`: standard deviations an eval that are attributed to noise; the classic choice is half the relevant fall.
    `largest_sigmas`: the cap on the deviation of one eval. `sd`: the known noise of one eval, in the unit of the score.

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
    state_type: ClassVar[type[CusumState]] = CusumState

    reference: Literal["best", "mean"] = "mean"
    window: Annotated[int, Meta(ge=1, le=64)] = 5
    allowance: Annotated[float, Meta(ge=0, le=100)] = 0.1
    largest_sigmas: Annotated[float, Meta(gt=0, le=1e6)] = 4.0
    scale: Literal["estimated", "given"] = "estimated"
    sd: Annotated[float, Meta(gt=0, le=LARGEST)] | None = None

    @property
    def thresholds(self) -> Thresholds:
        if self.reference == "best":
            return Thresholds(suspect_at=35.0, stop_at=150.0)
        return Thresholds(suspect_at=8.0, stop_at=27.0)

    def step(self, state: CusumState, observation: Observation) -> tuple[CusumState, Evidence]:
        if observation.finite:
            state = self._advance(state, observation)
        return state, state.evidence

    def _advance(self, state: CusumState, observation: Observation) -> CusumState:
        sd, inflation = self._scale(state.noise, observation.stderr)
        noise = advance(state.noise, observation.value, observation.stderr)
        seen, value = state.noise.seen, noise.recent[-1]
        soonest = max(_SOONEST, self.window) if self.reference == "best" else _SOONEST
        total, missing = 0.0, ""
        if seen < soonest:
            missing = f"needs {format_count(soonest - seen, 'more eval')}"
        elif sd == 0:
            missing = "the eval score has not moved yet"
        else:
            if self.reference == "best":
                lucky = sd * inflation * math.sqrt(2 * math.log(seen / self.window) / self.window)
                below = state.reference - lucky - value
            else:  # with the current value in the mean, as in Hinkley
                below = (state.reference - value) * (seen / (seen + 1))
            sigmas = min(max(below / (sd * inflation), -self.largest_sigmas), self.largest_sigmas)
            total = max(0.0, state.total + sigmas - self.allowance)
        turn = state.turn_step if total else observation.step
        note = (
            missing or f"the eval score lies below its {self.reference} level, less noise: sum in standard deviations"
        )
        return CusumState(
            noise=noise,
            reference=self._reference(state, noise),
            total=total,
            turn_step=turn,
            evidence=Evidence(Kind.STATISTIC, total, turn if total else None, note),
        )

    def _scale(self, noise: NoiseState, stderr: float | None) -> tuple[float, float]:
        """The standard deviation of the next value, and the inflation of a sum of many."""
        if self.sd is not None:
            return self.sd, 1.0
        if self.scale == "given":
            # A standard error whose square underflows to 0 is ignored, as in noise.py.
            if stderr is not None and stderr > 0 and 0 < stderr * stderr < math.inf:
                return stderr, 1.0
            if noise.mean_square > 0:
                return math.sqrt(noise.mean_square), 1.0
        estimated = estimate(noise)
        return estimated.sd, estimated.inflation

    def _reference(self, state: CusumState, noise: NoiseState) -> float:
        """The reference level for the following evals."""
        if self.reference == "mean":
            return state.reference + (noise.recent[-1] - state.reference) / noise.seen
        if noise.seen < self.window:
            return 0.0
        mean = add_up(noise.recent[-self.window :]) / self.window
        return mean if noise.seen == self.window else max(state.reference, mean)
