"""A baseline: stops a job at a fixed share of its planned steps, whatever its scores.

Source      The fixed-progress competitor in EvalStop (arXiv 2606.04145).
Departs     Nothing.
State       The largest progress seen. O(1).
Evidence    A fraction: the share of the planned steps that are done. No turn is placed, since it sees no score.
Not done    Everything else. It is a baseline for better detectors; because it sees no eval score, a policy with
            `eval_required` never stops on it.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from evalstop_detectors.detectors.detector import Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.wording import format_percent


class FixedProgressState(Struct, frozen=True):
    """See the module's docstring."""

    progress: float | None = None


class FixedProgress(Detector[FixedProgressState], frozen=True):
    """Reports progress; stops at `fraction` of the planned steps.

    A run of 100 planned steps:

    >>> detector, state = FixedProgress(), FixedProgress().start()
    >>> for step in range(100):
    ...     state, evidence = detector.step(state, Observation(MetricRole.LOSS, step, 0.0, progress=step / 100))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: {evidence.note}")
    ...         break
    step 60: 60 % of the planned steps are done
    """

    name: ClassVar[str] = "fixed_progress"
    kind: ClassVar[Kind] = Kind.FRACTION
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.PROXY, MetricRole.LOSS})
    state_type: ClassVar[type[FixedProgressState]] = FixedProgressState

    fraction: Annotated[float, Meta(gt=0, le=1)] = 0.6

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(suspect_at=None, stop_at=self.fraction)

    def step(self, state: FixedProgressState, observation: Observation) -> tuple[FixedProgressState, Evidence]:
        if observation.progress is not None and math.isfinite(observation.progress):
            state = FixedProgressState(min(max(state.progress or 0.0, observation.progress), 1.0))
        if state.progress is None:
            return state, Evidence(Kind.FRACTION, 0.0, None, "the run has no planned number of steps")
        return state, Evidence(
            Kind.FRACTION, state.progress, None, f"{format_percent(state.progress)} of the planned steps are done"
        )
