"""Policies as JSON: read back as written, and refused with an exact message otherwise."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from evalstop_detectors import (
    DETECTORS,
    POLICIES,
    GuardKind,
    InvalidPolicy,
    MetricRole,
    Policy,
    policy_from_document,
    policy_to_document,
    start,
    state_from_json,
    state_to_json,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.strategies import policies

ON_LOSS: dict[str, Any] = {"detector": "k_decline", "params": {"role": "loss"}, "stop_at": 3}

VALID: dict[str, Any] = {
    "name": "careful",
    "members": [
        {"detector": "k_decline", "params": {"k": 3, "min_delta": 0.5, "role": "eval"}, "stop_at": 4},
        {"detector": "gao_fit", "params": {"least_evals": 50}, "suspect_at": None},
        {**ON_LOSS, "id": "flat"},
    ],
    "at_least": 2,
    "eval_required": False,
    "min_evals": 5,
    "description": "two of three",
    "stops_despite": ["no_checkpoint"],
}

keys = st.sampled_from(["name", "members", "detector", "params", "stop_at", "suspect_at", "k", "role", "at_least"])
texts = st.text(st.characters(codec=None), max_size=5) | st.sampled_from(["k_decline", "eval", "\ud800", "\0", "a\n"])
leaves = st.none() | st.booleans() | st.integers() | st.integers(10**300, 10**301) | st.floats() | texts
json_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | texts, inner, max_size=3), max_leaves=6
)


def list_paths(tree: Any, path_so_far: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a document."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path_so_far, *(path for key, child in children for path in list_paths(child, (*path_so_far, key)))]


def replace_at(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a document with another value at this path."""
    if not path:
        return value
    document = copy.deepcopy(document)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return document


def check_read_or_refused(document: Any) -> None:
    """Check that a document is refused with a message, or read as a policy that is written and read back equal."""
    refusal, policy = None, None
    try:
        policy = policy_from_document(document)
    except InvalidPolicy as error:
        refusal = str(error).encode()
    if policy is None:
        assert refusal
    else:
        assert policy_from_document(msgspec.json.decode(msgspec.json.encode(policy_to_document(policy)))) == policy


@given(policy=policies())
def test_policy_survives_its_document(policy: Policy) -> None:
    """A policy that is written as JSON and read back is equal, and so is its document."""
    document = policy_to_document(policy)
    assert policy_from_document(json.loads(json.dumps(document, allow_nan=False))) == policy
    assert policy_to_document(policy_from_document(document)) == document


def test_document_contains_all_defaults() -> None:
    """Defaults are written out, so that changed defaults of a later release do not change a stored policy."""
    document = policy_to_document(policy_from_document({"name": "p", "members": [{"detector": "k_decline"}]}))
    (member,) = document["members"]
    assert member["params"] == {"k": 3, "min_delta": 0.0, "role": "eval"}
    assert json.dumps([member["suspect_at"], member["stop_at"]]) == "[2.0, 3.0]"
    assert (document["at_least"], document["eval_required"]) == (1, True)


@pytest.mark.parametrize("name", ["posterior", "gao_fit"])
def test_unreachable_thresholds_are_refused(name: str) -> None:
    """A threshold above 1 for a probability or share is refused."""
    member = {"detector": name, "stop_at": 1}
    assert policy_from_document({"name": "p", "members": [member]}).members[0].thresholds.stop_at == 1
    with pytest.raises(InvalidPolicy, match=r"1\.7.*from 0 to 1"):
        policy_from_document({"name": "p", "members": [member | {"stop_at": 1.7}]})


def test_null_threshold_is_never_reached() -> None:
    """A null threshold means never; an omitted one is the detector's default."""
    members = [{"detector": "k_decline", "stop_at": None}, {"detector": "k_decline"}]
    policy = policy_from_document({"name": "p", "members": members})
    assert [member.thresholds.stop_at for member in policy.members] == [None, 3]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_shipped_policy_is_valid(name: str) -> None:
    """Each shipped policy is read back equal, requires the eval, has a description and can stop a run."""
    policy = POLICIES[name]
    assert policy.name == name
    assert policy_from_document(policy_to_document(policy)) == policy
    assert policy.eval_required
    assert policy.description
    assert any(member.thresholds.stop_at is not None and member.sees_eval for member in policy.members)


