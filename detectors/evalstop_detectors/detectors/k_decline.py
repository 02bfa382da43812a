"""k consecutive declines of one role, each against the value before it.

Source      EvalStop (arXiv 2606.04145): stop a job after k consecutive eval-score declines.
Departs     The paper has no `min_delta` and no warm-up; with their defaults of 0 this is the published rule.
            Non-finite values are skipped: they neither make a decline nor end a run of declines.
State       The previous finite value and its step, the length of the current run of declines, the step of the value
            before its first decline, and how many finite values were seen. O(1).
Evidence    A count: the length of the current run of declines. The turn is placed at the last value before it.
Not done    No allowance for noise. On a plateau the rule is scale-free: k = 3 stops 83 % of all runs of 50 flat evals,
            whatever the noise. It is here as the published baseline, and as a part of better policies.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from evalstop_detectors.detectors.detector import Amount, Count, CountOrZero, Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.wording import format_count


class CountingRule:
    """A rule on `role` that stops at a count of `k` and suspects one before it; `warmup_evals` are not counted."""

    __slots__ = ()

    kind: ClassVar[Kind] = Kind.COUNT
    judges_first_evals: ClassVar[bool] = True

    k: int
    warmup_evals: int
    role: MetricRole

    @property
    def roles(self) -> frozenset[MetricRole]:
        return frozenset({self.role})

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(suspect_at=float(self.k - 1) if self.k > 1 else None, stop_at=float(self.k))

    def describe(self, seen: int, count: int, turn_step: int | None, noun: str, of: str) -> Evidence:
        """The evidence of `count` consecutive `noun`s `of` something, after `seen` finite values."""
        note = f"{format_count(count, f'consecutive {noun}')} of {of}, k = {self.k}"
        if seen < self.warmup_evals:
            note = f"warming up: {seen} of {format_count(self.warmup_evals, 'value')} of {self.role} seen"
        return Evidence(Kind.COUNT, float(count), turn_step, note)


class KDeclineState(Struct, frozen=True):
    """See the module's docstring."""

    seen: int = 0
    previous: float | None = None
    previous_step: int | None = None
    declines: int = 0
    turn_step: int | None = None


class KDecline(CountingRule, Detector[KDeclineState], frozen=True):
    """Counts consecutive declines.

    `min_delta`: a fall counts if it is larger than this, in the unit of the role.
    `warmup_evals`: comparisons begin with the value after this many finite ones.

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
    state_type: ClassVar[type[KDeclineState]] = KDeclineState

    k: Count = 3
    min_delta: Amount = 0.0
    warmup_evals: CountOrZero = 0
    role: MetricRole = MetricRole.EVAL

    def step(self, state: KDeclineState, observation: Observation) -> tuple[KDeclineState, Evidence]:
        if observation.finite:
            state = self._advance(state, observation.step, observation.value)
        return state, self.describe(state.seen, state.declines, state.turn_step, "decline", self.role)

    def _advance(self, state: KDeclineState, step: int, value: float) -> KDeclineState:
        """Compare a finite value with the one before it."""
        warm = state.previous is not None and state.seen >= self.warmup_evals
        declined = warm and state.previous is not None and value < state.previous - self.min_delta
        return KDeclineState(
            seen=state.seen + 1,
            previous=value,
            previous_step=step,
            declines=state.declines + 1 if declined else 0,
            turn_step=(state.turn_step if state.declines else state.previous_step) if declined else None,
        )
