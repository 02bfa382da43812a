"""The monitor: the observations of a run under a policy give a verdict; a stop is final."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from evalstop_detectors import (
    POLICIES,
    Call,
    Evidence,
    Kind,
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
    state_from_json,
    state_to_json,
    step,
)
from evalstop_detectors.detectors.k_decline import KDecline, KDeclineState
from evalstop_detectors.detectors.non_finite import NonFinite
from evalstop_detectors.detectors.posterior import Posterior
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.detectors.strategies import (
    add_eval_versions,
    eval_series,
    policies,
    round_values,
    series,
    single_member_policy,
)

runs = series(set(MetricRole), max_size=25)
versioned_runs = st.builds(add_eval_versions, runs, st.sets(st.integers(0, 20), max_size=2))
runs_without_eval = series({MetricRole.PROXY, MetricRole.KL, MetricRole.LOSS}, round_values, max_size=25)


def collect_states(policy: Policy, observations: list[Observation]) -> list[MonitorState]:
    """The start state and the state after each observation."""
    states = [start(policy)]
    for observation in observations:
        states.append(step(policy, states[-1], observation)[0])
    return states


def compute_reference_states(policy: Policy, observations: list[Observation]) -> list[MonitorState]:
    """Slow reference: every member steps on the roles it watches, and every verdict is judged again."""
    states = [start(policy)]
    panel = list(policy.panel.values())
    for item in observations:
        before = states[-1]
        is_eval, opening = item.role is MetricRole.EVAL and math.isfinite(item.value), before.opening
        opening = opening.add_eval(before.evals, item.value) if is_eval else opening
        is_rate = item.role is MetricRole.LEARNING_RATE
        opening = opening.add_rate(item.value) if is_rate else opening
        if item.role not in policy.roles or (is_rate and opening == before.opening and not policy.shows_rates):
            states.append(before)
            continue
        folded, evidence, calls = list(before.states), list(before.evidence), list(before.calls)
        for index, member in enumerate(panel):
            if item.role in member.detector.roles:
                folded[index], latest = member.detector.step(folded[index], item)
                evidence[index] = latest
                if calls[index] is None and latest.reaches(member.thresholds.stop_at):
                    calls[index] = item.step
        size = len(policy.members)
        seen = MonitorState(tuple(folded), tuple(evidence), tuple(calls), item.order, opening=opening)
        if item.role not in policy.deciding_roles:
            kept = {name: getattr(before, name) for name in ("evals", "verdict", "suspect_step")}
            states.append(msgspec.structs.replace(seen, **kept))
            continue
        evals = before.evals + is_eval
        verdict = before.verdict if before.verdict.stops else policy.judge(evidence[:size], item.step, evals, opening)
        suspect_step = before.suspect_step
        if suspect_step is None and verdict.verdict is not Call.CONTINUE:
            suspect_step = item.step
        states.append(msgspec.structs.replace(seen, evals=evals, verdict=verdict, suspect_step=suspect_step))
    return states


@given(policy=policies() | st.sampled_from(list(POLICIES.values())), observations=runs)
def test_skipped_judgments_change_nothing(policy: Policy, observations: list[Observation]) -> None:
    """The states equal those of a monitor that judges after every observation."""
    assert collect_states(policy, observations) == compute_reference_states(policy, observations)


@given(policy=policies() | st.sampled_from(list(POLICIES.values())), observations=runs, data=st.data())
def test_batches_give_the_same_states(policy: Policy, observations: list[Observation], data: st.DataObject) -> None:
    """Batches of any size give the same states and the same changes of the verdict."""
    states = compute_reference_states(policy, observations)
    state, first = states[0], 0
    for end in [*sorted(data.draw(st.sets(st.integers(0, len(observations))))), len(observations)]:
        passed = states[first : end + 1]
        state, verdicts = advance(policy, state, iter(observations[first:end]))
        changed = [b.verdict for a, b in pairwise(passed) if a.verdict.verdict is not b.verdict.verdict]
        assert state == states[end]
        assert verdicts[-1] == state.verdict
        assert verdicts == changed or verdicts[:-1] == changed
        first = end


@given(policy=policies(), observations=runs, rng=st.randoms(use_true_random=False))
def test_replay_is_independent_of_order(policy: Policy, observations: list[Observation], rng: object) -> None:
    """`replay` gives the same state for observations in any order."""
    shuffled = list(observations)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert replay(policy, shuffled) == collect_states(policy, observations)[-1]
    assert replay(policy, iter(shuffled)) == replay(policy, observations)


def test_stop_is_final() -> None:
    """After a stop the verdict does not change, while the detectors continue."""
    *_, stopped, _, _, last = collect_states(single_member_policy(KDecline(k=2)), eval_series([3, 2, 1, 0, 9, 8]))
    assert stopped.verdict.stops
    assert last.verdict == stopped.verdict
    assert [item.value for item in last.evidence if item is not None] == [1]


@given(
    observations=runs_without_eval,
    detector=st.sampled_from([KDecline(1, role=role) for role in (MetricRole.LOSS, MetricRole.PROXY)]),
    has_evals=st.booleans(),
)
def test_run_without_a_falling_eval_is_only_suspect(
    observations: list[Observation], detector: KDecline, has_evals: bool
) -> None:
    """With rising evals, or none, an alarm of proxy or loss gives suspect, and the reason says why."""
    policy = msgspec.structs.replace(single_member_policy(detector), eval_required=True)
    eval_scores = [
        Observation(MetricRole.EVAL, number, float(number))
        for number in {item.step for item in observations}
        if has_evals
    ]
    verdicts = [
        state.verdict
        for state in collect_states(policy, sorted([*observations, *eval_scores], key=lambda item: item.order))
    ]
    assert not any(verdict.stops for verdict in verdicts)
    suspects = [verdict for verdict in verdicts if verdict.verdict is Call.SUSPECT]
    assert all("no evidence from the eval score" in verdict.reason for verdict in suspects)
    assert bool(suspects) == replay(single_member_policy(detector), observations).verdict.stops


@given(policy=policies(), observations=runs)
def test_unwatched_roles_change_nothing(policy: Policy, observations: list[Observation]) -> None:
    """Late observations of roles that no detector watches do not change the state."""
    state = replay(policy, observations)
    for item in observations:
        assert item.role in policy.roles or step(policy, state, item) == (state, state.verdict)


@given(policy=policies(), observations=runs)
def test_late_observations_are_refused(policy: Policy, observations: list[Observation]) -> None:
    """An observation at or before the last one is late and raises OutOfOrder with its role and step, also before
    others. A learning rate that changes nothing is none of them."""
    counts = policy.roles if policy.shows_rates else policy.roles - {MetricRole.LEARNING_RATE}
    watched = [item for item in observations if item.role in counts]
    assume(watched)
    state = replay(policy, watched)
    for item in watched:
        assert is_late(state, item)
        with pytest.raises(OutOfOrder, match=f"{item.role} at step {item.step} "):
            step(policy, state, item)
        later = [Observation(item.role, item.step + 1 + index, 0.0) for index in range(5)]
        with pytest.raises(OutOfOrder, match=f"{item.role} at step {item.step} "):
            advance(policy, state, [item, *later])
    assert not is_late(start(policy), watched[0])
    assert not is_late(state, msgspec.structs.replace(watched[-1], step=watched[-1].step + 1))


def test_stop_has_reason_and_evidence() -> None:
    """A stop verdict has its step, turn step, reason, and the detector's value and thresholds."""
    verdict = replay(single_member_policy(KDecline(k=2)), eval_series([1, 3, 2, 1, 7], start=10)).verdict
    assert (verdict.verdict, verdict.step, verdict.turn_step) == (Call.STOP, 13, 11)
    assert verdict.reason == "k_decline: 2 consecutive declines of eval, k = 2"
    (finding,) = verdict.evidence
    assert (finding.detector, finding.value, finding.suspect_at, finding.stop_at) == ("k_decline", 2, 1, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"min_evals": 5}, "the run has 4 evals of the 5 needed"),
        ({"at_least": 2}, "1 of the 2 detectors needed call for one"),
    ],
)
def test_withheld_stop_states_the_missing_condition(change: dict[str, int], words: str) -> None:
    """A stop that the policy does not allow yet is a suspect verdict whose reason names the condition."""
    on_loss = KDecline(k=9, role=MetricRole.LOSS)
    members = (*single_member_policy(KDecline(k=2)).members, *single_member_policy(on_loss).members)
    policy = msgspec.structs.replace(Policy("both", members), **change)
    evals = eval_series([9, math.nan, 5, 4, 3], start=1)
    verdict: Verdict = replay(policy, [*evals, Observation(MetricRole.LOSS, 1, 0.0)]).verdict
    assert verdict.verdict is Call.SUSPECT
    assert verdict.reason.endswith(f"no stop: {words}")