def test_stops_despite_does_not_invalidate_states() -> None:
    """`stops_despite` is read, and a stored state stays valid when only this key changes."""
    document = {"name": "p", "members": [{"detector": "k_decline"}]}
    plain = policy_from_document(document)
    changed = policy_from_document(document | {"stops_despite": ["no_checkpoint", "stale"]})
    assert changed.stops_despite == (GuardKind.NO_CHECKPOINT, GuardKind.STALE)
    assert state_from_json(changed, state_to_json(plain, start(plain))) == start(changed)


def test_only_paper_stops_without_a_checkpoint() -> None:
    """Of the shipped policies only `paper`, the published rule, stops a run without a checkpoint."""
    ignored_guards = {name: policy.stops_despite for name, policy in POLICIES.items() if policy.stops_despite}
    assert ignored_guards == {"paper": (GuardKind.NO_CHECKPOINT,)}


@pytest.mark.parametrize(
    ("document", "roles"),
    [
        ({"members": [{"detector": "k_decline"}, {"detector": "non_finite", "params": {"role": "kl"}}]}, {"eval"}),
        ({"members": [ON_LOSS]}, {"eval", "loss"}),
        (
            {
                "members": [ON_LOSS],
                "eval_required": False,
            },
            {"loss"},
        ),
        (
            {
                "members": [
                    {"detector": "k_decline"},
                    ON_LOSS | {"stop_at": None},
                ]
            },
            {"eval"},
        ),
    ],
)
def test_stopping_roles_are_those_of_stopping_members(document: dict[str, Any], roles: set[str]) -> None:
    """`stopping_roles` omits members that only suspect, and includes a required eval."""
    assert policy_from_document({"name": "p"} | document).stopping_roles == roles


@given(document=json_values)
def test_any_json_is_read_or_refused(document: Any) -> None:
    """Any JSON value is read as a policy or raises InvalidPolicy."""
    check_read_or_refused(document)


@given(path=st.sampled_from(list_paths(VALID)), value=json_values)
def test_any_changed_value_is_read_or_refused(path: tuple[Any, ...], value: Any) -> None:
    """A valid policy with any value at any path is read or raises InvalidPolicy."""
    check_read_or_refused(replace_at(VALID, path, value))


@given(path=st.sampled_from([path for path in list_paths(VALID) if path]), key=texts, value=json_values)
def test_any_added_key_is_read_or_refused(path: tuple[Any, ...], key: str, value: Any) -> None:
    """A valid policy with a single-key object at any path is read or raises InvalidPolicy."""
    check_read_or_refused(replace_at(VALID, path, {key: value}))


