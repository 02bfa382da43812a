"""k consecutive declines of one role, each against the value before it.

Source      EvalStop (arXiv 2606.04145): stop a job after k consecutive eval-score declines.
Departs     The paper has no `min_delta`; with its default of 0 this is the published rule.
            Non-finite values are skipped: they neither make a decline nor end a run of declines.
State       The previous finite value and its step, the length of the current run of declines, and the step of the value
            before its first decline. O(1).
Evidence    A count: the length of the current run of declines. The turn is placed at the last value before it.
Not done    No allowance for noise. On a plateau the rule is scale-free: k = 3 stops 83 % of all runs of 50 flat evals,
            whatever the noise. It is here as the published baseline, and as a part of better policies.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from evalstop_detectors.detectors.detector import Amount, Count, Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.wording import format_count


class KDeclineState(Struct, frozen=True):
    """See the module's docstring."""

    previous: float | None = None
    previous_step: int | None = None
    declines: int = 0
    turn_step: int | None = None


class KDecline(Detector[KDeclineState], frozen=True):
    """Counts consecutive declines.

    `min_delta`: a fall counts if it is larger than this, in the unit of the role.

    A run that rises for 30 evals and then falls:

    >>> detector, state = KDecline(), KDecline().start()
    >>> for step in range(80):
    ...     score = min(step, 60 - step)
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: {evidence.value:.1f}, turn at step {evidence.turn_step}")
    ...         break
    step 33: 3.0, turn at step 30
    """

    name: ClassVar[str] = "k_decline"
    kind: ClassVar[Kind] = Kind.COUNT
    judges_first_evals: ClassVar[bool] = True
    state_type: ClassVar[type[KDeclineState]] = KDeclineState

    k: Count = 3
    min_delta: Amount = 0.0
    role: MetricRole = MetricRole.EVAL

    @property
    def roles(self) -> frozenset[MetricRole]:
        return frozenset({self.role})

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(suspect_at=float(self.k - 1) if self.k > 1 else None, stop_at=float(self.k))

    def step(self, state: KDeclineState, observation: Observation) -> tuple[KDeclineState, Evidence]:
        if observation.finite:
            state = self._advance(state, observation.step, observation.value)
        note = f"{format_count(state.declines, 'consecutive decline')} of {self.role}, k = {self.k}"
        return state, Evidence(Kind.COUNT, float(state.declines), state.turn_step, note)

    def _advance(self, state: KDeclineState, step: int, value: float) -> KDeclineState:
        """Compare a finite value with the one before it."""
        if state.previous is None or value >= state.previous - self.min_delta:
            return KDeclineState(value, step)
        return KDeclineState(
            value, step, state.declines + 1, state.turn_step if state.declines else state.previous_step
        )
