"""Consecutive values of one role that are NaN or infinite.

Source      None needed: a non-finite number is a fact, not a statistic. Every trainer's guard against it has this
            form (for example `TerminateOnNaN` in Keras).
Departs     Nothing.
State       The number of non-finite values at the end of the role, and the step of the last finite one. O(1).
Evidence    A count: the length of the current run of non-finite values. The turn is placed at the last finite value.
Not done    It does not stop by itself: `stop_at` is None unless the policy sets it. A NaN may come from the eval
            harness as well as from the model.
"""

from __future__ import annotations

import math
from typing import ClassVar

from msgspec import Struct

from evalstop_detectors.detectors.detector import Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.wording import format_count


class NonFiniteState(Struct, frozen=True):
    """See the module's docstring."""

    run_length: int = 0
    last_finite_step: int | None = None


class NonFinite(Detector[NonFiniteState], frozen=True):
    """Counts consecutive NaN and infinite values.

    Two NaN in a row:

    >>> detector, state = NonFinite(), NonFinite().start()
    >>> for step, score in enumerate([0.1, 0.2, math.nan, math.nan]):
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score))
    >>> evidence.value, evidence.turn_step
    (2.0, 1)
    """

    name: ClassVar[str] = "non_finite"
    kind: ClassVar[Kind] = Kind.COUNT
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=1.0, stop_at=None)
    judges_first_evals: ClassVar[bool] = True
    state_type: ClassVar[type[NonFiniteState]] = NonFiniteState

    role: MetricRole = MetricRole.EVAL

    @property
    def roles(self) -> frozenset[MetricRole]:
        return frozenset({self.role})

    def step(self, state: NonFiniteState, observation: Observation) -> tuple[NonFiniteState, Evidence]:
        if math.isfinite(observation.value):
            return NonFiniteState(0, observation.step), _QUIET[self.role]
        state = NonFiniteState(state.run_length + 1, state.last_finite_step)
        return state, _evidence(self.role, state)


def _evidence(role: MetricRole, state: NonFiniteState) -> Evidence:
    turn_step = state.last_finite_step if state.run_length else None
    note = f"NaN or infinite: {format_count(state.run_length, 'consecutive value')} of {role}"
    return Evidence(Kind.COUNT, float(state.run_length), turn_step, note)


# The result for nearly every observation is created once.
_QUIET = {role: _evidence(role, NonFiniteState()) for role in MetricRole}
