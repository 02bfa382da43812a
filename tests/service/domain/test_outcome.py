"""Outcomes of runs and decisions by their last evals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from evalstop_detectors import Score
from evalstop_service.domain import outcome
from evalstop_service.domain.run import RunAssessment, Turn
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome
from hypothesis import given
from hypothesis import strategies as st

RISE = [index / 20 for index in range(21)]


def build_scores(values: Sequence[float], stderr: float | None = None, stride: int = 10) -> list[Score]:
    return [Score(stride * index, value, stderr) for index, value in enumerate(values)]


def assess(values: Sequence[float], stderr: float | None = None, decided_step: int | None = None) -> RunAssessment:
    return outcome.assess_run(build_scores(values, stderr), decided_step)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (RISE, RunOutcome.HEALTHY),
        ([*RISE, *RISE[::-1]], RunOutcome.TURNED),
        (RISE[::-1], RunOutcome.TURNED),
        ([*RISE, 0.6, 0.3, 0.6, 1.0, 1.0, 1.0], RunOutcome.HEALTHY),
        ([*[0.0] * 20, *[1.0] * 20, *[0.95] * 20], RunOutcome.HEALTHY),
        ([*[0.0] * 20, *[10.0] * 20, *[9.0] * 20], RunOutcome.UNDECIDED),
        ([9.0 + value for value in RISE[::-1]], RunOutcome.TURNED),
        ([0.5] * 30, RunOutcome.HEALTHY),
    ],
    ids=[
        "rises",
        "falls back",
        "never rose",
        "dips and recovers",
        "loses a twentieth",
        "loses a tenth",
        "never rose from a high start",
        "never moves",
    ],
)
def test_run_outcome_compares_the_end_with_the_best(values: list[float], expected: RunOutcome) -> None:
    """The outcome depends on the last evals against the best ones, whatever came in between."""
    assert assess(values).run_outcome is expected


def test_changed_eval_is_no_fall() -> None:
    """The end is compared with evals of the same version, and a decision with those of its own."""
    changed = [
        Score(10 * index, value, None, int(index >= 21))
        for index, value in enumerate([*RISE, *(0.4 * value for value in RISE)])
    ]
    assert outcome.assess_run(changed).run_outcome is RunOutcome.HEALTHY
    assert outcome.assess_run(changed).judged_from == 390, "the last three of 21 evals, not four of 42"
    decided = outcome.assess_run(changed, 190)
    assert decided.run_outcome is RunOutcome.UNDECIDED
    assert "it has 1 eval after the decision" in decided.reason


def test_fall_within_the_noise_is_undecided() -> None:
    """A fall of 20 % of the gain is not significant if an eval's error is as large."""
    rise_and_fall = [*RISE, *[1.0] * 10, *[0.8] * 5]
    assert assess(rise_and_fall).run_outcome is RunOutcome.TURNED
    assert assess(rise_and_fall, stderr=0.1).run_outcome is RunOutcome.UNDECIDED
    assert assess(rise_and_fall, stderr=0.5).run_outcome is RunOutcome.HEALTHY


def test_best_evals_end_before_the_last_ones() -> None:
    """No eval counts for the best mean and for the last."""
    assessment = assess([0.0, 0.0, 3.0, 3.0, 6.0, 6.0, 6.0, 0.0, 0.0])
    assert "75 % of its gain below its best" in assessment.reason, "from 1 to 5, and down to 2"
    assert assessment.judged_from == 60


def test_reason_holds_in_either_direction() -> None:
    """Scores are higher for lower losses, so that the reason does not say that the eval ended high."""
    assert assess(RISE).reason == "the eval ended as good as it ever was"


def test_few_evals_are_undecided() -> None:
    """An outcome needs two windows of finite evals, and finite evals at the end."""
    assert "5 finite evals, and 6 are needed" in assess([0.1, 0.9, math.nan, 0.5, 0.4, 0.3]).reason
    assert assess([]).run_outcome is RunOutcome.UNDECIDED
    assert "3 of the last 3 evals are not finite" in assess([*RISE, math.nan, math.inf, -math.inf]).reason
    assert assess([math.nan, *RISE, math.nan]).run_outcome is RunOutcome.HEALTHY
    assert assess([*[0.0] * 20, *[1.0] * 20, math.nan, math.nan]).run_outcome is RunOutcome.HEALTHY, "half of the last"


def test_decision_is_judged_by_later_evals() -> None:
    """The evals that led to a stop do not prove it right."""
    rise_and_fall = [*RISE, *RISE[::-1]]
    end = 10 * (len(rise_and_fall) - 1)
    assert "it has 2 evals after the decision, and 4 are needed" in assess(rise_and_fall, decided_step=end - 20).reason
    assert assess(rise_and_fall, decided_step=end).run_outcome is RunOutcome.UNDECIDED
    assert assess(rise_and_fall, decided_step=end - 40).run_outcome is RunOutcome.TURNED


def test_turn_is_at_the_best_evals() -> None:
    """The turn is the middle of the best window, or the end of a plateau."""
    assessment = assess([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.2, 0.1, 0.0, 0.0])
    assert assessment.turn == Turn(50, 40)


@pytest.mark.parametrize(
    ("run_outcome", "decided_step", "expected"),
    [
        (RunOutcome.TURNED, None, DecisionOutcome.WRONG),
        (RunOutcome.TURNED, 50, DecisionOutcome.RIGHT),
        (RunOutcome.TURNED, 49, DecisionOutcome.UNKNOWN),
        (RunOutcome.TURNED, 40, DecisionOutcome.UNKNOWN),
        (RunOutcome.TURNED, 39, DecisionOutcome.WRONG),
        (RunOutcome.HEALTHY, None, DecisionOutcome.RIGHT),
        (RunOutcome.HEALTHY, 50, DecisionOutcome.WRONG),
        (RunOutcome.UNDECIDED, 50, DecisionOutcome.UNKNOWN),
    ],
)
def test_decision_outcome_follows_the_run_outcome(
    run_outcome: RunOutcome, decided_step: int | None, expected: DecisionOutcome
) -> None:
    """A stop from the turn on is right; one before the peak, or of a healthy run, is wrong."""
    turn = Turn(50, 40) if run_outcome is RunOutcome.TURNED else None
    assert outcome.judge_decision(run_outcome, decided_step, turn) is expected


def test_stop_of_a_run_that_turned_somewhere_is_right() -> None:
    """A person may label a run as turned without naming the step."""
    assert outcome.judge_decision(RunOutcome.TURNED, 50, None) is DecisionOutcome.RIGHT


@given(st.lists(st.floats(), max_size=60), st.none() | st.floats(0, 1e300), st.none() | st.integers(0, 600))
def test_any_values_have_an_outcome(values: list[float], stderr: float | None, decided_step: int | None) -> None:
    """Whatever was measured there is an outcome, and its numbers are numbers."""
    assessment = assess(values, stderr, decided_step)
    assert "nan" not in assessment.reason
    assert (assessment.turn is not None) == (assessment.run_outcome is RunOutcome.TURNED)


@given(
    st.lists(st.integers(-1000, 1000), min_size=6, max_size=60),
    st.integers(-8, 8),
    st.integers(-1000, 1000),
)
def test_outcome_does_not_depend_on_the_unit(values: list[int], exponent: int, shift: int) -> None:
    """Scaled and shifted scores have the same outcome at the same steps."""
    converted = [math.ldexp(value + shift, exponent) for value in values]
    before, after = assess([float(value) for value in values]), assess(converted)
    assert (before.run_outcome, before.turn) == (after.run_outcome, after.turn)
