"""The rules of groups: what they compare, whom they call, and that only the set of observations matters."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import msgspec
import pytest
from evalstop_detectors import (
    GroupMember,
    GroupRule,
    Hyperparameter,
    InvalidRule,
    Score,
    Scores,
    check_rule,
    judge_group,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.group_members import EVERY, LEVELS, build, build_all, list_called

RULES = [
    GroupRule("median", fewest=1),
    GroupRule("median", fewest=2, from_step=20, sigmas=2.0),
    GroupRule("halving", fewest=1, first_rung=EVERY, eta=2),
    GroupRule("halving", fewest=3, first_rung=2 * EVERY, eta=3, sigmas=0.0),
    GroupRule("pbt", fewest=1, ready_steps=2 * EVERY, share=0.5, hyperparameters={"lr": Hyperparameter()}),
    GroupRule("pbt", fewest=1, ready_steps=EVERY, share=0.3, sigmas=0.0),
]


@st.composite
def groups(draw: st.DrawFn) -> list[GroupMember]:
    """Up to seven members of different lengths, some of them ended, copied, or without a checkpoint."""
    stderr = draw(st.sampled_from([None, 0.0, 0.5, 3.0]))
    return [
        build(
            name,
            draw(st.lists(LEVELS, max_size=9)),
            stderr,
            draw(st.sampled_from([None, (), (EVERY,), (2 * EVERY, 5 * EVERY)])),
            draw(st.sampled_from([0, 0, EVERY, 3 * EVERY])),
            is_live=draw(st.integers(0, 3)) > 0,
            hyperparameters={"lr": draw(st.sampled_from([0.1, 1.0]))},
        )
        for name in "abcdefg"[: draw(st.integers(0, 7))]
    ]


any_rule = st.sampled_from(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_these_tests_are_valid(rule: GroupRule) -> None:
    """They pass the check, and survive JSON."""
    check_rule(rule)
    assert msgspec.json.decode(msgspec.json.encode(rule), type=GroupRule) == rule


@given(rule=any_rule, members=groups(), seed=st.integers(0, 3), order=st.randoms(use_true_random=False))
def test_calls_are_a_function_of_the_set_of_observations(
    rule: GroupRule, members: list[GroupMember], seed: int, order: random.Random
) -> None:
    """Replicas agree, whatever the order of members and however their scores and checkpoints arrived."""
    arrived = []
    for member in members:
        parts: list[Any] = [*member.scores.list_scores(), *member.scores.addresses.items()]
        order.shuffle(parts)
        scores = Scores()
        for part in parts:
            scores = scores.add_scores([part]) if isinstance(part, Score) else scores.add_checkpoints(dict([part]))
        arrived.append(msgspec.structs.replace(member, scores=scores))
    order.shuffle(arrived)
    calls = judge_group(rule, members, seed)
    assert judge_group(rule, arrived, seed) == calls
    assert [call.member for call in calls] == sorted(call.member for call in calls)


@given(rule=any_rule, members=groups(), seed=st.integers(0, 3))
def test_only_live_members_are_called_and_copied(rule: GroupRule, members: list[GroupMember], seed: int) -> None:
    """A call names a live member; a source is live, has the checkpoint, up to that step, and is not called itself."""
    by_id = {member.id: member for member in members}
    calls = judge_group(rule, members, seed)
    called = {call.member for call in calls}
    assert len(called) == len(calls)
    for call in calls:
        assert by_id[call.member].is_live
        assert call.score < call.compared_with
        assert (call.source is not None) == (rule.kind == "pbt")
        if call.source is not None:
            source = by_id[call.source.source_run]
            assert source.is_live
            assert source.id not in called
            assert source.since < call.source.source_step <= call.step or source.since == 0
            assert source.scores.addresses[call.source.source_step] == call.source.source_checkpoint
            assert not [step for step in source.scores.saved if call.source.source_step < step <= call.step]


@given(rule=any_rule, members=groups())
def test_someone_is_left(rule: GroupRule, members: list[GroupMember]) -> None:
    """A rule never calls all members that have scores."""
    scored = [member for member in members if len(member.scores.steps)]
    assert not scored or len(list_called(rule, members)) < len(scored)


@given(rule=any_rule, members=groups(), exponent=st.integers(-30, 30))
def test_calls_do_not_depend_on_the_unit(rule: GroupRule, members: list[GroupMember], exponent: int) -> None:
    """Scores and their errors in another unit call the same members, with the same sources."""
    scaled = [
        msgspec.structs.replace(
            member,
            scores=Scores()
            .add_scores(
                Score(item.step, math.ldexp(item.value, exponent), item.stderr and math.ldexp(item.stderr, exponent))
                for item in member.scores.list_scores()
            )
            .add_checkpoints(member.scores.addresses),
        )
        for member in members
    ]
    before, after = judge_group(rule, members, 0), judge_group(rule, scaled, 0)
    assert [(call.member, call.step, call.source) for call in before] == [
        (call.member, call.step, call.source) for call in after
    ]


@given(rule=any_rule, members=groups(), seed=st.integers(0, 9))
def test_more_sigmas_call_no_more_members(rule: GroupRule, members: list[GroupMember], seed: int) -> None:
    """Who isn't ranked by one error isn't by three. (Of a population a source may be freed by it.)"""
    if rule.kind != "pbt":
        few, many = (msgspec.structs.replace(rule, sigmas=sigmas) for sigmas in (1.0, 3.0))
        assert set(list_called(many, members, seed)) <= set(list_called(few, members, seed))


@given(rule=any_rule, members=groups())
def test_no_one_is_called_within_the_noise(rule: GroupRule, members: list[GroupMember]) -> None:
    """With standard errors beyond the range of all scores, no two members are ranked."""
    noisy = [
        msgspec.structs.replace(
            member,
            scores=Scores()
            .add_scores(Score(item.step, item.value, 1e4) for item in member.scores.list_scores())
            .add_checkpoints(member.scores.addresses),
        )
        for member in members
    ]
    assert not rule.sigmas or list_called(rule, noisy) == []


@given(curves=st.lists(st.lists(LEVELS, min_size=1, max_size=7), min_size=2, max_size=7))
def test_median_without_noise_is_that_of_vizier(curves: list[list[float]]) -> None:
    """A run is called if its best score is below the median of the others' means over the same steps."""
    expected = []
    for index, own in enumerate(curves):
        others = [values[: len(own)] for place, values in enumerate(curves) if place != index]
        means = [math.fsum(values) / len(own) for values in others if len(values) == len(own)]
        if means and max(own) < statistics.median(means):
            expected.append(str(index))
    members = [build(str(index), values) for index, values in enumerate(curves)]
    assert list_called(GroupRule("median", fewest=1), members) == expected


