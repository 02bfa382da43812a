"""The monitor: one run's observations under one policy, folded into a verdict that stays."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import msgspec
import pytest
from evalstop_detectors import (
    POLICIES,
    Call,
    Column,
    Member,
    MetricRole,
    MonitorState,
    Observation,
    OutOfOrder,
    Policy,
    Thresholds,
    Verdict,
    advance,
    is_late,
    replay,
    start,
    step,
    to_columns,
)
from evalstop_detectors.detectors.k_below_best import KBelowBest
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_detectors.detectors.loss_plateau import LossPlateau
from evalstop_detectors.detectors.non_finite import NonFinite
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.detectors.strategies import alone, eval_series, policies, round_values, series

runs = series(set(MetricRole), max_size=25)
blind_runs = series({MetricRole.PROXY, MetricRole.KL, MetricRole.LOSS}, round_values, max_size=25)


def fold(policy: Policy, observations: list[Observation]) -> list[MonitorState]:
    states = [start(policy)]
    for observation in observations:
        states.append(step(policy, states[-1], observation)[0])
    return states


def one_by_one(policy: Policy, observations: list[Observation]) -> list[MonitorState]:
    """The states as the words have it: every member is shown what it watches, every verdict judged anew."""
    states = [start(policy)]
    for item in observations:
        before = states[-1]
        if item.role not in policy.roles:
            states.append(before)
            continue
        folded, evidence = list(before.states), list(before.evidence)
        for index, member in enumerate(policy.members):
            if item.role in member.detector.roles:
                folded[index], evidence[index] = member.detector.step(folded[index], item)
        evals = before.evals + (item.role is MetricRole.EVAL and math.isfinite(item.value))
        verdict = before.verdict if before.verdict.stops else policy.judge(evidence, item.step, evals)
        suspect_step = before.suspect_step
        if suspect_step is None and verdict.verdict is not Call.CONTINUE:
            suspect_step = item.step
        states.append(MonitorState(tuple(folded), tuple(evidence), item.order, evals, verdict, suspect_step))
    return states


def reference_verdict(policy: Policy, history: list[Observation]) -> tuple[Call, int | None]:
    """The call and the turn that the policy's text gives this history, leaving aside earlier verdicts."""
    stopping, alarmed, called = [], [], set()
    for name, member in zip(policy.ids, policy.members, strict=True):
        state, evidence = member.detector.start(), None
        for item in history:
            if item.role in member.detector.roles:
                state, evidence = member.detector.step(state, item)
        if evidence is None:
            continue
        sees_eval = MetricRole.EVAL in member.detector.roles
        if evidence.reaches(member.thresholds.stop_at):
            called.add(name)
            stopping.append((member.weight, sees_eval, evidence.turn_step))
        if evidence.reaches(member.thresholds.stop_at) or evidence.reaches(member.thresholds.suspect_at):
            alarmed.append((member.weight, sees_eval, evidence.turn_step))
    evals = [item for item in history if item.role is MetricRole.EVAL and math.isfinite(item.value)]
    enough = sum(weight for weight, *_ in stopping) + 1e-6 >= policy.at_least
    eval_scores = any(weight and sees_eval for weight, sees_eval, _ in stopping) or not policy.eval_required
    free = eval_scores and set(policy.gate) <= called and len(evals) >= policy.min_evals
    if enough and free and history[-1].step >= policy.warmup_steps:
        return Call.STOP, earliest(turn for weight, _, turn in stopping if weight)
    if enough or sum(weight for weight, *_ in alarmed) + 1e-6 >= policy.suspect_at_least:
        return Call.SUSPECT, earliest(turn for weight, _, turn in alarmed if weight)
    return Call.CONTINUE, None


def earliest(turns: Iterable[int | None]) -> int | None:
    return min((turn for turn in turns if turn is not None), default=None)


