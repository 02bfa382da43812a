"""The outcome of a run by its eval scores at the end: it turned, stayed healthy, or cannot be decided. Pure.

The best mean of `w` adjacent evals is compared with the mean of the last `w`, where `w` is a tenth of all evals, but
at least three. The run has turned if more than a tenth of the gain was lost, and more than three standard errors. It is
healthy if less than a tenth was lost, or less than one standard error. Everything between is undecided.

The evals that led to a stop cannot confirm it: the last `w` evals have to come after the decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from evalstop_detectors import Score, select_version
from evalstop_detectors.checkpoint import noise
from evalstop_detectors.wording import format_count, format_percent

from evalstop_service.domain.run import RunAssessment, Turn
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome

FEWEST_IN_A_WINDOW = 3
EVALS_A_WINDOW = 10
SHARE_OF_GAIN = 0.1
SIGNIFICANT = 3.0
INSIGNIFICANT = 1.0
_RISEN = 0.05
"""As a share of the range of the means: a run that gained less has not risen, and its drop is relative to the range."""


def assess_run(scores: Sequence[Score], decided_step: int | None = None) -> RunAssessment:
    """Assess an ended run by its eval scores: by ascending step, higher is better, finite or not.

    `decided_step`: the step of the decision to stop it; only later evals can show whether that was right. Evals that
    were measured differently from the last one, or from those at the decision, are ignored.
    """
    scores = select_version(scores, decided_step)
    finite = [score for score in scores if math.isfinite(score.value)]
    count = len(finite)
    width = max(FEWEST_IN_A_WINDOW, count // EVALS_A_WINDOW)

    def undecided(reason: str) -> RunAssessment:
        return RunAssessment(RunOutcome.UNDECIDED, reason)

    if count < 2 * width:
        return undecided(
            f"it has {format_count(count, 'finite eval')}, and {2 * width} are needed to compare two means"
        )
    lost = sum(not math.isfinite(score.value) for score in scores[-width:])
    if 2 * lost > width:
        return undecided(f"{lost} of the last {width} evals are not finite")
    if decided_step is not None and finite[-width].step <= decided_step:
        later = sum(score.step > decided_step for score in finite)
        return undecided(f"it has {format_count(later, 'eval')} after the decision, and {width} are needed to judge it")
    return _compare_means(finite, width)


def judge_decision(run_outcome: RunOutcome, decided_step: int | None, turn: Turn | None) -> DecisionOutcome:
    """Whether it was right to stop a run at this step or (None) not to stop it.

    A stop at or after the turn is right, one before the peak is wrong, one in between cannot be judged.
    """
    if run_outcome is RunOutcome.UNDECIDED:
        return DecisionOutcome.UNKNOWN
    if run_outcome is RunOutcome.HEALTHY:
        return DecisionOutcome.RIGHT if decided_step is None else DecisionOutcome.WRONG
    if decided_step is None:
        return DecisionOutcome.WRONG
    if turn is None or decided_step >= turn.step:
        return DecisionOutcome.RIGHT
    return DecisionOutcome.WRONG if decided_step < turn.low_step else DecisionOutcome.UNKNOWN


def _compare_means(finite: Sequence[Score], width: int) -> RunAssessment:
    values = [noise.clipped(score.value) for score in finite]
    means = _compute_means(values, width)
    last_at = len(means) - 1
    earlier = means[: last_at - width + 1]
    highest = max(earlier)
    best_at = len(earlier) - 1 - earlier[::-1].index(highest)  # the turn of a plateau is its end
    drop = highest - means[last_at]
    span = max(means) - min(means)
    gain = highest - means[0]
    unit = gain if gain > _RISEN * span else span
    run_outcome, reason = _assess_drop(drop, unit, _estimate_stderr(finite, width))
    turn = None
    if run_outcome is RunOutcome.TURNED:
        turn = Turn(finite[best_at + (width - 1) // 2].step, finite[best_at].step)
    return RunAssessment(run_outcome, reason, turn, finite[last_at].step)


def _assess_drop(drop: float, unit: float, stderr: float) -> tuple[RunOutcome, str]:
    if drop <= 0:
        return RunOutcome.HEALTHY, "the eval ended as good as it ever was"
    share = drop / unit
    errors = drop / stderr if stderr > 0 else math.inf
    reason = f"the eval ended {format_percent(share)} of its gain below its best, {errors:.1f} standard errors"
    if share > SHARE_OF_GAIN and errors > SIGNIFICANT:
        return RunOutcome.TURNED, reason
    if share < SHARE_OF_GAIN or errors < INSIGNIFICANT:
        return RunOutcome.HEALTHY, reason
    return RunOutcome.UNDECIDED, f"{reason}: more than noise, too little to be sure"


def _compute_means(values: Sequence[float], width: int) -> list[float]:
    """The mean of each window of `width` adjacent values."""
    first = values[0]
    sums = [0.0, *accumulate(value - first for value in values)]
    return [first + (after - before) / width for before, after in zip(sums, sums[width:], strict=False)]


def _estimate_stderr(finite: Sequence[Score], width: int) -> float:
    """The standard error of the difference of two means: from the noise of the run, and at least as reported."""
    state = noise.NoiseState()
    for score in finite:
        state = noise.add_value(state, score.value, score.stderr)
    estimate = noise.estimate(state)
    return estimate.sd * estimate.inflation * math.sqrt(2 / width)
