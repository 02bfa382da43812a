"""What the evals in the end say of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from evalstop_detectors import Score
from evalstop_service.rules import outcome
from evalstop_service.rules.run_results import RunAssessment
from evalstop_service.rules.statuses import DecisionOutcome, RunOutcome
from hypothesis import given
from hypothesis import strategies as st

RISE = [i / 20 for i in range(21)]


def scores(values: Sequence[float], stderr: float | None = None, stride: int = 10) -> list[Score]:
    return [Score(stride * index, value, stderr) for index, value in enumerate(values)]


def judged(values: Sequence[float], stderr: float | None = None, decided_step: int | None = None) -> RunAssessment:
    return outcome.assess_run(scores(values, stderr), decided_step)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (RISE, RunOutcome.HEALTHY),
        ([*RISE, *RISE[::-1]], RunOutcome.TURNED),
        (RISE[::-1], RunOutcome.TURNED),
        ([*RISE, 0.6, 0.3, 0.6, 1.0, 1.0, 1.0], RunOutcome.HEALTHY),
        ([*RISE, *[0.95] * 12], RunOutcome.HEALTHY),
        ([0.5] * 30, RunOutcome.HEALTHY),
    ],
    ids=["rises", "falls back", "never rose", "dips and recovers", "loses a twentieth", "never moves"],
)
def test_truth_of_clear_runs(values: list[float], found: RunOutcome) -> None:
    """The end is held against the best, whatever was between."""
    assert judged(values).run_outcome is found


def test_a_changed_measurement_is_no_fall() -> None:
    """The end is held against evals that were measured as it was; a decision against those of its own time."""
    jumped = [
        Score(10 * at, value, None, int(at >= 21)) for at, value in enumerate([*RISE, *(0.4 * up for up in RISE)])
    ]
    assert outcome.assess_run(jumped).run_outcome is RunOutcome.HEALTHY
    assert outcome.assess_run(jumped).evals == 21
    decided = outcome.assess_run(jumped, 190)
    assert (decided.run_outcome, decided.evals) == (RunOutcome.UNDECIDED, 21)


@pytest.mark.parametrize(
    ("later", "found"),
    [
        ([1.0] * 20, DecisionOutcome.RIGHT),
        (RISE[::-1], DecisionOutcome.RIGHT),
        ([1.0] * 10 + [1.3] * 10, DecisionOutcome.WRONG),
        ([1.05] * 20, DecisionOutcome.RIGHT),
        ([1.0], DecisionOutcome.UNKNOWN),
    ],
    ids=["stays", "falls", "rises again", "rises by a twentieth", "ends"],
)
def test_a_stop_of_what_had_levelled_off(later: list[float], found: DecisionOutcome) -> None:
    """It was right unless much was still to be gained."""
    seen = [*RISE, *[1.0] * 10]
    assert outcome.judge_levelled_off(scores([*seen, *later]), 10 * (len(seen) - 1)) is found


def test_a_fall_within_the_noise_is_undecided() -> None:
    """A fall of a fifth of the gain is no proof where an eval errs by as much."""
    fallen = [*RISE, *[1.0] * 10, *[0.8] * 5]
    assert judged(fallen).run_outcome is RunOutcome.TURNED
    assert judged(fallen, stderr=0.1).run_outcome is RunOutcome.UNDECIDED
    assert judged(fallen, stderr=0.5).run_outcome is RunOutcome.HEALTHY


def test_too_little_is_undecided() -> None:
    """A truth takes two windows of finite evals, and an end that is one."""
    assert "5 finite evals, and 6 are needed" in judged([0.1, 0.9, math.nan, 0.5, 0.4, 0.3]).reason
    assert judged([]).run_outcome is RunOutcome.UNDECIDED
    assert "3 of the last 3 evals are not finite" in judged([*RISE, math.nan, math.inf, -math.inf]).reason
    assert judged([math.nan, *RISE, math.nan]).run_outcome is RunOutcome.HEALTHY


def test_a_decision_is_judged_by_what_came_after_it() -> None:
    """The evals for which a run was stopped do not prove that this was right."""
    fallen = [*RISE, *RISE[::-1]]
    end = 10 * (len(fallen) - 1)
    assert "it has 2 evals after the decision, and 4 are needed" in judged(fallen, decided_step=end - 20).reason
    assert judged(fallen, decided_step=end).run_outcome is RunOutcome.UNDECIDED
    assert judged(fallen, decided_step=end - 40).run_outcome is RunOutcome.TURNED


def test_the_turn_is_at_the_best_evals() -> None:
    """The middle of the best window, and the end of a plateau."""
    found = judged([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.2, 0.1, 0.0, 0.0])
    assert outcome.locate_turn(found) == (50, 40)


@pytest.mark.parametrize(
    ("became", "decided_step", "said"),
    [
        (RunOutcome.TURNED, None, DecisionOutcome.WRONG),
        (RunOutcome.TURNED, 50, DecisionOutcome.RIGHT),
        (RunOutcome.TURNED, 49, DecisionOutcome.UNKNOWN),
        (RunOutcome.TURNED, 39, DecisionOutcome.WRONG),
        (RunOutcome.HEALTHY, None, DecisionOutcome.RIGHT),
        (RunOutcome.HEALTHY, 50, DecisionOutcome.WRONG),
        (RunOutcome.UNDECIDED, 50, DecisionOutcome.UNKNOWN),
    ],
)
def test_what_was_decided_is_held_against_the_truth(
    became: RunOutcome, decided_step: int | None, said: DecisionOutcome
) -> None:
    """A stop from the turn on is right, one before the peak or of a healthy run wrong."""
    turn = outcome.Turn(50, 40) if became is RunOutcome.TURNED else None
    assert outcome.judge_decision(became, decided_step, turn) is said


@given(st.lists(st.floats(), max_size=60), st.none() | st.floats(0, 1e300), st.none() | st.integers(0, 600))
def test_anything_is_judged(values: list[float], stderr: float | None, decided_step: int | None) -> None:
    """Whatever was measured there is a truth, and its numbers are finite."""
    found = judged(values, stderr, decided_step)
    means = [window.mean for window in (found.best, found.last) if window is not None]
    widths = [number for number in (found.gain, found.drop, found.stderr) if number is not None]
    assert all(map(math.isfinite, means + widths))


@given(
    st.lists(st.integers(-1000, 1000), min_size=6, max_size=60),
    st.integers(-8, 8),
    st.integers(-1000, 1000),
)
def test_units_do_not_matter(values: list[int], exponent: int, shift: int) -> None:
    """Scaled and shifted scores have the same truth, at the same steps."""
    there = [math.ldexp(value + shift, exponent) for value in values]
    before, after = judged([float(value) for value in values]), judged(there)
    assert (before.run_outcome, before.best and outcome.locate_turn(before)) == (
        after.run_outcome,
        after.best and outcome.locate_turn(after),
    )
