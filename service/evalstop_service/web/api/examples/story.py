"""What all examples tell of: a run whose gold turned at step 120."""

from __future__ import annotations

from typing import Any

RUN_ID = "0199aa10-7c3e-7b51-9d3f-5a0d6f2c8e11"
DECISION_ID = "0199aa12-0b7d-7f0e-8a44-1d2c3b4a5f60"
BEGAN, SAVED, STOPPED = "2026-01-01T12:00:00Z", "2026-01-01T14:03:00Z", "2026-01-01T14:31:07.250000Z"

BEST = {"step": 120, "uri": "s3://runs/ppo-7b-seed3/step-120", "score": 0.71, "chosen_by": "raw_maximum"}
FINDING = {
    "detector": "k_decline",
    "roles": ["eval"],
    "kind": "count",
    "value": 3.0,
    "suspect_at": 2.0,
    "stop_at": 3.0,
    "turn_step": 120,
    "note": "3 consecutive declines of eval, k = 3",
}
VERDICT = {
    "verdict": "stop",
    "step": 150,
    "turn_step": 120,
    "reason": "k_decline: 3 consecutive declines of eval, k = 3",
    "evidence": [FINDING],
}
POLICY_NAME = {"name": "default", "version": 1}


def page(*items: dict[str, Any]) -> dict[str, Any]:
    """A list that ends with its first part."""
    return {"items": [*items], "next_cursor": None}
