"""Monitor states as JSON: exact under the policy that computed them, refused under any other."""

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
)
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_detectors.policy.state import STATE_VERSION
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.detectors.policy.test_codec import json_values, list_paths, replace_at
from tests.detectors.strategies import eval_series, policies, single_member_policy

PAPER = POLICIES["paper"]
VERSION = f'"version":{STATE_VERSION}'.encode()
STORED = state_to_json(PAPER, replay(PAPER, eval_series([1.0, 0.5, 0.25])))


@given(policy=policies(), other=policies())
def test_state_of_another_policy_is_stale(policy: Policy, other: Policy) -> None:
    """A state is refused under any other policy, unless only what judges nothing differs: who asks are the members."""
    assume(
        policy != msgspec.structs.replace(other, stops_despite=policy.stops_despite, evaluate_now=policy.evaluate_now)
    )
    with pytest.raises(StaleState):
        state_from_json(other, state_to_json(policy, start(policy)))


@pytest.mark.parametrize("other", [KDecline(k=4), KDecline(min_delta=0.1), KDecline(role=MetricRole.PROXY)])
def test_changed_parameter_makes_a_state_stale(other: KDecline) -> None:
    """A state is refused if one parameter of a detector has changed."""
    with pytest.raises(StaleState, match="replaying"):
        state_from_json(
            single_member_policy(other),
            state_to_json(single_member_policy(KDecline()), start(single_member_policy(KDecline()))),
        )


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
        STORED.replace(VERSION, b'"version":1'),
        STORED.replace(VERSION, VERSION + b',"more":0'),
        STORED.replace(b'"evidence":[{', b'"evidence":[null,{', 1),
        STORED.replace(b'"states":[{', b'"states":[{},{', 1),
        STORED.replace(b'"previous":0.25', b'"previous":"0.25"'),
    ],
)
def test_unreadable_state_is_stale(stored: bytes | str) -> None:
    """A state that cannot be read raises StaleState, so that it is rebuilt from the observations."""
    assert stored != STORED
    with pytest.raises(StaleState):
        state_from_json(PAPER, stored)


@given(path=st.sampled_from(list_paths(json.loads(STORED))), value=json_values)
def test_damaged_state_is_read_or_stale(path: tuple[Any, ...], value: Any) -> None:
    """A stored state with any value at any path is read or raises StaleState."""
    damaged = json.dumps(replace_at(json.loads(STORED), path, value))
    with contextlib.suppress(StaleState):
        assert isinstance(state_from_json(PAPER, damaged), MonitorState)


@given(path=st.sampled_from(list_paths(json.loads(STORED))), bad=st.sampled_from(["NaN", "Infinity", "1e999"]))
def test_non_finite_number_in_a_state_is_stale(path: tuple[Any, ...], bad: str) -> None:
    """A stored state with NaN or an infinity raises StaleState."""
    damaged = json.dumps(replace_at(json.loads(STORED), path, "BAD")).replace('"BAD"', bad)
    with pytest.raises(StaleState):
        state_from_json(PAPER, damaged)


def test_verdict_as_document() -> None:
    """A verdict as JSON has its call, its reason and its evidence, with null for missing values."""
    verdict = replay(PAPER, eval_series([1.0, 0.5, 0.25])).verdict
    document = json.loads(msgspec.json.encode(verdict))
    assert document == {
        "verdict": "suspect",
        "step": 2,
        "turn_step": 0,
        "reason": "k_decline: 2 consecutive declines of eval, k = 3",
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


def test_shipped_policy_from_its_document_accepts_states() -> None:
    """A shipped policy that is read from its document accepts states of the original."""
    for policy in POLICIES.values():
        document = msgspec.json.decode(msgspec.json.encode(policy_to_document(policy)))
        assert state_from_json(policy_from_document(document), state_to_json(policy, start(policy))) == start(policy)
