"""Population based training: who copies whom, from which checkpoint, and with which hyperparameters."""

from __future__ import annotations

from sys import float_info

import msgspec
import pytest
from evalstop_detectors import Exploit, GroupCall, GroupRule, Hyperparameter, check_rule, judge_group
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.group_members import EVERY, LEVELS, build, build_all, list_called


@given(values=st.lists(LEVELS, min_size=2, max_size=8, unique=True), share=st.sampled_from([0.2, 0.25, 0.5]))
def test_population_truncates(values: list[float], share: float) -> None:
    """The bottom share copies, each one of the top share; two that are not the same."""
    members = build_all({str(index): [value] for index, value in enumerate(values)})
    calls = judge_group(GroupRule("pbt", fewest=1, ready_steps=EVERY, share=share), members, 0)
    order = sorted(range(len(values)), key=lambda index: values[index])
    count = max(1, int(share * len(values)))
    assert {call.member for call in calls} == {str(index) for index in order[:count]}
    assert {call.source.source_run for call in calls if call.source} <= {str(index) for index in order[-count:]}


def test_member_copies_the_newest_checkpoint_of_its_step() -> None:
    """The source's checkpoint is the newest up to the step of the comparison, and its hyperparameters are explored."""
    rule = GroupRule(
        "pbt", fewest=1, ready_steps=2 * EVERY, share=0.5, hyperparameters={"lr": Hyperparameter(factors=(0.5, 2.0))}
    )
    source = build("b", [5.0, 5.0, 5.0], saved=(5, EVERY, 3 * EVERY), hyperparameters={"lr": 1.0, "batch": 8.0})
    (call,) = judge_group(rule, [build("a", [1.0, 1.0, 1.0], hyperparameters={"lr": 3.0}), source], 0)
    assert call == GroupCall("a", 20, call.reason, 1.0, 5.0, call.source)
    assert call.source is not None
    assert call.source in [Exploit("b", 10, "s3://b/10", {"lr": lr, "batch": 8.0}) for lr in (0.5, 2.0)]
    assert call.reason == "its score 1 at step 20 is in the bottom 50 % of 2 runs; it copies one of the top, with 5"


def test_lineage_begins_with_the_copy() -> None:
    """After a copy a member is ready once it has made `ready_steps`, and neither scores nor checkpoints from before
    count."""
    rule = GroupRule("pbt", fewest=1, ready_steps=2 * EVERY, share=0.5)
    copied = build("a", [1.0], since=2 * EVERY)
    assert list_called(rule, [copied, build("b", [5.0] * 6)]) == []
    copied = build("a", [1.0, 1.0], since=2 * EVERY)
    (call,) = judge_group(rule, [copied, build("b", [5.0] * 6)], 0)
    assert call.step == 4 * EVERY
    before = build("b", [5.0] * 3, since=3 * EVERY, saved=(EVERY, 3 * EVERY))
    assert list_called(rule, [build("a", [1.0] * 5), before]) == []


def test_two_that_would_copy_each_other_end_with_one_source() -> None:
    """Each lags where it is compared, and is the other's only source: the first by id copies."""
    rule = GroupRule("pbt", fewest=1, ready_steps=2 * EVERY, share=0.5)
    first = build("a", [0.0, 0.0, 9.0, 0.0, 0.0], since=EVERY)
    second = build("b", [1.0] * 5)
    assert list_called(rule, [second, first]) == ["a"]
    assert list_called(rule, [second, msgspec.structs.replace(first, id="c")]) == ["b"]


@pytest.mark.parametrize(
    ("at_40", "at_50", "source"), [((5.0, 1.0, 8.0), (0.0, 9.0, 8.0), "b"), ((9.0, 1.0, 5.0), (0.0, 5.0, 8.0), "c")]
)
def test_what_is_copied_is_not_called_and_what_is_called_is_not_copied(
    at_40: tuple[float, float, float], at_50: tuple[float, float, float], source: str
) -> None:
    """a is ready at step 50, and b, which lags there too, at step 40: b is the source of a, or has a alone for one."""
    rule = GroupRule("pbt", fewest=1, ready_steps=2 * EVERY, share=0.34)
    a = build("a", [0.0, 0.0, at_40[0], at_50[0]], since=EVERY)
    members = [a, *(build("abc"[place], [1.0, 1.0, 1.0, at_40[place], at_50[place]]) for place in (1, 2))]
    calls = judge_group(rule, members, 0)
    assert [(call.member, call.source and call.source.source_run) for call in calls] == [("a", source)]


