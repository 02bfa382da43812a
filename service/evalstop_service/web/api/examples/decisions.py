"""Decisions, and whether they were right."""

from __future__ import annotations

from typing import Any

from evalstop_service.web.api.examples.figures import CASE
from evalstop_service.web.api.examples.story import BEST, DECISION_ID, POLICY_NAME, RUN_ID, STOPPED, VERDICT, page

OVERDUE = "2026-01-01T14:46:07.250000Z"
CHANGE = {
    "state": "requested",
    "at": STOPPED,
    "actor": "policy paper version 1",
    "reason": VERDICT["reason"],
    "details": {},
}
DECISION = {
    "id": DECISION_ID,
    "run_id": RUN_ID,
    "run_name": "ppo-7b-seed3",
    "attempt": 1,
    "state": "requested",
    "step": 150,
    "due_at": STOPPED,
    "deadline_at": OVERDUE,
    "escalations": 0,
    "created_at": STOPPED,
    "verdict": VERDICT,
    "best_checkpoint": BEST,
    "policy": POLICY_NAME,
    "outcome": None,
    "history": [CHANGE],
}
OUTCOME = {
    "outcome": "right",
    "turn_step": 120,
    "derived": True,
    "actor": "evalstop",
    "note": "the eval ended 62% of its gain below its best, 9.4 standard errors",
    "details": {"run_outcome": "turned", "evals": 40, "window": 4, "gain": 0.34, "drop": 0.21, "stderr": 0.022},
    "at": STOPPED,
}

EXAMPLES: dict[str, Any] = {
    "DecisionOut": DECISION,
    "DecisionPage": page(DECISION),
    "WordIn": {"actor": "dana", "reason": "the eval set was broken this morning"},
    "ReportIn": {
        "state": "confirmed",
        "actor": "evalstop-receiver process",
        "reason": "the process group is gone",
        "details": {"exit_status": -15, "signal": "SIGTERM", "ended_at": STOPPED},
    },
    "OutcomeIn": {"outcome": "right", "turn_step": 120, "note": "gold fell on a second eval set too"},
    "OutcomesOut": {"attempt": 1, "items": [OUTCOME], "case": CASE},
}
