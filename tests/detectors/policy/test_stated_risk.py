"""The stated risk of a policy: the share of healthy runs that it stops at most."""

from __future__ import annotations

from typing import Any

import pytest
from evalstop_detectors import POLICIES, policy_from_document, policy_to_document
from evalstop_detectors.policy.calibration import SHIPPED, compute_stated_risk

FOCUS: dict[str, Any] = {"detector": "focus", "stop_at": {"risk": 0.01}}
COLLAPSE: dict[str, Any] = {"detector": "collapse"}
COUNT: dict[str, Any] = {"detector": "k_decline", "params": {"k": 3}}
THRESHOLDS = next(thresholds for detector, thresholds in SHIPPED if detector.name == "focus")


@pytest.mark.parametrize(("name", "risk"), [("default", 0.016), ("early", 0.071), ("cautious", 0.001), ("paper", None)])
def test_shipped_policies_state_their_risk(name: str, risk: float | None) -> None:
    """A shipped policy, also when read from its document, has the risk of its description."""
    assert compute_stated_risk(policy_from_document(policy_to_document(POLICIES[name]))) == pytest.approx(risk)


@pytest.mark.parametrize(
    ("members", "terms", "risk"),
    [
        ([FOCUS, COLLAPSE], {}, 0.011),
        ([FOCUS, COUNT], {}, None),
        ([FOCUS, COLLAPSE], {"at_least": 2}, 0.0055),
        ([FOCUS | {"stop_at": 0.2}], {}, None),
        ([COLLAPSE | {"stop_at": 20.0}], {}, None),
        ([FOCUS | {"params": {"candidates": 16}, "stop_at": THRESHOLDS[0.01]}], {}, None),
    ],
    ids=["any", "one without a risk", "both", "custom threshold", "custom evidence", "custom parameters"],
)
def test_risks_of_members_add_up(members: list[dict[str, Any]], terms: dict[str, Any], risk: float | None) -> None:
    """Risks of members that can each stop add up; the result is None if a member without a risk can stop."""
    stated = compute_stated_risk(policy_from_document({"name": "mine", "members": members} | terms))
    assert stated == pytest.approx(risk)
