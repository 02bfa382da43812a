"""k consecutive declines of one role, each against the value before it.

Source      EvalStop (arXiv 2606.04145): stop a job after k consecutive eval-score declines.
Departs     The paper has no `min_delta` and no warm-up; with their defaults of 0 this is the published rule.
            Non-finite values are passed over: they neither make a decline nor end a run of declines.
State       The previous finite value and its step, the length of the present run of declines, the step of the value
            before its first decline, and how many finite values were seen. O(1).
Evidence    A count: the length of the present run of declines. The turn is placed at the last value before it.
Not done    No allowance for noise. On a plateau the rule is scale-free: k = 3 stops .83 of all runs of 50 flat evals,
            whatever the noise. It is here because it is the published baseline, and as a part of better policies.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from evalstop_detectors.detectors.detector import Amount, Count, CountOrZero, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation


class KDeclineState(Struct, frozen=True):
    """See the module's docstring."""

    seen: int = 0
    previous: float | None = None
    previous_step: int | None = None
    declines: int = 0
    turn_step: int | None = None


class KDecline(Struct, frozen=True, forbid_unknown_fields=True):
    """Counts consecutive declines.

    `min_delta`: a fall counts if it is larger than this, in the unit of the role.
    `warmup_evals`: comparisons begin with the value after this many finite ones.

    A run that rises for 30 evals and falls from then on:

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
    state_type: ClassVar[type[KDeclineState]] = KDeclineState

    k: Count = 3
    min_delta: Amount = 0.0
    warmup_evals: CountOrZero = 0
    role: MetricRole = MetricRole.EVAL

    @property
    def roles(self) -> frozenset[MetricRole]:
        return frozenset({self.role})

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(suspect_at=float(self.k - 1) if self.k > 1 else None, stop_at=float(self.k))

    def start(self) -> KDeclineState:
        return KDeclineState()

    def step(self, state: KDeclineState, observation: Observation) -> tuple[KDeclineState, Evidence]:
        if observation.finite:
            state = self._advance(state, observation)
        return state, Evidence(Kind.COUNT, float(state.declines), state.turn_step, self._note(state))

    def _advance(self, state: KDeclineState, observation: Observation) -> KDeclineState:
        warm = state.previous is not None and state.seen >= self.warmup_evals
        declined = warm and state.previous is not None and observation.value < state.previous - self.min_delta
        return KDeclineState(
            seen=state.seen + 1,
            previous=observation.value,
            previous_step=observation.step,
            declines=state.declines + 1 if declined else 0,
            turn_step=(state.turn_step if state.declines else state.previous_step) if declined else None,
        )

    def _note(self, state: KDeclineState) -> str:
        if state.seen < self.warmup_evals:
            return f"warming up: {state.seen} of {self.warmup_evals} values of {self.role} seen"
        return f"{state.declines} consecutive declines of {self.role}, k = {self.k}"
