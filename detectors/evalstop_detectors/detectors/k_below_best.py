"""k consecutive values of one role that lie below its best by more than a tolerance.

Source      The level form of EvalStop's rule (arXiv 2606.04145); similar to `patience` in early stopping (Prechelt
            1998), which counts evals without a new best, where this counts evals that are worse than the best.
Departs     Compared with the running best, not with the previous value: a slow fall with one upward step in it keeps
            counting, and a plateau within the tolerance never does.
            Non-finite values are skipped.
State       The best finite value and its step, how many consecutive values lie below it, how many were seen. O(1).
Evidence    A count: the length of the current run of values below best - tolerance. The turn is placed at the best.
Not done    The running best of noisy values is too high by about the noise times sqrt(2 ln n); the tolerance has to
            cover that. It is not estimated here.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from evalstop_detectors.detectors.detector import Amount, Count, CountOrZero, Detector, Evidence
from evalstop_detectors.detectors.k_decline import CountingRule
from evalstop_detectors.observation import MetricRole, Observation


class KBelowBestState(Struct, frozen=True):
    """See the module's docstring."""

    seen: int = 0
    best: float | None = None
    best_step: int | None = None
    below: int = 0


class KBelowBest(CountingRule, Detector[KBelowBestState], frozen=True):
    """Counts consecutive values below the best.

    `tolerance`: how far below the best a value must lie to count, in the unit of the role.
    `warmup_evals`: the first so many finite values set the best but never count.

    A run that rises for 30 evals and then falls:

    >>> detector, state = KBelowBest(), KBelowBest().start()
    >>> for step in range(80):
    ...     score = min(step, 60 - step)
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: {evidence.value:.1f}, turn at step {evidence.turn_step}")
    ...         break
    step 35: 5.0, turn at step 30
    """

    name: ClassVar[str] = "k_below_best"
    state_type: ClassVar[type[KBelowBestState]] = KBelowBestState

    k: Count = 5
    tolerance: Amount = 0.0
    warmup_evals: CountOrZero = 0
    role: MetricRole = MetricRole.EVAL

    def step(self, state: KBelowBestState, observation: Observation) -> tuple[KBelowBestState, Evidence]:
        if observation.finite:
            state = self._advance(state, observation)
        turn_step = state.best_step if state.below else None
        return state, self.describe(state.seen, state.below, turn_step, "value", f"{self.role} below its best")

    def _advance(self, state: KBelowBestState, observation: Observation) -> KBelowBestState:
        if state.best is None or observation.value > state.best:
            return KBelowBestState(state.seen + 1, observation.value, observation.step, 0)
        counts = observation.value < state.best - self.tolerance and state.seen >= self.warmup_evals
        return KBelowBestState(state.seen + 1, state.best, state.best_step, state.below + 1 if counts else 0)