@given(curves=st.lists(st.lists(LEVELS, min_size=1, max_size=9), min_size=2, max_size=7), eta=st.integers(2, 4))
def test_halving_keeps_the_best_of_each_rung(curves: list[list[float]], eta: int) -> None:
    """Of the runs that have reached a rung, those behind the best n // eta are called, but not their equals."""
    expected = []
    for index, own in enumerate(curves):
        rung = max(eta**power for power in range(5) if eta**power <= len(own))
        reached = sorted((values[rung - 1] for values in curves if len(values) >= rung), reverse=True)
        if len(reached) > 1 and own[rung - 1] < reached[max(1, len(reached) // eta) - 1]:
            expected.append(str(index))
    members = [build(str(index), values) for index, values in enumerate(curves)]
    assert list_called(GroupRule("halving", fewest=1, first_rung=EVERY, eta=eta), members) == expected


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")  # that its API may change
@given(data=st.data(), eta=st.integers(2, 4), every=st.integers(1, 3))
def test_halving_without_noise_is_optunas_pruner(data: st.DataObject, eta: int, every: int) -> None:
    """On trials that come one after the other both stop each at the same eval.

    Optuna keeps what it recorded at a rung, so a rung here lies at most between two evals.
    """
    import optuna
    from optuna.pruners import SuccessiveHalvingPruner

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    first_rung = data.draw(st.integers(every, 4 * every))
    study = optuna.create_study(
        direction="maximize", pruner=SuccessiveHalvingPruner(min_resource=first_rung, reduction_factor=eta)
    )
    rule = GroupRule("halving", fewest=1, first_rung=first_rung, eta=eta)
    ended: list[GroupMember] = []
    for number in range(data.draw(st.integers(2, 9))):
        trial, scores, is_pruned = study.ask(), Scores(), False
        for index, value in enumerate(data.draw(st.lists(LEVELS, min_size=1, max_size=12))):
            step = (index + 1) * every
            scores = scores.add_scores([Score(step, value, 0.0)])
            trial.report(value, step)
            is_pruned = trial.should_prune()
            own = GroupMember(str(number), scores)
            assert bool(judge_group(rule, [*ended, own], 0)) == is_pruned
            if is_pruned:
                break
        ended.append(GroupMember(str(number), scores, is_live=False))
        study.tell(
            trial,
            None if is_pruned else value,
            optuna.trial.TrialState.PRUNED if is_pruned else optuna.trial.TrialState.COMPLETE,
        )


def test_runs_are_compared_at_equal_steps() -> None:
    """A sibling that has come further is compared by what it had at the step; one that hasn't come there takes no part
    however good it is."""
    rule = GroupRule("median", fewest=1)
    early, behind = build("early", [5.0, 5.0, 5.0]), build("behind", [80.0])
    assert list_called(rule, [early, build("far", [0.0, 0.0, 0.0, 90.0, 90.0]), behind]) == []
    assert list_called(rule, [early, build("far", [9.0, 9.0, 9.0, 0.0]), behind]) == ["early"]


def test_noise_is_estimated_where_no_error_was_posted() -> None:
    """The same difference of means ranks two smooth runs, and not two that are noisier than it."""
    smooth = {"a": [0.1 * index for index in range(12)], "b": [0.1 * index + 0.3 for index in range(12)]}
    draws = random.Random(1)
    noisy = {name: [value + draws.gauss(0, 1.0) for value in values] for name, values in smooth.items()}
    rule = GroupRule("pbt", fewest=1, ready_steps=EVERY, share=0.5, sigmas=2.0)
    assert list_called(rule, build_all(smooth, stderr=None)) == ["a"]
    assert list_called(rule, build_all(noisy, stderr=None)) == []


def test_nothing_is_ranked_while_its_noise_is_unknown() -> None:
    """Of few scores without an error nothing follows, until a sibling's noise is known; without sigmas all counts."""
    short = build_all({"a": [1.0, 2.0], "b": [5.0, 6.0]}, stderr=None)
    rule = GroupRule("pbt", fewest=1, ready_steps=EVERY, share=0.5)
    assert list_called(rule, short) == []
    assert list_called(msgspec.structs.replace(rule, sigmas=0.0), short) == ["a"]
    measured = build("c", [7.0, 7.1, 7.0, 7.1, 7.2, 7.0, 7.1], stderr=None)
    assert list_called(rule, [*short, measured]) == ["a"]


def test_error_of_few_scores_is_not_their_range() -> None:
    """Two scores that happen to be close don't make a large posted error small."""
    close = build("a", [1.0, 1.0001], stderr=1.0)
    better = build("b", [1.5, 1.5001], stderr=1.0)
    assert list_called(GroupRule("pbt", fewest=1, ready_steps=EVERY, share=0.5), [close, better]) == []


def test_run_is_compared_with_enough_siblings() -> None:
    """With fewer than `fewest` siblings at the step nobody is called."""
    members = build_all({"a": [1.0], "b": [2.0], "c": [3.0], "d": [4.0]})
    for kind, fields in (("median", {}), ("halving", {"first_rung": EVERY}), ("pbt", {"ready_steps": EVERY})):
        rule = msgspec.convert({"kind": kind, "fewest": 3, **fields}, GroupRule)
        assert "a" in list_called(rule, members)
        assert list_called(msgspec.structs.replace(rule, fewest=4), members) == []


def test_median_waits_for_its_first_step() -> None:
    """No run is stopped before `from_step`."""
    members = build_all({"a": [1.0], "b": [2.0], "c": [3.0]})
    assert list_called(GroupRule("median", fewest=1, from_step=EVERY), members) == ["a"]
    assert list_called(GroupRule("median", fewest=1, from_step=EVERY + 1), members) == []


@pytest.mark.parametrize(
    "rule",
    [
        GroupRule("median", sigmas=0.0),
        GroupRule("halving", first_rung=EVERY, sigmas=0.0),
        GroupRule("pbt", ready_steps=EVERY, sigmas=0.0),
    ],
)
def test_reason_has_the_values_of_the_eval(rule: GroupRule) -> None:
    """A minimized eval's scores are negated to be compared, and people know its values."""
    members = [build(name, [-value], sign=-1.0) for name, value in {"a": 1.5, "b": 2.5, "c": 3.5, "d": 4.5}.items()]
    reason = judge_group(rule, members, seed=0)[-1].reason
    assert "4.5" in reason
    assert "-" not in reason


def test_median_is_that_of_the_others() -> None:
    """The run's own mean, which is low, doesn't lower the median that it is compared with."""
    assert list_called(GroupRule("median", fewest=1), build_all({"a": [-6.0, 3.0], "b": [4.0, 4.0]})) == ["a"]


def test_rung_between_two_evals_takes_the_next_one() -> None:
    """At the rung of step 15 runs are compared by their evals of step 20."""
    rule = GroupRule("halving", fewest=1, first_rung=15, eta=2)
    (call,) = judge_group(rule, build_all({"a": [9.0, 1.0], "b": [0.0, 2.0]}), 0)
    assert (call.member, call.step, call.score, call.compared_with) == ("a", 15, 1.0, 2.0)
    assert judge_group(rule, build_all({"a": [9.0], "b": [0.0, 2.0]}), 0) == []


def test_scores_of_another_version_or_lineage_do_not_count() -> None:
    """Of a run whose eval changed, or which is a copy, the scores from before are left out."""
    rule = GroupRule("median", fewest=1)
    steady = build("b", [5.0, 5.0, 5.0, 5.0])
    for since, version in ((20, 0), (0, 1)):
        scores = [Score(10, 9.0, 0.0), Score(20, 9.0, 0.0), Score(30, 1.0, 0.0, version), Score(40, 1.0, 0.0, version)]
        assert list_called(rule, [GroupMember("a", Scores().add_scores(scores), since), steady]) == ["a"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "mean"}, "kind"),
        ({"kind": "median", "sigmas": -1.0}, "sigmas"),
        ({"kind": "halving", "eta": 1}, "eta"),
        ({"kind": "pbt"}, "ready_steps"),
        ({"kind": "pbt", "ready_steps": 5, "share": 0.6}, "share"),
        ({"kind": "pbt", "ready_steps": 5, "action": "park"}, "park"),
        ({"kind": "median", "ready_steps": 5}, "ready_steps"),
        ({"kind": "halving", "from_step": 5}, "from_step"),
        ({"kind": "pbt", "ready_steps": 5, "hyperparameters": {"x": Hyperparameter(low=2.0, high=1.0)}}, "low"),
        ({"kind": "pbt", "ready_steps": 5, "hyperparameters": {"x": Hyperparameter(high=math.inf)}}, "finite"),
        ({"kind": "pbt", "ready_steps": 5, "hyperparameters": {"x": Hyperparameter(choices=(math.inf,))}}, "finite"),
        ({"kind": "pbt", "ready_steps": 5, "hyperparameters": {"x": Hyperparameter(low=1.0, choices=("a",))}}, "low"),
        ({"kind": "pbt", "ready_steps": 5, "hyperparameters": {"x": Hyperparameter(factors=())}}, "factors"),
    ],
)
def test_invalid_rule_is_refused_in_words(fields: dict[str, Any], words: str) -> None:
    """The message names the key."""
    with pytest.raises(InvalidRule, match=words):
        check_rule(GroupRule(**fields))
