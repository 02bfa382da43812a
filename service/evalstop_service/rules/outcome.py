"""What turned out to be true of a run, by its gold scores in the end: it turned, it stayed healthy, or nobody can tell.

The best mean of `w` neighboring evals is held against the mean of the last `w`, where `w` is a tenth of all evals, but
three at least. More than a tenth of the gain lost, and more than three standard errors: the run has turned. Less than a
tenth, or less than one standard error: it is healthy. Whatever lies between is undecided.

What a run was stopped for proves nothing about the stop: the last `w` evals have to be from after the decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate

from evalstop_detectors import Score
from evalstop_detectors.checkpoint import noise
from msgspec import Struct

FEWEST_IN_A_WINDOW = 3
EVALS_A_WINDOW = 10
SHARE_OF_GAIN = 0.1
SIGNIFICANT = 3.0
INSIGNIFICANT = 1.0
_RISEN = 0.05
"""Of the range of the means: a run that gained less has not risen, and its fall is measured by the range."""


class RunOutcome(StrEnum):
    """What became of the gold of an attempt."""

    TURNED = "turned"
    HEALTHY = "healthy"
    UNDECIDED = "undecided"


class DecisionOutcome(StrEnum):
    """What turned out to be true of a decision: to stop a run or, where there was none, to let it go on."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"


class Window(Struct, frozen=True):
    """Neighboring evals: the steps of the first, the middle and the last of them, and their mean."""

    first_step: int
    middle_step: int
    last_step: int
    mean: float


class RunAssessment(Struct, frozen=True):
    """A truth with its reason and the numbers that it rests on.

    `evals`: how many were finite, of which `window` make a mean. `best`, `last`: the means that are compared; `gain`,
    `drop` and `stderr` (of the drop) are in the unit of the scores, higher is better. None: there were too few.
    """

    run_outcome: RunOutcome
    reason: str
    evals: int
    window: int
    best: Window | None = None
    last: Window | None = None
    gain: float | None = None
    drop: float | None = None
    stderr: float | None = None


def assess_run(scores: Sequence[Score], decided_step: int | None = None) -> RunAssessment:
    """What these scores (by ascending step, higher is better, finite or not) say of a run that has ended.

    `decided_step`: where a decision was made to stop it; then only what came later can tell whether that was right.
    """
    finite = [score for score in scores if math.isfinite(score.value)]
    count = len(finite)
    width = max(FEWEST_IN_A_WINDOW, count // EVALS_A_WINDOW)

    def undecided(reason: str) -> RunAssessment:
        return RunAssessment(RunOutcome.UNDECIDED, reason, count, width)

    if count < 2 * width:
        return undecided(f"there are {count} finite evals, and it takes {2 * width} to compare a best mean with a last")
    lost = sum(not math.isfinite(score.value) for score in scores[-width:])
    if 2 * lost > width:
        return undecided(f"{lost} of the last {width} evals are not finite")
    if decided_step is not None and finite[-width].step <= decided_step:
        later = sum(score.step > decided_step for score in finite)
        return undecided(f"{later} evals came after the decision, and it takes {width} to tell whether it was right")
    return _compared(finite, width)


def locate_turn(found: RunAssessment) -> tuple[int, int]:
    """Where a run has turned, and the first step at which its peak may have been: the middle and the first of its best
    evals."""
    assert found.best is not None, "who has turned has a peak"
    return found.best.middle_step, found.best.first_step


def judge_decision(
    run_outcome: RunOutcome, decided_step: int | None, turned: tuple[int, int] | None
) -> DecisionOutcome:
    """Whether it was right to stop a run at this step or, when it is None, never to stop it.

    `turned`: the step of the turn, and the first at which its peak may have been. A stop at the turn or after it is
    right, one before the peak wrong; of one between the two nobody can tell.
    """
    if run_outcome is RunOutcome.UNDECIDED:
        return DecisionOutcome.UNKNOWN
    if run_outcome is RunOutcome.HEALTHY:
        return DecisionOutcome.RIGHT if decided_step is None else DecisionOutcome.WRONG
    if decided_step is None:
        return DecisionOutcome.WRONG
    if turned is None or decided_step >= turned[0]:
        return DecisionOutcome.RIGHT
    return DecisionOutcome.WRONG if decided_step < turned[1] else DecisionOutcome.UNKNOWN


def read_run_outcome(said: DecisionOutcome, turn_step: int | None, *, flagged: bool) -> RunOutcome:
    """What a person's word on a decision says of the run; `flagged`: the decision was to stop it.

    A stop that was wrong though the run turned later came too early.
    """
    if said is DecisionOutcome.UNKNOWN:
        return RunOutcome.UNDECIDED
    turned = said is (DecisionOutcome.RIGHT if flagged else DecisionOutcome.WRONG) or turn_step is not None
    return RunOutcome.TURNED if turned else RunOutcome.HEALTHY


def _compared(finite: Sequence[Score], width: int) -> RunAssessment:
    values = [noise.clipped(score.value) for score in finite]
    means = _means(values, width)
    last_at = len(means) - 1
    earlier = means[: last_at - width + 1]
    highest = max(earlier)
    best_at = len(earlier) - 1 - earlier[::-1].index(highest)  # a plateau turns where it ends
    drop = highest - means[last_at]
    span = max(means) - min(means)
    gain = highest - means[0]
    unit = gain if gain > _RISEN * span else span
    stderr = _stderr(finite, width)
    truth, reason = _weighed(drop, unit, stderr)
    return RunAssessment(
        truth,
        reason,
        len(finite),
        width,
        _window(finite, best_at, width, highest),
        _window(finite, last_at, width, means[last_at]),
        gain,
        drop,
        stderr,
    )


def _weighed(drop: float, unit: float, stderr: float) -> tuple[RunOutcome, str]:
    if drop <= 0:
        return RunOutcome.HEALTHY, "gold ended as high as it ever was"
    share = drop / unit if unit > 0 else 0.0
    errors = drop / stderr if stderr > 0 else math.inf
    fall = f"gold ended {share:.0%} of its gain below its best, {errors:.1f} standard errors"
    if share > SHARE_OF_GAIN and errors > SIGNIFICANT:
        return RunOutcome.TURNED, fall
    if share < SHARE_OF_GAIN or errors < INSIGNIFICANT:
        return RunOutcome.HEALTHY, fall
    return RunOutcome.UNDECIDED, f"{fall}: too much for noise and too little to be sure"


def _means(values: Sequence[float], width: int) -> list[float]:
    """The mean of each window of so many neighbors."""
    first = values[0]
    sums = [0.0, *accumulate(value - first for value in values)]
    return [first + (after - before) / width for before, after in zip(sums, sums[width:], strict=False)]


def _stderr(finite: Sequence[Score], width: int) -> float:
    """Of the difference of two means: by the noise of the run, and at the least by what its trainer says of evals."""
    state = noise.NoiseState()
    for score in finite:
        state = noise.advance(state, score.value, score.stderr)
    found = noise.estimate(state)
    return found.sd * found.inflation * math.sqrt(2 / width)


def _window(finite: Sequence[Score], at: int, width: int, mean: float) -> Window:
    return Window(finite[at].step, finite[at + (width - 1) // 2].step, finite[at + width - 1].step, mean)