def test_withheld_stop_is_issued_when_the_condition_is_met() -> None:
    """The last missing eval stops the run, although no evidence changes."""
    bad_loss = Member(NonFinite(MetricRole.LOSS), Thresholds(1, 1))
    quiet = Member(NonFinite(MetricRole.PROXY), Thresholds(1, None))
    bad = Observation(MetricRole.LOSS, 1, math.nan)
    policy = Policy("late", (bad_loss, quiet), eval_required=False, min_evals=3)
    later = [Observation(MetricRole.EVAL, number, 0.0) for number in range(2, 6)]
    assert [state.verdict.stops for state in collect_states(policy, [bad, *later])] == [False] * 4 + [True] * 2
    state, verdicts = advance(policy, start(policy), [bad, *later])
    assert [(verdict.verdict, verdict.step) for verdict in verdicts] == [(Call.SUSPECT, 1), (Call.STOP, 4)]
    assert state.suspect_step == 1


def test_turn_is_the_earliest_of_the_stopping_detectors() -> None:
    """The turn step of a stop is the earliest turn step of the detectors that call for it."""
    detectors = (KDecline(k=1), KDecline(k=1, min_delta=1))
    members = tuple(Member(detector, detector.thresholds) for detector in detectors)
    verdict = replay(Policy("both", members, at_least=2), eval_series([9, 8.5, 7])).verdict
    assert (verdict.step, verdict.turn_step) == (2, 0)