@given(policy=policies(), observations=runs)
def test_the_verdict_is_what_the_policy_says(policy: Policy, observations: list[Observation]) -> None:
    """Every verdict up to the first stop follows from at_least, the eval score, min_evals and warmup_steps by their
    words."""
    watched = [item for item in observations if item.role in policy.roles]
    for count, state in enumerate(fold(policy, watched)[1:], start=1):
        assert (state.verdict.verdict, state.verdict.turn_step) == reference_verdict(policy, watched[:count])
        assert state.verdict.step == watched[count - 1].step
        if state.verdict.stops:
            break


@given(policy=policies() | st.sampled_from(list(POLICIES.values())), observations=runs)
def test_what_did_not_change_is_as_if_judged_anew(policy: Policy, observations: list[Observation]) -> None:
    """Step by step the states are those of a monitor that judges after every observation."""
    assert fold(policy, observations) == one_by_one(policy, observations)


@given(policy=policies() | st.sampled_from(list(POLICIES.values())), observations=runs, data=st.data())
def test_batches_change_nothing(policy: Policy, observations: list[Observation], data: st.DataObject) -> None:
    """Advanced in batches cut anywhere, a run comes to the same state, and to the same changes of the word."""
    states = one_by_one(policy, observations)
    state, begin = states[0], 0
    for end in [*sorted(data.draw(st.sets(st.integers(0, len(observations))))), len(observations)]:
        passed = states[begin : end + 1]
        state, verdicts = advance(policy, state, iter(observations[begin:end]))
        changed = [b.verdict for a, b in pairwise(passed) if a.verdict.verdict is not b.verdict.verdict]
        assert state == states[end]
        assert verdicts[-1] == state.verdict
        assert verdicts == changed or verdicts[:-1] == changed
        begin = end


@given(policy=policies() | st.sampled_from(list(POLICIES.values())), observations=runs, data=st.data())
def test_columns_are_the_same_observations(
    policy: Policy, observations: list[Observation], data: st.DataObject
) -> None:
    """Given as columns by role, batches cut anywhere come to the same states and verdicts as lists of observations."""
    by_list = by_columns = start(policy)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(observations)))))
    for begin, end in pairwise([0, *cuts, len(observations)]):
        batch = observations[begin:end]
        by_list, verdicts = advance(policy, by_list, batch)
        by_columns, same = advance(policy, by_columns, to_columns(batch))
        assert (by_columns, same) == (by_list, verdicts)


@given(policy=policies(), observations=runs)
def test_late_columns_are_refused(policy: Policy, observations: list[Observation]) -> None:
    """A column that begins at or before what was seen, or whose steps do not ascend, is refused."""
    watched = [item for item in observations if item.role in policy.roles]
    state = replay(policy, watched)
    for item in watched:
        with pytest.raises(OutOfOrder, match=f"{item.role} at step {item.step} "):
            advance(policy, state, {item.role: Column([item.step], [item.value])})
        with pytest.raises(OutOfOrder):
            advance(policy, start(policy), {item.role: Column([item.step, item.step], [item.value, item.value])})


@given(policy=policies(), observations=runs, chance=st.randoms(use_true_random=False))
def test_replay_knows_no_order(policy: Policy, observations: list[Observation], chance: object) -> None:
    """Replaying a run in any order gives the state of the fold in order."""
    shuffled = list(observations)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert replay(policy, shuffled) == fold(policy, observations)[-1]
    assert replay(policy, iter(shuffled)) == replay(policy, observations)


@given(policy=policies(), observations=runs)
def test_a_stop_stays(policy: Policy, observations: list[Observation]) -> None:
    """Once a verdict is stop it stays word for word, while the detectors go on as if nothing had happened."""
    states = fold(policy, observations)
    stops = [state.verdict for state in states if state.verdict.stops]
    assert all(verdict == stops[0] for verdict in stops)
    assert [state.verdict.stops for state in states] == [False] * (len(states) - len(stops)) + [True] * len(stops)
    never = msgspec.structs.replace(
        policy, members=tuple(Member(member.detector, Thresholds(None, None)) for member in policy.members)
    )
    undecided = fold(never, observations)[-1]
    assert (undecided.states, undecided.evidence) == (states[-1].states, states[-1].evidence)


