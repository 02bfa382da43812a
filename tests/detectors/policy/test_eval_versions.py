"""Evals beside the one: scores are compared only within a version, and each critical eval can stop the run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from evalstop_detectors import (
    POLICIES,
    Call,
    MetricRole,
    Observation,
    Policy,
    Score,
    Scores,
    advance,
    choose_best,
    find_highest,
    policy_from_document,
    replay,
    start,
    state_from_json,
    state_to_json,
    step,
)
from evalstop_detectors.checkpoint.choice import select_version
from evalstop_detectors.detectors.posterior import Posterior
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import add_eval_versions, policies, series

runs = st.builds(add_eval_versions, series(set(MetricRole), max_size=25), st.sets(st.integers(0, 24), max_size=3))


@given(policy=policies(), observations=runs, cuts=st.sets(st.integers(0, 25), max_size=4))
def test_stored_batches_give_the_same_state(policy: Policy, observations: list[Observation], cuts: set[int]) -> None:
    """Batches of any size, with the state stored in between, give the same state and changes of the verdict."""
    expected, calls = start(policy), [Call.CONTINUE]
    for item in observations:
        expected, verdict = step(policy, expected, item)
        calls.append(verdict.verdict)
    state, reached = start(policy), [Call.CONTINUE]
    for start_index, end in pairwise([0, *sorted(cuts), len(observations) + 25]):
        state, verdicts = advance(policy, state, observations[start_index:end])
        assert verdicts[-1] is state.verdict
        reached += [item.verdict for item in verdicts]
        state = state_from_json(policy, state_to_json(policy, state).decode())
    assert state == expected
    assert drop_repeats(reached) == drop_repeats(calls)


def drop_repeats(calls: list[Call]) -> list[Call]:
    """The calls without consecutive repeats."""
    return calls[:1] + [new for old, new in pairwise(calls) if new is not old]


@given(observations=series({MetricRole.EVAL}, max_size=25), index=st.integers(0, 24))
def test_change_restarts_the_evidence(observations: list[Observation], index: int) -> None:
    """After a change the evidence from the eval is that of a run that starts at the change."""
    policy = POLICIES["paper"].unobserved  # the posterior, which observes, keeps how far its plan was
    state = replay(policy, add_eval_versions(observations, {index}))
    restarted = replay(policy, observations[index:]) if index < len(observations) else replay(policy, observations)
    assert (state.states, state.evidence, state.evals) == (restarted.states, restarted.evidence, restarted.evals)


def test_jump_at_a_change_does_not_stop() -> None:
    """A lower level after a reported change stops no run; without the report it looks like a turn."""
    scores = [0.02 * min(index, 30) + 0.01 * ((7 * index) % 5) - (0.3 if index >= 40 else 0.0) for index in range(70)]
    observations = [
        Observation(MetricRole.EVAL, index, score, progress=index / 70) for index, score in enumerate(scores)
    ]
    policy = policy_from_document(
        {"name": "p", "members": [{"detector": "focus", "stop_at": 12}, {"detector": "posterior"}]}
    )
    assert replay(policy, observations).verdict.stops
    assert replay(policy, add_eval_versions(observations, {40})).verdict.verdict is Call.CONTINUE


def test_stop_stays_after_a_change() -> None:
    """A stop before the change stays; a suspicion before the change is dropped."""
    falling = [Observation(MetricRole.EVAL, index, float(-index)) for index in range(5)]
    later = [Observation(MetricRole.EVAL, 9, 0.0, eval_version=1)]
    assert replay(POLICIES["paper"], [*falling, *later]).verdict == replay(POLICIES["paper"], falling).verdict
    assert replay(POLICIES["paper"], falling[:3]).verdict.verdict is Call.SUSPECT
    assert replay(POLICIES["paper"], [*falling[:3], *later]).verdict.verdict is Call.CONTINUE


def test_progress_counts_within_the_rest_of_the_plan() -> None:
    """After a change at half of the plan, progress is the share of the other half."""
    detector = Posterior()
    state, _ = detector.step(detector.start(), Observation(MetricRole.EVAL, 50, 0.5, progress=0.5))
    restarted, _ = detector.step(detector.start_anew(state), Observation(MetricRole.EVAL, 60, 0.4, progress=0.6))
    fresh, _ = detector.step(detector.start(), Observation(MetricRole.EVAL, 10, 0.4, progress=0.2))
    assert restarted.hidden == fresh.hidden


@given(events=st.permutations([(0, "score"), (0, "save"), (1, "score"), (1, "save"), (2, "score"), (2, "save")]))
def test_best_checkpoint_has_the_newest_version(events: list[tuple[int, str]]) -> None:
    """In any order of scores and checkpoints, the best is a checkpoint of the newest version that has any."""
    added = Scores()
    scores = [Score(0, 0.5), Score(1, 0.9), Score(2, 0.3, eval_version=1)]
    for index, kind in events:
        added = added.add_checkpoints({index: ""}) if kind == "save" else added.add_scores([scores[index]])
    chosen = choose_best(added)
    assert chosen is not None
    assert chosen.step == 2
    raw = find_highest(added)
    assert raw is not None
    assert raw.step == 2


def test_old_best_stays_until_the_new_version_has_one() -> None:
    """As long as no checkpoint has a score of the new version, the best of the old version stays."""
    scores = Scores().add_scores([Score(0, 0.5), Score(1, 0.9), Score(2, 0.3, eval_version=1)])
    chosen = choose_best(scores.add_checkpoints({0: "", 1: ""}))
    assert chosen is not None
    assert chosen.step == 1


@pytest.mark.parametrize(("at_step", "expected"), [(None, [3]), (1, [0, 1]), (2, [2]), (9, [3])])
def test_select_version_at_a_step(at_step: int | None, expected: list[int]) -> None:
    """`select_version` returns the scores of the version at a step, by default the newest."""
    scores = [Score(index, 0.0, None, version) for index, version in enumerate([0, 0, 1, 2])]
    assert [score.step for score in select_version(scores, at_step)] == expected


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
def test_stored_batches_of_critical_evals_give_the_same_state(
    rows: Sequence[tuple[float, ...]], data: st.DataObject
) -> None:
    """Batches of any size, with the state stored and read back in between, give the same state."""
    observations = to_observations(rows)
    whole, _ = advance(GUARDED, start(GUARDED), observations)
    state = start(GUARDED)
    while observations:
        size = data.draw(st.integers(1, len(observations)))
        state, _ = advance(GUARDED, state_from_json(GUARDED, state_to_json(GUARDED, state)), observations[:size])
        observations = observations[size:]
    assert state == whole
