"""A baseline: the training loss has stopped improving.

Source      The loss-plateau competitor in EvalStop (arXiv 2606.04145); the form is that of `ReduceLROnPlateau`.
Departs     Nothing.
State       The best loss so far (sign turned: higher is better), its step, and the number of values since. O(1).
Evidence    A count: values since the loss last improved by more than `min_delta`. The turn is placed at that value.
Not done    The loss falls throughout reward hacking, so this misses most of it. It is not an eval score, so it stops
            nothing under a policy with `eval_required`. Non-finite values are skipped.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from evalstop_detectors.detectors.detector import Amount, Count, Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.wording import format_count


class LossPlateauState(Struct, frozen=True):
    """See the module's docstring."""

    best: float | None = None
    best_step: int | None = None
    since: int = 0


class LossPlateau(Detector[LossPlateauState], frozen=True):
    """Counts values of the loss since it last improved by more than `min_delta` (in its unit).

    A loss (with its sign turned) that falls for 20 steps and then stays:

    >>> detector, state = LossPlateau(), LossPlateau().start()
    >>> for step in range(80):
    ...     state, evidence = detector.step(state, Observation(MetricRole.LOSS, step, min(step, 20)))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: {evidence.value:.0f}, turn at step {evidence.turn_step}")
    ...         break
    step 30: 10, turn at step 20
    """

    name: ClassVar[str] = "loss_plateau"
    kind: ClassVar[Kind] = Kind.COUNT
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.LOSS})
    state_type: ClassVar[type[LossPlateauState]] = LossPlateauState

    patience: Count = 10
    min_delta: Amount = 0.0

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(suspect_at=None, stop_at=float(self.patience))

    def step(self, state: LossPlateauState, observation: Observation) -> tuple[LossPlateauState, Evidence]:
        if observation.finite:
            if state.best is None or observation.value > state.best + self.min_delta:
                state = LossPlateauState(observation.value, observation.step, 0)
            else:
                state = LossPlateauState(state.best, state.best_step, state.since + 1)
        turn_step = state.best_step if state.since else None
        note = f"{format_count(state.since, 'value')} since the loss last improved, patience {self.patience}"
        return state, Evidence(Kind.COUNT, float(state.since), turn_step, note)