@given(policy=policies(eval_required=True), observations=blind_runs)
def test_without_an_eval_score_nothing_stops(policy: Policy, observations: list[Observation]) -> None:
    """Under eval_required no proxy, KL or loss ever stops a run that has no eval scores, NaN or not."""
    assert not replay(policy, observations).verdict.stops


@given(observations=blind_runs, detector=st.sampled_from([LossPlateau(patience=1), KDecline(1, role=MetricRole.PROXY)]))
def test_without_an_eval_score_nothing_stops_a_rising_run(
    observations: list[Observation], detector: LossPlateau | KDecline
) -> None:
    """Rising evals beside an alarmed proxy or loss leave it at suspect, and the reason says what is missing."""
    policy = msgspec.structs.replace(alone(detector), eval_required=True)
    eval_scores = [
        Observation(MetricRole.EVAL, number, float(number)) for number in {item.step for item in observations}
    ]
    verdicts = [
        state.verdict for state in fold(policy, sorted([*observations, *eval_scores], key=lambda item: item.order))
    ]
    assert not any(verdict.stops for verdict in verdicts)
    suspects = [verdict for verdict in verdicts if verdict.verdict is Call.SUSPECT]
    assert all("no evidence from the eval score" in verdict.reason for verdict in suspects)
    assert bool(suspects) == replay(alone(detector), observations).verdict.stops


@given(policy=policies(), observations=runs)
def test_the_first_suspicion_is_kept(policy: Policy, observations: list[Observation]) -> None:
    """suspect_step is the first step at which the verdict was more than continue."""
    verdicts = [state.verdict for state in fold(policy, observations)]
    alarming = [verdict.step for verdict in verdicts if verdict.verdict is not Call.CONTINUE]
    assert replay(policy, observations).suspect_step == (alarming[0] if alarming else None)


@given(policy=policies(), observations=runs)
def test_unwatched_signals_change_nothing(policy: Policy, observations: list[Observation]) -> None:
    """With or without the roles that no detector watches, in order or late, the state is the same."""
    watched = [item for item in observations if item.role in policy.roles]
    assert fold(policy, observations)[-1] == fold(policy, watched)[-1]
    state = replay(policy, observations)
    for item in observations:
        assert item.role in policy.roles or step(policy, state, item) == (state, state.verdict)


@given(policy=policies(), observations=runs)
def test_late_observations_are_refused(policy: Policy, observations: list[Observation]) -> None:
    """What belongs before or at the last observation is late, and an error that names it; the state is untouched."""
    watched = [item for item in observations if item.role in policy.roles]
    assume(watched)
    state = replay(policy, watched)
    for item in watched:
        assert is_late(state, item)
        with pytest.raises(OutOfOrder, match=f"{item.role} at step {item.step} "):
            step(policy, state, item)
    assert not is_late(start(policy), watched[0])
    assert not is_late(state, msgspec.structs.replace(watched[-1], step=watched[-1].step + 1))


@given(observations=runs.filter(lambda observations: len(observations) > 1))
def test_falling_steps_are_out_of_order(observations: list[Observation]) -> None:
    """A run posted backwards fails at its second observation; replay sorts it."""
    policy = Policy("all", tuple(Member(NonFinite(role), Thresholds(1, None)) for role in MetricRole))
    backwards = observations[::-1]
    state, _ = step(policy, start(policy), backwards[0])
    with pytest.raises(OutOfOrder):
        step(policy, state, backwards[1])
    assert replay(policy, backwards) == replay(policy, observations)


def test_the_same_point_twice_is_a_broken_promise() -> None:
    """A repeated (role, step) raises instead of counting one eval twice."""
    policy = alone(KDecline())
    with pytest.raises(OutOfOrder):
        replay(policy, [*eval_series([3, 2]), *eval_series([3])])