FIRST = ("members", 0)
PARAMS = (*FIRST, "params")


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ((), [], ["Expected `object`", "name, members", "eval_required"]),
        ((), {"members": [{"detector": "k_decline"}]}, ["`name`", "members"]),
        ((), {"name": "p"}, ["`members`", "name"]),
        (("name",), "Upper", ["`$.name`", "[a-z0-9]"]),
        (("name",), "newline\n", ["`$.name`", "[a-z0-9]"]),
        (("name",), "", ["`$.name`", "[a-z0-9]"]),
        (("name",), 3, ["`$.name`", "`str`"]),
        (("members",), [], ["`$.members`", "length >= 1"]),
        (("members",), [{"detector": "k_decline"}] * 33, ["`$.members`", "length <= 32"]),
        (("members", 1), {}, ["`detector`", "`$.members[1]`"]),
        (("members", 1), {"detector": "k_decline", "parms": {}}, ["`parms`", "`$.members[1]`", "params"]),
        ((*FIRST, "detector"), "k_declin", ["k_declin", "`$.members[0].detector`", *DETECTORS]),
        ((*FIRST, "stop_at"), 0, ["`$.members[0].stop_at`", "> 0"]),
        ((*FIRST, "stop_at"), -1, ["`$.members[0].stop_at`", "> 0"]),
        ((*FIRST, "stop_at"), float("nan"), ["`$.members[0].stop_at`", "> 0"]),
        ((*FIRST, "suspect_at"), float("inf"), ["`$.members[0].suspect_at`", "<= 1.79"]),
        ((*FIRST, "suspect_at"), "2", ["`$.members[0].suspect_at`", "`float | object | null`"]),
        (("members", 1, "stop_at"), 1.7, ["`$.members[1].stop_at`", "is 1.7", "from 0 to 1", "or null"]),
        (("members", 1, "suspect_at"), 1.0000001, ["`$.members[1].suspect_at`", "is 1.0000001", "at most 1"]),
        (PARAMS, [], ["`$.members[0].params`", "object"]),
        (PARAMS, {"patience": 3}, ["`patience`", "`$.members[0].params`", "min_delta", "role"]),
        ((*PARAMS, "k"), 0, ["`$.members[0].params.k`", ">= 1"]),
        ((*PARAMS, "k"), 10**9, ["`$.members[0].params.k`", "<= 1000000"]),
        ((*PARAMS, "k"), 2.5, ["`$.members[0].params.k`", "`int`"]),
        ((*PARAMS, "k"), True, ["`$.members[0].params.k`", "`int`"]),
        ((*PARAMS, "min_delta"), -0.1, ["`$.members[0].params.min_delta`", ">= 0"]),
        ((*PARAMS, "min_delta"), float("inf"), ["`$.members[0].params.min_delta`", "<= 1.79"]),
        ((*PARAMS, "min_delta"), float("nan"), ["`$.members[0].params.min_delta`", ">= 0"]),
        ((*PARAMS, "role"), "gold", ["gold", "`$.members[0].params.role`", *MetricRole]),
        (("members", 1, "params", "least_evals"), 3, ["`$.members[1].params.least_evals`", ">= 5"]),
        (("at_least",), 4, ["`$.at_least`", "only 3 of the members decide"]),
        (("at_least",), 0, ["`$.at_least`", ">= 1"]),
        (("at_least",), "most", ["`$.at_least`", "`int`"]),
        (("members", 1, "id"), "K", ["`$.members[1].id`", "[a-z0-9]"]),
        (("members", 1, "id"), "flat", ["two members have the id flat", "`$.members[2].id`"]),
        ((*FIRST, "stop_at"), {"risk": 2}, ["`$.members[0].stop_at.risk`", "< 1"]),
        ((*FIRST, "stop_at"), {"rsk": 0.1}, ["`rsk`", "`$.members[0].stop_at`"]),
        ((*FIRST, "stop_at"), {"risk": 0.123}, ["`$.members[0].stop_at.risk`", "k_decline", "0.123", "calibrate"]),
        (("eval_required",), "yes", ["`$.eval_required`", "`bool`"]),
        (("min_evals",), -1, ["`$.min_evals`", ">= 0"]),
        (("description",), "x" * 2001, ["`$.description`", "2000"]),
        (("description",), "\0", ["`$.description`", "`str`"]),
        (("stops_despite",), "stale", ["`$.stops_despite`", "`array`"]),
        (("stops_despite",), ["paused"], ["`$.stops_despite[0]`", "stale, metric_fault, no_checkpoint"]),
        (("surprise",), 1, ["`surprise`", "min_evals", "at_least"]),
    ],
)
def test_refusal_names_path_and_allowed_values(path: tuple[Any, ...], value: Any, named: list[str]) -> None:
    """The message names the path of the error and the allowed values."""
    with pytest.raises(InvalidPolicy) as error:
        policy_from_document(replace_at(VALID, path, value))
    for words in named:
        assert words in str(error.value)


def test_observer_has_no_say() -> None:
    """An observer is apart from the members, survives its document, and leaves ids of members as they are."""
    document = {
        "name": "watched",
        "members": [
            {"detector": "k_decline", "observe": True, "stop_at": 4},
            {"detector": "k_decline"},
            {"detector": "posterior", "observe": True, "id": "other"},
        ],
    }
    policy = policy_from_document(document)
    assert (policy.ids, tuple(policy.panel)) == (("k_decline",), ("k_decline", "k_decline-2", "other"))
    assert [member.thresholds.stop_at for member in policy.observers] == [4.0, 0.9]
    assert policy_from_document(policy_to_document(policy)) == policy
    assert policy.stopping_roles == {"eval"}


def test_observer_with_the_name_of_a_member_is_refused() -> None:
    """An observer cannot bear the name of a member that decides."""
    members = [{"detector": "k_decline"}, {"detector": "focus", "observe": True, "id": "k_decline"}]
    with pytest.raises(InvalidPolicy, match="two members have the id k_decline"):
        policy_from_document({"name": "watched", "members": members})


def test_policy_of_observers_alone_is_refused() -> None:
    """At least one member must have a say."""
    with pytest.raises(InvalidPolicy, match="only 0 of the members decide"):
        policy_from_document({"name": "watched", "members": [{"detector": "k_decline", "observe": True}]})
