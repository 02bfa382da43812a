"""Which share of healthy runs a policy says it stops."""

from __future__ import annotations

from typing import Any

import pytest
from evalstop_detectors import POLICIES, policy_from_document, policy_to_document
from evalstop_detectors.policy.calibration import compute_stated_risk

DROP: dict[str, Any] = {
    "detector": "plateau_drop",
    "params": {"sigmas": 1.5, "use_proxy": True},
    "stop_at": {"risk": 0.01},
}
CAREFUL: dict[str, Any] = {"detector": "e_process", "params": {"alpha": 0.02}}
COUNT: dict[str, Any] = {"detector": "k_decline", "params": {"k": 3}}


@pytest.mark.parametrize(("name", "risk"), [("default", 0.01), ("early", 0.05), ("cautious", 0.001), ("paper", None)])
def test_shipped_policies(name: str, risk: float | None) -> None:
    """Those that come with EvalStop say what their descriptions say, and go on saying it when they were stored."""
    assert compute_stated_risk(policy_from_document(policy_to_document(POLICIES[name]))) == risk


@pytest.mark.parametrize(
    ("members", "terms", "risk"),
    [
        ([DROP, CAREFUL], {}, 0.03),
        ([DROP, COUNT], {}, None),
        ([DROP, COUNT], {"gate": ["plateau_drop"]}, 0.01),
        ([DROP, CAREFUL], {"at_least": "all"}, 0.015),
        ([DROP | {"stop_at": 0.2}], {}, None),
    ],
    ids=["either", "one says nothing", "a gate", "votes", "an own threshold"],
)
def test_members_add_up(members: list[dict[str, Any]], terms: dict[str, Any], risk: float | None) -> None:
    """Of members that each may stop the risks add up; what none of them bounds is not stated."""
    found = compute_stated_risk(policy_from_document({"name": "mine", "members": members} | terms))
    assert found == pytest.approx(risk)