def test_a_stop_has_its_reason_and_numbers() -> None:
    """The verdict names step, turn, detector, thresholds and what was counted."""
    verdict = replay(alone(KDecline(k=2)), eval_series([1, 3, 2, 1, 7], start=10)).verdict
    assert (verdict.verdict, verdict.step, verdict.turn_step) == (Call.STOP, 13, 11)
    assert verdict.reason == "k_decline: 2 consecutive declines of eval, k = 2"
    (finding,) = verdict.evidence
    assert (finding.detector, finding.value, finding.suspect_at, finding.stop_at) == ("k_decline", 2, 1, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"min_evals": 5}, "the run has 4 evals of the 5 needed"),
        ({"warmup_steps": 7}, "the warm-up lasts until step 7"),
        ({"at_least": 2}, "the detectors that call for one weigh 1 of the 2 needed"),
    ],
)
def test_a_stop_that_is_held_back_says_why(change: dict[str, int], words: str) -> None:
    """A stop that the policy does not allow yet is a suspicion with the condition that is missing."""
    members = (*alone(KDecline(k=2)).members, *alone(LossPlateau()).members)
    policy = msgspec.structs.replace(Policy("both", members), **change)
    evals = eval_series([9, math.nan, 5, 4, 3], start=1)
    verdict: Verdict = replay(policy, [*evals, Observation(MetricRole.LOSS, 1, 0.0)]).verdict
    assert verdict.verdict is Call.SUSPECT
    assert verdict.reason.endswith(f"no stop: {words}")


def test_limits_are_reached_exactly() -> None:
    """The eval that completes min_evals, and the step that ends the warm-up, may stop a run."""
    policy = msgspec.structs.replace(alone(KDecline(k=2)), min_evals=4, warmup_steps=4)
    states = fold(policy, eval_series([9, 5, 4, 3], start=1))
    assert [state.verdict.stops for state in states] == [False, False, False, False, True]


def test_a_stop_is_held_back_no_longer_than_it_must() -> None:
    """The end of the warm-up and the last eval that was missing stop a run although no evidence changes with them."""
    bad_loss = Member(NonFinite(MetricRole.LOSS), Thresholds(1, 1))
    quiet = Member(NonFinite(MetricRole.PROXY), Thresholds(1, None))
    bad = Observation(MetricRole.LOSS, 1, math.nan)
    for change, role in ({"warmup_steps": 4}, MetricRole.PROXY), ({"min_evals": 3}, MetricRole.EVAL):
        policy = msgspec.structs.replace(Policy("late", (bad_loss, quiet), eval_required=False), **change)
        later = [Observation(role, number, 0.0) for number in range(2, 6)]
        assert [state.verdict.stops for state in fold(policy, [bad, *later])] == [False] * 4 + [True] * 2
        state, verdicts = advance(policy, start(policy), [bad, *later])
        assert [(verdict.verdict, verdict.step) for verdict in verdicts] == [(Call.SUSPECT, 1), (Call.STOP, 4)]
        assert state.suspect_step == 1


def test_the_turn_is_the_earliest_belief() -> None:
    """Of the detectors that call for a stop, the one that saw the turn first places it."""
    members = (*alone(KDecline(k=1)).members, *alone(KBelowBest(k=1)).members)
    verdict = replay(Policy("both", members, at_least=2), eval_series([9, 7, 8, 6])[1:]).verdict
    assert (verdict.step, verdict.turn_step) == (3, 2)
    verdict = replay(Policy("both", members, at_least=2, min_evals=4), eval_series([9, 7, 8, 6])).verdict
    assert (verdict.step, verdict.turn_step) == (3, 0)


def test_nothing_seen_is_no_verdict_to_act_on() -> None:
    """Before the first observation the verdict is continue, with no step."""
    verdict = replay(alone(KDecline()), []).verdict
    assert (verdict.verdict, verdict.step, verdict.evidence) == (Call.CONTINUE, None, ())