def test_ended_member_is_compared_with_but_not_copied() -> None:
    """The only one of the top share has ended, so nobody copies; it counts as a sibling all the same."""
    rule = GroupRule("pbt", fewest=2, ready_steps=EVERY, share=0.34)
    members = [build("a", [1.0]), build("b", [2.0]), build("c", [3.0], is_live=False)]
    assert list_called(rule, members) == []
    assert list_called(rule, [*members[:2], build("c", [3.0])]) == ["a"]


def test_members_draw_independently() -> None:
    """Two that lag draw from the same two sources, and not the same one each time."""
    rule = GroupRule("pbt", fewest=1, ready_steps=EVERY, share=0.5)
    members = build_all({"a": [1.0], "b": [2.0], "c": [8.0], "d": [9.0]})
    drawn = set()
    for seed in range(30):
        sources = [call.source.source_run for call in judge_group(rule, members, seed) if call.source]
        drawn.add("".join(sources))
    assert drawn == {"cc", "cd", "dc", "dd"}


@given(
    value=st.floats(-1e6, 1e6) | st.sampled_from(["adam", "sgd"]),
    item=st.sampled_from(
        [
            Hyperparameter(),
            Hyperparameter(low=-1.0, high=2.0),
            Hyperparameter(choices=(1.0, 2.0, 4.0)),
            Hyperparameter(choices=("adam", "sgd")),
        ]
    ),
    seed=st.integers(0, 99),
)
def test_explored_value_stays_within_its_bounds(value: float | str, item: Hyperparameter, seed: int) -> None:
    """A number is within the bounds or one of the choices, and a text is a choice or that of the source."""
    rule = GroupRule("pbt", fewest=1, ready_steps=EVERY, share=0.5, hyperparameters={"x": item})
    check_rule(rule)
    (call,) = judge_group(rule, [build("a", [1.0]), build("b", [2.0], hyperparameters={"x": value})], seed)
    assert call.source is not None
    found = call.source.hyperparameters["x"]
    if item.choices:
        assert found in item.choices
    elif isinstance(found, str):
        assert found == value
    else:
        assert item.low is None or item.low <= found
        assert item.high is None or found <= item.high


@pytest.mark.parametrize(
    ("item", "value", "values"),
    [
        (Hyperparameter(choices=(1.0, 2.0, 4.0)), 2.0, {1.0, 4.0}),
        (Hyperparameter(choices=(1.0, 2.0, 4.0)), 4.0, {2.0, 4.0}),
        (Hyperparameter(choices=("a", "b", "c")), "b", {"a", "b", "c"}),
        (Hyperparameter(factors=(0.5, 3.0)), 2.0, {1.0, 6.0}),
        (Hyperparameter(factors=(0.5, 3.0), low=1.5, high=4.0), 2.0, {1.5, 4.0}),
        (Hyperparameter(factors=(1e6,)), 1e305, {float_info.max}),
        (Hyperparameter(), "text", {"text"}),
        (Hyperparameter(), None, {None}),
    ],
)
def test_value_is_explored_by_factors_or_among_choices(
    item: Hyperparameter, value: float | str | None, values: set[float | str | None]
) -> None:
    """Over many seeds these values are found, and no others; a number stays within the choices beside its own."""
    assert explore(item, value) == values


def explore(item: Hyperparameter, value: float | str | None) -> set[float | str | None]:
    """What 60 seeds make of a source's value; None: it has none."""
    rule = GroupRule("pbt", fewest=1, ready_steps=EVERY, share=0.5, hyperparameters={"x": item})
    of_source: dict[str, float | str] = {} if value is None else {"x": value}
    members = [build("a", [1.0]), build("b", [2.0], hyperparameters=of_source)]
    calls = [call for seed in range(60) for call in judge_group(rule, members, seed)]
    return {call.source.hyperparameters.get("x") for call in calls if call.source}
