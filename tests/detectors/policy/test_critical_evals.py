"""Critical evals: each can stop the run by itself, in addition to the combined score."""

from __future__ import annotations

from collections.abc import Sequence

from evalstop_detectors import (
    POLICIES,
    Call,
    MetricRole,
    Observation,
    advance,
    start,
    state_from_json,
    state_to_json,
)
from hypothesis import given
from hypothesis import strategies as st

PAPER = POLICIES["paper"]
GUARDED = PAPER.with_critical(["math", "code"])

row_lists = st.lists(st.tuples(*[st.integers(-2, 2).map(float)] * 4), max_size=15)


def to_observations(rows: Sequence[tuple[float, ...]]) -> list[Observation]:
    """Observations of each row: a KL, the combined score and two critical evals."""
    return [
        item
        for step, (kl, *scores) in enumerate(rows)
        for item in (
            Observation(MetricRole.KL, step, kl),
            *[Observation(MetricRole.EVAL, step, value, critical=number) for number, value in enumerate(scores)],
        )
    ]


def find_stop_step(rows: Sequence[tuple[float, ...]], column: int) -> int | None:
    """The step at which the policy stops a run with this series only, or None."""
    state, _ = advance(
        PAPER, start(PAPER), [Observation(MetricRole.EVAL, s, row[column]) for s, row in enumerate(rows)]
    )
    return state.verdict.step if state.verdict.stops else None


@given(rows=row_lists)
def test_first_series_that_turns_stops_the_run(rows: Sequence[tuple[float, ...]]) -> None:
    """The run stops at the first step at which any series would stop it by itself; ties go to the combined score."""
    state, _ = advance(GUARDED, start(GUARDED), to_observations(rows))
    stops = [(step, column) for column in (1, 2, 3) if (step := find_stop_step(rows, column)) is not None]
    actual = (state.verdict.step, state.verdict.critical) if state.verdict.stops else None
    assert actual == (None if not stops else (min(stops)[0], (None, "math", "code")[min(stops)[1] - 1]))


def test_reason_names_the_critical_eval() -> None:
    """A stop because of a critical eval names it, also if the other evals rise."""
    rows = [(0.0, float(step), 0.0, -float(step)) for step in range(6)]
    state, verdicts = advance(GUARDED, start(GUARDED), to_observations(rows))
    assert state.verdict.reason == "critical eval code: k_decline: 3 consecutive declines of eval, k = 3"
    assert [(verdict.verdict, verdict.step) for verdict in verdicts] == [(Call.SUSPECT, 2), (Call.STOP, 3)]


@given(rows=row_lists, data=st.data())
def test_stored_batches_give_the_same_state(rows: Sequence[tuple[float, ...]], data: st.DataObject) -> None:
    """Batches of any size, with the state stored and read back in between, give the same state."""
    observations = to_observations(rows)
    whole, _ = advance(GUARDED, start(GUARDED), observations)
    state = start(GUARDED)
    while observations:
        size = data.draw(st.integers(1, len(observations)))
        state, _ = advance(GUARDED, state_from_json(GUARDED, state_to_json(GUARDED, state)), observations[:size])
        observations = observations[size:]
    assert state == whole
