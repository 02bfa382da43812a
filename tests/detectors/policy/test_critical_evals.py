"""Critical evals: each is guarded by itself, beside the watched score."""

from __future__ import annotations

from collections.abc import Sequence

from evalstop_detectors import (
    POLICIES,
    Call,
    MetricRole,
    Observation,
    advance,
    policy_from_document,
    start,
    state_from_json,
    state_to_json,
)
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

PAPER = POLICIES["paper"]
GUARDED = PAPER.with_critical(["math", "code"])

values = st.lists(st.tuples(*[st.integers(-2, 2).map(float)] * 4), max_size=15)


def to_observations(rows: Sequence[tuple[float, ...]]) -> list[Observation]:
    """At each step a KL, the watched score and the critical evals."""
    return [
        item
        for step, (kl, *scores) in enumerate(rows)
        for item in (
            Observation(MetricRole.KL, step, kl),
            *[Observation(MetricRole.EVAL, step, value, critical=number) for number, value in enumerate(scores)],
        )
    ]


def alone(rows: Sequence[tuple[float, ...]], place: int) -> int | None:
    """The step at which the plain policy stops on one of the series."""
    state, _ = advance(PAPER, start(PAPER), [Observation(MetricRole.EVAL, s, row[place]) for s, row in enumerate(rows)])
    return state.verdict.step if state.verdict.stops else None


@given(rows=values)
def test_the_first_that_turns_stops_the_run(rows: Sequence[tuple[float, ...]]) -> None:
    """The run is stopped at the first step at which any of its series would be by itself, the watched score first."""
    state, _ = advance(GUARDED, start(GUARDED), to_observations(rows))
    stops = [(step, place) for place in (1, 2, 3) if (step := alone(rows, place)) is not None]
    found = (state.verdict.step, state.verdict.critical) if state.verdict.stops else None
    assert found == (None if not stops else (min(stops)[0], (None, "math", "code")[min(stops)[1] - 1]))


def test_the_reason_names_the_eval() -> None:
    """A stop on a critical eval says which, however well the others do."""
    rows = [(0.0, float(step), 0.0, -float(step)) for step in range(6)]
    state, verdicts = advance(GUARDED, start(GUARDED), to_observations(rows))
    assert state.verdict.reason == "critical eval code: k_decline: 3 consecutive declines of eval, k = 3"
    assert [(verdict.verdict, verdict.step) for verdict in verdicts] == [(Call.SUSPECT, 2), (Call.STOP, 3)]


@given(rows=values, data=st.data())
def test_stored_and_cut_anywhere(rows: Sequence[tuple[float, ...]], data: st.DataObject) -> None:
    """Cut into batches, with the state stored and read back in between, the run is judged alike."""
    observations = to_observations(rows)
    whole, _ = advance(GUARDED, start(GUARDED), observations)
    state = start(GUARDED)
    while observations:
        size = data.draw(st.integers(1, len(observations)))
        state, _ = advance(GUARDED, state_from_json(GUARDED, state_to_json(GUARDED, state)), observations[:size])
        observations = observations[size:]
    assert state == whole


def test_levelling_off_is_no_fall() -> None:
    """A policy that stops what levels off does so on the watched score; of a critical eval only a turn counts."""
    document = {"name": "p", "members": [{"detector": "posterior"}], "stop_on": ["levelled_off"]}
    policy = policy_from_document(document)
    assert policy.with_critical(["math"]) is policy
    both = replace(policy, stop_on=("turned", "levelled_off")).with_critical(["math"])
    assert (both.unguarded.stop_on, both.guarding.stop_on) == (("turned", "levelled_off"), ("turned",))
