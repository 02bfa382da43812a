"""Several evals combined into one score: its definition, missing evals, units and order."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from evalstop_detectors import CombinedState, EvalValue, OutOfOrder, Score, combine_values, start_combining
from hypothesis import given
from hypothesis import strategies as st

weight_lists = st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=2, max_size=3)
eval_values = st.one_of(
    st.none(), st.integers(-4, 4).map(float), st.sampled_from([math.nan, math.inf, -1e308, 1e308, 5e-324])
)
tables = weight_lists.flatmap(
    lambda weights: st.tuples(st.just(weights), st.lists(st.tuples(*[eval_values] * len(weights)), max_size=25))
)

Row = tuple[float | None, ...]


def to_values(rows: list[Row], stderr: float | None = None, changed_at: int | None = None) -> list[EvalValue]:
    """One EvalValue for each value of a row, except where it is None."""
    return [
        EvalValue(step, place, value, stderr, int(changed_at is not None and step >= changed_at))
        for step, row in enumerate(rows)
        for place, value in enumerate(row)
        if value is not None
    ]


def combine(weights: list[float], rows: list[Row], stderr: float | None = None) -> tuple[CombinedState, list[Score]]:
    """The state and the scores of all rows."""
    return combine_values(weights, start_combining(len(weights)), to_values(rows, stderr))


@given(table=tables, data=st.data())
def test_batches_give_the_same_scores(table: tuple[list[float], list[Row]], data: st.DataObject) -> None:
    """Values in batches of any size give the same scores and state as all at once."""
    weights, rows = table
    values = to_values(rows)
    state, scores = start_combining(len(weights)), list[Score]()
    remaining = list(values)
    while remaining:
        size = data.draw(st.integers(1, len(remaining)))
        state, new = combine_values(weights, state, remaining[:size])
        scores += new
        remaining = remaining[size:]
    assert repr((state, scores)) == repr(combine_values(weights, start_combining(len(weights)), values))


@given(table=tables)
def test_extreme_values_leave_state_finite(table: tuple[list[float], list[Row]]) -> None:
    """A score is finite exactly if an eval of its step is usable, and the state is always finite."""
    weights, rows = table
    state, scores = combine(weights, rows)
    for score in scores:
        assert math.isfinite(score.value) == any(value is not None and abs(value) < 1e100 for value in rows[score.step])
    numbers = [state.offset, state.unit, state.level, *state.falls, *(item.factor for item in state.evals)]
    assert all(map(math.isfinite, numbers))


@given(table=tables, scale=st.sampled_from([0.25, 8.0]), shift=st.integers(-64, 64))
def test_scores_are_invariant_to_units(table: tuple[list[float], list[Row]], scale: float, shift: int) -> None:
    """Scaling and shifting one eval gives the same scores."""
    weights, rows = table
    plain: list[Row] = [tuple(v if v is None or abs(v) < 100 else None for v in row) for row in rows]
    other: list[Row] = [(None if row[0] is None else scale * row[0] + shift, *row[1:]) for row in plain]
    for expected, score in zip(combine(weights, plain)[1], combine(weights, other)[1], strict=True):
        assert expected.value == pytest.approx(score.value, abs=1e-9, nan_ok=True)


@given(
    weights=weight_lists,
    signs=st.lists(st.tuples(*[st.sampled_from([-1.0, 1.0])] * 3), min_size=1, max_size=30),
)
def test_evals_of_equal_scale_give_their_mean(weights: list[float], signs: list[tuple[float, ...]]) -> None:
    """If all evals change by the same amount, the score is the weighted mean of their changes in that unit."""
    levels = [(0.0,) * len(weights)]
    for moves in signs:
        levels.append(tuple(level + move for level, move in zip(levels[-1], moves, strict=False)))
    _, scores = combine(weights, [tuple(5.0 + 0.5 * level for level in row) for row in levels])
    means = [math.fsum(w * v for w, v in zip(weights, row, strict=True)) / math.fsum(weights) for row in levels]
    assert [score.value for score in scores] == pytest.approx(means)


def test_standard_error_is_that_of_the_mean() -> None:
    """Two equal standard errors give 1 / sqrt(2) of one; if one is missing, the score has none."""
    rows: list[Row] = [(float(step % 2), float(step % 2)) for step in range(6)]
    assert combine([1.0, 1.0], rows, stderr=0.5)[1][-1].stderr == pytest.approx(0.5 / math.sqrt(2))
    values = [value._replace(stderr=None) if value.place else value for value in to_values(rows, stderr=0.5)]
    assert combine_values([1.0, 1.0], start_combining(2), values)[1][-1].stderr is None


def test_missing_eval_is_carried_then_left_out() -> None:
    """A missing eval keeps its last value for three evals, is then left out without a jump, and counts when back."""
    rows: list[Row] = [(float(step % 2), float(step % 2)) for step in range(20)]
    quiet: list[Row] = [(1.0, None)] * 6
    state, scores = combine([1.0, 1.0], [*rows, *quiet, (1.0, -9.0)])
    missing = scores[len(rows) : len(rows) + len(quiet)]
    assert all(abs(later.value - earlier.value) < 1e-9 for earlier, later in pairwise([*scores[19:20], *missing]))
    only_first = combine([1.0, 1.0], [*rows, *quiet, (2.0, None), (2.0, None)])[1]
    assert only_first[-1].value - only_first[-3].value == pytest.approx(1.0)
    assert scores[-1].value - missing[-1].value == pytest.approx(-5.0)
    assert state.evals[1].missed == 0


def test_single_failed_eval_changes_no_weights() -> None:
    """A single drop to 0 before the scales are estimated again changes only the score of that step."""
    rows: list[Row] = [(50.0 + (step % 2) * (1 if step < 9 else 3), float(step % 2)) for step in range(40)]
    failed_rows: list[Row] = [*rows[:15], (0.0, rows[15][1]), *rows[16:]]
    plain, failed = combine([1.0, 1.0], rows)[1], combine([1.0, 1.0], failed_rows)[1]
    assert failed[15].value < plain[15].value - 15
    assert failed[30].value == pytest.approx(plain[30].value, abs=1.0)


def test_scales_that_shrink_alike_keep_the_unit() -> None:
    """If all evals slow down alike, the score stays proportional to them."""
    levels = [1.0 - 0.8**step for step in range(30)]
    _, scores = combine([1.0, 2.0], [(level, 50.0 * level) for level in levels])
    ratio = (scores[1].value - scores[0].value) / (levels[1] - levels[0])
    assert [score.value for score in scores] == pytest.approx([ratio * level for level in levels])


def test_new_eval_version_restarts_scores() -> None:
    """From a change of the eval version on, the scores are those of a run that starts there."""
    rows: list[Row] = [(float(step % 3), float(step % 2)) for step in range(12)]
    values = to_values(rows, changed_at=6)
    _, scores = combine_values([1.0, 2.0], start_combining(2), values)
    _, restarted = combine_values([1.0, 2.0], start_combining(2), [value for value in values if value.step >= 6])
    assert scores[6:] == restarted
    assert [score.eval_version for score in scores] == [0] * 6 + [1] * 6


def test_state_shows_which_eval_fell() -> None:
    """The fall since the best score is positive for an eval that fell and negative for one that rose."""
    rising: list[Row] = [(step + 0.1 * (step % 2), 10.0 * step) for step in range(10)]
    falling: list[Row] = [(9.0 - 2 * step, 90.0 + 2 * step) for step in range(1, 6)]
    state, _ = combine([1.0, 1.0], [*rising, *falling])
    fell, rose = state.falls
    assert fell > 0 > rose


def test_late_values_are_refused() -> None:
    """A value of a step with a score, or of an earlier step, raises OutOfOrder."""
    state, _ = combine([1.0, 1.0], [(0.0, 0.0), (1.0, None)])
    for step in (0, -1):
        with pytest.raises(OutOfOrder):
            combine_values([1.0, 1.0], state, [EvalValue(step, 0, 1.0)])


@given(table=tables, data=st.data())
def test_required_evals_give_the_same_scores_in_batches(
    table: tuple[list[float], list[Row]], data: st.DataObject
) -> None:
    """With required evals too, batches of any size give the same scores, which are finite where an eval is usable."""
    weights, rows = table
    values = to_values(rows)
    state, scores = start_combining(len(weights), (0, 1)), list[Score]()
    expected = combine_values(weights, state, values)
    remaining = list(values)
    while remaining:
        size = data.draw(st.integers(1, len(remaining)))
        state, new = combine_values(weights, state, remaining[:size])
        scores += new
        remaining = remaining[size:]
    assert repr((state, scores)) == repr(expected)
    for score in scores:
        assert math.isfinite(score.value) == any(value is not None and abs(value) < 1e100 for value in rows[score.step])


def test_score_falls_only_if_all_required_evals_fall() -> None:
    """While one of two required evals stands at its best, the score holds; once both fall, it falls with the better."""
    rising: list[Row] = [(float(step), 10.0 * step) for step in range(20)]
    one_falls: list[Row] = [(19.0 - step, 190.0) for step in range(1, 11)]
    both_fall: list[Row] = [(9.0 - step, 190.0 - 10.0 * step) for step in range(1, 6)]
    _, scores = combine_values([1.0, 1.0], start_combining(2, (0, 1)), to_values([*rising, *one_falls, *both_fall]))
    values = [score.value for score in scores]
    assert values[20:30] == pytest.approx([18.5] * 10)
    assert values[30:] == pytest.approx([17.5, 16.5, 15.5, 14.5, 13.5])


def test_required_eval_that_is_not_measured_keeps_its_last_value() -> None:
    """A required eval which was healthy when its values ceased holds the score, however long ago."""
    rising: list[Row] = [(float(step), float(step)) for step in range(20)]
    _, scores = combine_values(
        [1.0, 1.0], start_combining(2, (0, 1)), to_values([*rising, *((19.0 - step, None) for step in range(1, 15))])
    )
    assert [score.value for score in scores[20:]] == pytest.approx([scores[20].value] * 13)