def test_run_without_observations_continues() -> None:
    """Before the first observation the verdict is continue, without a step and evidence."""
    verdict = replay(single_member_policy(KDecline()), []).verdict
    assert (verdict.verdict, verdict.step, verdict.evidence) == (Call.CONTINUE, None, ())


class Failing(KDecline, frozen=True):
    """A detector that raises an exception at its third value, if the second is a decline."""

    def step(self, state: KDeclineState, observation: Observation) -> tuple[KDeclineState, Evidence]:
        if state.declines == 1:
            raise ValueError("a fault of its own")
        return super().step(state, observation)


OBSERVERS = (
    Member(KDecline(k=1), Thresholds(None, 1.0)),
    Member(Posterior(), Thresholds(None, 0.2)),
    Member(Failing(), Thresholds(None, 1.0)),
)


@given(policy=policies() | st.sampled_from(list(POLICIES.values())), observations=versioned_runs, data=st.data())
def test_observers_change_no_verdict(policy: Policy, observations: list[Observation], data: st.DataObject) -> None:
    """With or without observers, one of which fails, each verdict is the same, however the run is split."""
    observed = msgspec.structs.replace(policy, observers=OBSERVERS)
    for alone, beside in zip(
        collect_verdicts(policy.unobserved, observations), collect_verdicts(observed, observations), strict=True
    ):
        assert beside == alone
    state, first = start(observed), 0
    for end in [*sorted(data.draw(st.sets(st.integers(0, len(observations))))), len(observations)]:
        state, _ = advance(observed, state, observations[first:end])
        first = end
    assert state == replay(observed, observations)
    assert state.verdict == replay(policy.unobserved, observations).verdict


def collect_verdicts(policy: Policy, observations: list[Observation]) -> list[Verdict]:
    return [state.verdict for state in collect_states(policy, observations)]


def test_calls_are_the_first_steps_at_which_members_called() -> None:
    """Each member's first call is kept, of those that decide and of observers, also after the stop and a restart."""
    policy = Policy(
        "observed",
        (Member(KDecline(k=2), Thresholds(None, 2.0)),),
        observers=(
            Member(KDecline(k=1), Thresholds(None, 1.0)),
            Member(KDecline(k=4), Thresholds(None, 4.0), id="four"),
            Member(KDecline(k=9), Thresholds(None, None)),
        ),
    )
    falling = [Observation(MetricRole.EVAL, step, -step) for step in range(6)]
    state = replay(policy, falling)
    assert dict(zip(policy.panel, state.calls, strict=True)) == {
        "k_decline": 2,
        "k_decline-2": 1,
        "four": 4,
        "k_decline-3": None,
    }
    again, _ = advance(policy, state, [Observation(MetricRole.EVAL, 9, 9.0, eval_version=1)])
    assert again.calls == state.calls


def test_failed_observer_sees_nothing_more() -> None:
    """An observer that raises an exception keeps its call, and says in its evidence that it failed."""
    policy = Policy("observed", (Member(KDecline(), Thresholds(None, 3.0)),), observers=(OBSERVERS[2],))
    states = collect_states(policy, [Observation(MetricRole.EVAL, step, -step) for step in range(5)])
    assert [state.states[1] is None for state in states] == [False] * 3 + [True] * 3
    assert states[-1].calls == (3, 1)
    assert states[-1].evidence[1] == Evidence(
        Kind.COUNT, 0.0, None, "failed, and sees nothing more: ValueError('a fault of its own')"
    )
    stored = state_from_json(policy, state_to_json(policy, states[-1]))
    assert stored == states[-1]
