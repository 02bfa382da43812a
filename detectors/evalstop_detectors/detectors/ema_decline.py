"""k consecutive declines of the exponential moving average of one role.

Source      EvalStop's rule (arXiv 2606.04145) on a smoothed role; the bias correction is that of Adam (Kingma & Ba
            2015), so that the first values do not pull the average to 0.
Departs     `min_delta` and `warmup_evals` are added; at 0 this is the published rule on the average.
            Non-finite values are skipped: they neither enter the average nor end a run of declines.
State       The average before its correction (relative to the first value), and k_decline's state over the corrected
            averages. O(1).
Evidence    A count: the length of the current run of declines of the average. The turn is placed before the first.
Not done    No noise scale: smoothing makes declines last longer, so that k has to grow with 1 / weight.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from evalstop_detectors.checkpoint.noise import clipped
from evalstop_detectors.detectors.detector import Amount, Count, CountOrZero, Detector, Evidence
from evalstop_detectors.detectors.k_decline import CountingRule, KDeclineState, count_decline
from evalstop_detectors.observation import MetricRole, Observation


class EmaDeclineState(Struct, frozen=True):
    """See the module's docstring."""

    origin: float = 0.0
    raw: float = 0.0
    averages: KDeclineState = KDeclineState()


class EmaDecline(CountingRule, Detector[EmaDeclineState], frozen=True):
    """Counts consecutive declines of a moving average.

    `weight`: of a new value; 1 means no smoothing. `min_delta`: a fall of the average counts if it is larger
    than this, in the unit of the role. `warmup_evals`: comparisons begin after this many finite values.

    A run that rises for 30 evals and then falls:

    >>> detector, state = EmaDecline(), EmaDecline().start()
    >>> for step in range(80):
    ...     score = min(step, 60 - step)
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: {evidence.value:.1f}, turn at step {evidence.turn_step}")
    ...         break
    step 36: 5.0, turn at step 31
    """

    name: ClassVar[str] = "ema_decline"
    state_type: ClassVar[type[EmaDeclineState]] = EmaDeclineState

    k: Count = 5
    weight: Annotated[float, Meta(gt=0, le=1)] = 0.3
    min_delta: Amount = 0.0
    warmup_evals: CountOrZero = 0
    role: MetricRole = MetricRole.EVAL

    def step(self, state: EmaDeclineState, observation: Observation) -> tuple[EmaDeclineState, Evidence]:
        if observation.finite:
            state = self._advance(state, observation)
        averages = state.averages
        of = f"the moving average of {self.role}"
        return state, self.describe(averages.seen, averages.declines, averages.turn_step, "decline", of)

    def _advance(self, state: EmaDeclineState, observation: Observation) -> EmaDeclineState:
        seen = state.averages.seen
        origin = state.origin if seen else clipped(observation.value)
        raw = state.raw + self.weight * (clipped(clipped(observation.value) - origin) - state.raw)
        # The weights of all values so far add up to this; exactly 1 once the power is negligible.
        total = 1 - (1 - self.weight) ** (seen + 1)
        average = raw / total if total > 0 else 0.0
        averages = count_decline(state.averages, observation.step, average, self.min_delta, self.warmup_evals)
        return EmaDeclineState(origin, raw, averages)
