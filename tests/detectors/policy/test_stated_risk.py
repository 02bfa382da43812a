"""The stated risk of a policy: the share of healthy runs that it stops at most."""

from __future__ import annotations

from typing import Any

import pytest
from evalstop_detectors import POLICIES, policy_from_document, policy_to_document
from evalstop_detectors.detectors.detector import Thresholds
from evalstop_detectors.policy.calibration import SHIPPED, compute_stated_risk

DROP: dict[str, Any] = {
    "detector": "plateau_drop",
    "params": {"sigmas": 1.5, "use_proxy": True},
    "stop_at": {"risk": 0.01},
}
COLLAPSE: dict[str, Any] = {"detector": "collapse"}
COUNT: dict[str, Any] = {"detector": "k_decline", "params": {"k": 3}}
LEVELS = {level.rate: level.threshold for level in SHIPPED[0].levels}


def test_member_without_thresholds_has_calibrated_ones() -> None:
    """plateau_drop suspects at what 5 % of healthy runs reach, and stops at what 1 % reach, whatever its parameters."""
    policy = policy_from_document(
        {"name": "mine", "members": [{"detector": "plateau_drop", "params": {"sigmas": 2.5}}]}
    )
    assert policy.members[0].thresholds == Thresholds(LEVELS[0.05], LEVELS[0.01])


@pytest.mark.parametrize(("name", "risk"), [("default", 0.016), ("early", 0.071), ("cautious", 0.001), ("paper", None)])
def test_shipped_policies_state_their_risk(name: str, risk: float | None) -> None:
    """A shipped policy, also when read from its document, has the risk of its description."""
    assert compute_stated_risk(policy_from_document(policy_to_document(POLICIES[name]))) == pytest.approx(risk)


@pytest.mark.parametrize(
    ("members", "terms", "risk"),
    [
        ([DROP, COLLAPSE], {}, 0.011),
        ([DROP, COUNT], {}, None),
        ([DROP, COUNT], {"gate": ["plateau_drop"]}, 0.01),
        ([DROP, COLLAPSE], {"at_least": "all"}, 0.0055),
        ([DROP | {"stop_at": 0.2}], {}, None),
        ([COLLAPSE | {"stop_at": 20.0}], {}, None),
        ([DROP | {"params": {"sigmas": 2.5}, "stop_at": LEVELS[0.01]}], {}, None),
    ],
    ids=["any", "one without a risk", "gate", "all", "custom threshold", "custom evidence", "custom parameters"],
)
def test_risks_of_members_add_up(members: list[dict[str, Any]], terms: dict[str, Any], risk: float | None) -> None:
    """Risks of members that can each stop add up; the result is None if a member without a risk can stop."""
    stated = compute_stated_risk(policy_from_document({"name": "mine", "members": members} | terms))
    assert stated == pytest.approx(risk)
