"""A measurement of the eval that changes: levels are compared within a version only."""

from __future__ import annotations

from itertools import pairwise

import pytest
from evalstop_detectors import (
    POLICIES,
    BestSoFar,
    Call,
    MetricRole,
    Observation,
    Policy,
    Score,
    SmoothedMaximum,
    advance,
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
from msgspec.structs import replace

from tests.detectors.strategies import policies, series


def versioned(observations: list[Observation], changes: set[int]) -> list[Observation]:
    """The observations where the measurement changes at these of their places, from the whole step on."""
    steps = {observations[place].step for place in changes if place < len(observations)}
    return [replace(item, eval_version=sum(step <= item.step for step in steps)) for item in observations]


runs = st.builds(versioned, series(set(MetricRole), max_size=25), st.sets(st.integers(0, 24), max_size=3))


@given(policy=policies(), observations=runs, cuts=st.sets(st.integers(0, 25), max_size=4))
def test_cut_and_stored(policy: Policy, observations: list[Observation], cuts: set[int]) -> None:
    """In batches of any size, stored and read back between them, a run ends as it does one by one."""
    expected, calls = start(policy), [Call.CONTINUE]
    for item in observations:
        expected, verdict = step(policy, expected, item)
        calls.append(verdict.verdict)
    state, reached = start(policy), [Call.CONTINUE]
    for begin, end in pairwise([0, *sorted(cuts), len(observations) + 25]):
        state, verdicts = advance(policy, state, observations[begin:end])
        assert verdicts[-1] is state.verdict
        reached += [item.verdict for item in verdicts]
        state = state_from_json(policy, state_to_json(policy, state))
    assert state == expected
    assert distinct(reached) == distinct(calls)


def distinct(calls: list[Call]) -> list[Call]:
    return calls[:1] + [new for old, new in pairwise(calls) if new is not old]


@given(observations=series({MetricRole.EVAL}, max_size=25), place=st.integers(0, 24))
def test_what_came_before_a_change_is_not_compared(observations: list[Observation], place: int) -> None:
    """Evidence from the eval is that of a run that begins where the measurement changed."""
    policy = POLICIES["paper"]
    state = replay(policy, versioned(observations, {place}))
    alone = replay(policy, observations[place:]) if place < len(observations) else replay(policy, observations)
    assert (state.states, state.evidence, state.evals) == (alone.states, alone.evidence, alone.evals)


def test_a_jump_is_no_fall() -> None:
    """A stricter grader stops nobody; where nobody said so it looks like a turn."""
    scores = [0.02 * min(at, 30) + 0.01 * ((7 * at) % 5) - (0.3 if at >= 40 else 0.0) for at in range(70)]
    observations = [Observation(MetricRole.EVAL, at, score, progress=at / 70) for at, score in enumerate(scores)]
    policy = policy_from_document({"name": "p", "members": [{"detector": "plateau_drop"}, {"detector": "posterior"}]})
    assert replay(policy, observations).verdict.stops
    assert replay(policy, versioned(observations, {40})).verdict.verdict is Call.CONTINUE


def test_a_stop_stays() -> None:
    """A stop that was reached before the change stands, and a suspicion of before is gone."""
    falling = [Observation(MetricRole.EVAL, at, float(-at)) for at in range(5)]
    later = [Observation(MetricRole.EVAL, 9, 0.0, eval_version=1)]
    assert replay(POLICIES["paper"], [*falling, *later]).verdict == replay(POLICIES["paper"], falling).verdict
    assert replay(POLICIES["paper"], falling[:3]).verdict.verdict is Call.SUSPECT
    assert replay(POLICIES["paper"], [*falling[:3], *later]).verdict.verdict is Call.CONTINUE


def test_the_rest_of_the_plan_is_kept() -> None:
    """Anew from the middle of the plan on, an eval counts as that share of the rest of it."""
    detector = Posterior()
    state, _ = detector.step(detector.start(), Observation(MetricRole.EVAL, 50, 0.5, progress=0.5))
    anew, _ = detector.step(detector.start_anew(state), Observation(MetricRole.EVAL, 60, 0.4, progress=0.6))
    alone, _ = detector.step(detector.start(), Observation(MetricRole.EVAL, 10, 0.4, progress=0.2))
    assert anew.hidden == alone.hidden


@given(saved=st.permutations([(0, "score"), (0, "save"), (1, "score"), (1, "save"), (2, "score"), (2, "save")]))
def test_the_best_checkpoint_is_of_the_newest_version(saved: list[tuple[int, str]]) -> None:
    """In whatever order scores and checkpoints come, the best is one of the newest version that has any."""
    best = BestSoFar(SmoothedMaximum())
    scores = [Score(0, 0.5), Score(1, 0.9), Score(2, 0.3, eval_version=1)]
    existing = set()
    for at, (place, what) in enumerate(saved):
        if what == "save":
            best.saved(place)
            existing.add(place)
        elif not any(other > place for other, earlier in saved[:at] if earlier == "score"):
            best.add(scores[place])
    if 2 in existing and {place for place, what in saved if what == "score"} == {0, 1, 2}:
        found = best.best()
        assert found is not None
        assert found.step == 2
    raw = best.raw()
    assert raw is not None
    assert raw.step == 2


def test_until_a_checkpoint_is_measured_anew_the_old_one_stays() -> None:
    """A change alone takes no checkpoint away."""
    best = BestSoFar(SmoothedMaximum())
    for item in (0, 1):
        best.saved(item)
    for score in (Score(0, 0.5), Score(1, 0.9), Score(2, 0.3, eval_version=1)):
        best.add(score)
    found = best.best()
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize(("step_", "expected"), [(None, [3]), (1, [0, 1]), (2, [2]), (9, [3])])
def test_scores_that_can_be_compared(step_: int | None, expected: list[int]) -> None:
    """Scores are compared with those of the version that held at a step."""
    scores = [Score(at, 0.0, None, version) for at, version in enumerate([0, 0, 1, 2])]
    assert [score.step for score in select_version(scores, step_)] == expected
