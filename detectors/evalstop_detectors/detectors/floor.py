"""The eval score lies well below where it started: a collapse without any rise, which tests of a drop from the best
cannot detect.

Source      Original, from recorded runs whose eval score fell from the first eval on.
Kernel      The mean of the first three evals minus the best of the last `k`, relative to what may be noise or a
            temporary weakness: `sigmas` standard deviations of one eval, or `share` of what the run has gained since
            its start, whichever is larger.
State       The noise of the eval score, which holds its last values, the mean of the first three evals and the best
            mean of three. O(1).
Evidence    A statistic: 1 if all of the last `k` evals lie below the start by at least that amount, 0 if one of them
            does not lie below it at all. The turn is placed at the first eval.
Not done    Runs whose eval score falls at first and then rises are stopped too, if it is low for `k` evals; where that
            is usual, require more evals (`k`), or `min_evals` in the policy.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.detector import Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.summation import add_up
from evalstop_detectors.wording import format_count

_START = 3
_LARGEST = 1e6


class FloorState(Struct, frozen=True):
    """See the module's docstring."""

    noise: NoiseState = NoiseState()
    first_step: int | None = None
    start: float = 0.0
    top: float = 0.0
    evidence: Evidence = Evidence(Kind.STATISTIC, 0.0, None, "no evals yet")


class Floor(Detector[FloorState], frozen=True):
    """Weighs how far the last evals lie below the first ones.

    `k`: how many consecutive evals must lie there. `sigmas` and `share` (of the gain so far): the least distance.

    A run that falls from its first eval on:

    >>> detector, state = Floor(), Floor().start()
    >>> for step in range(80):
    ...     score = -step
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: {evidence.value:.1f}, turn at step {evidence.turn_step}")
    ...         break
    step 5: 2.9, turn at step 0
    """

    name: ClassVar[str] = "floor"
    kind: ClassVar[Kind] = Kind.STATISTIC
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.EVAL})
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=0.5, stop_at=1.0)
    judges_first_evals: ClassVar[bool] = True
    state_type: ClassVar[type[FloorState]] = FloorState

    k: Annotated[int, Meta(ge=1, le=50)] = 3
    sigmas: Annotated[float, Meta(ge=0.01, le=100)] = 3.0
    share: Annotated[float, Meta(ge=0, le=100)] = 0.2

    def step(self, state: FloorState, observation: Observation) -> tuple[FloorState, Evidence]:
        if observation.finite:
            state = self._advance(state, observation)
        return state, state.evidence

    def _advance(self, state: FloorState, observation: Observation) -> FloorState:
        # The scale is that of before this eval: a bad eval must not excuse itself by increasing the noise.
        sd = estimate(state.noise).sd
        noise = advance(state.noise, observation.value, observation.stderr)
        last = noise.recent[-_START:]
        mean = add_up(last) / len(last)
        starting = noise.seen <= _START
        first_step = observation.step if state.first_step is None else state.first_step
        start, top = (mean, mean) if starting else (state.start, max(state.top, mean))
        allowed = max(self.sigmas * sd * math.sqrt(1 + 1 / _START), self.share * (top - start))
        missing = _START + self.k - noise.seen
        if missing > 0:
            evidence = Evidence(Kind.STATISTIC, 0.0, None, f"needs {format_count(missing, 'more eval')}")
        elif allowed == 0:
            evidence = Evidence(Kind.STATISTIC, 0.0, None, "the eval score has not moved yet")
        else:
            value = min(max((start - max(noise.recent[-self.k :])) / allowed, 0.0), _LARGEST)
            note = f"the first {_START} evals lie above the last {self.k} by {value:.2g} times the allowance"
            evidence = Evidence(Kind.STATISTIC, value, first_step if value > 0 else None, note)
        return FloorState(noise, first_step, start, top, evidence)
