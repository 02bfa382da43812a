"""Monitor states as JSON: exact for the policy they were folded under, refused for any other."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from evalstop_detectors import (
    POLICIES,
    MetricRole,
    MonitorState,
    Policy,
    StaleState,
    policy_from_document,
    policy_to_document,
    replay,
    start,
    state_from_json,
    state_to_json,
    step,
    verdict_to_document,
)
from evalstop_detectors.detectors.k_decline import KDecline
from hypothesis import given
from hypothesis import strategies as st

from tests.detectors.policy.test_codec import changed, json_values, paths
from tests.detectors.strategies import alone, eval_series, policies, series

PAPER = POLICIES["paper"]
STORED = state_to_json(PAPER, replay(PAPER, eval_series([1.0, 0.5, 0.25])))


@given(policy=policies(), observations=series(set(MetricRole), max_size=20), cut=st.integers(0, 20))
def test_a_policy_goes_on_from_a_stored_state(policy: Policy, observations: list[Any], cut: int) -> None:
    """A run of several roles, stored at any point, ends in the state and verdict of the run that never was."""
    state = start(policy)
    for index, observation in enumerate(observations):
        if index == cut:
            state = state_from_json(policy, state_to_json(policy, state).decode())
        state, _ = step(policy, state, observation)
    assert state == replay(policy, observations)
    assert state_to_json(policy, state) == state_to_json(policy, replay(policy, observations))


@given(policy=policies(), other=policies())
def test_a_state_belongs_to_its_policy(policy: Policy, other: Policy) -> None:
    """Another policy, be it only in one parameter, cannot go on; what it stops despite is no matter of judging."""
    stored = state_to_json(policy, start(policy))
    if policy == msgspec.structs.replace(other, stops_despite=policy.stops_despite):
        assert state_from_json(other, stored) == start(other)
    else:
        with pytest.raises(StaleState):
            state_from_json(other, stored)


@pytest.mark.parametrize("other", [KDecline(k=4), KDecline(min_delta=0.1), KDecline(role=MetricRole.PROXY)])
def test_a_changed_parameter_makes_a_state_stale(other: KDecline) -> None:
    """The same detector with one parameter changed is another policy."""
    with pytest.raises(StaleState, match="replaying"):
        state_from_json(alone(other), state_to_json(alone(KDecline()), start(alone(KDecline()))))


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        "\ud800",
        b"[" * 100_000,
        STORED.replace(b'"version":1', b'"version":2'),
        STORED.replace(b'"version":1', b'"version":1,"more":0'),
        STORED.replace(b'"evidence":[{', b'"evidence":[null,{', 1),
        STORED.replace(b'"states":[{', b'"states":[{},{', 1),
        STORED.replace(b'"previous":0.25', b'"previous":"0.25"'),
    ],
)
def test_what_is_not_a_state_is_stale(stored: bytes | str) -> None:
    """A state that cannot be read is stale: it is rebuilt from the observations, never guessed."""
    assert stored != STORED
    with pytest.raises(StaleState):
        state_from_json(PAPER, stored)


@given(path=st.sampled_from(paths(json.loads(STORED))), value=json_values)
def test_a_damaged_state_is_read_or_stale(path: tuple[Any, ...], value: Any) -> None:
    """A stored state with anything in any one place is a state or stale, never another error."""
    damaged = json.dumps(changed(json.loads(STORED), path, value))
    with contextlib.suppress(StaleState):
        assert isinstance(state_from_json(PAPER, damaged), MonitorState)


@given(path=st.sampled_from(paths(json.loads(STORED))), bad=st.sampled_from(["NaN", "Infinity", "1e999"]))
def test_a_state_holds_no_non_finite_numbers(path: tuple[Any, ...], bad: str) -> None:
    """NaN and infinities have no place in a stored state."""
    damaged = json.dumps(changed(json.loads(STORED), path, "BAD")).replace('"BAD"', bad)
    with pytest.raises(StaleState):
        state_from_json(PAPER, damaged)


def test_a_verdict_is_a_document() -> None:
    """A verdict as JSON has its call, its reason and the numbers behind it, null where there is none."""
    verdict = replay(PAPER, eval_series([1.0, 0.5, 0.25])).verdict
    document = verdict_to_document(verdict)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document == {
        "verdict": "suspect",
        "step": 2,
        "turn_step": 0,
        "reason": "k_decline: 2 consecutive declines of eval, k = 3",
        "ground": None,
        "critical": None,
        "evidence": [
            {
                "detector": "k_decline",
                "roles": ["eval"],
                "kind": "count",
                "value": 2.0,
                "suspect_at": 2.0,
                "stop_at": 3.0,
                "turn_step": 0,
                "note": "2 consecutive declines of eval, k = 3",
            }
        ],
    }


def test_shipped_policies_are_their_documents() -> None:
    """A policy read from its stored document accepts the states of the shipped one."""
    for policy in POLICIES.values():
        document = msgspec.json.decode(msgspec.json.encode(policy_to_document(policy)))
        assert state_from_json(policy_from_document(document), state_to_json(policy, start(policy))) == start(policy)
