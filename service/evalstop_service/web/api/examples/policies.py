"""Policies, their backtests and their rollout stage."""

from __future__ import annotations

from typing import Any

from evalstop_service.web.api.examples.figures import PRECISION
from evalstop_service.web.api.examples.story import BEGAN, DECISION_ID, RUN_ID, STOPPED

POLICY_DOCUMENT = {
    "name": "patient",
    "description": "Seven declines in a row, after ten evals.",
    "members": [{"detector": "k_decline", "params": {"k": 7}}],
    "min_evals": 10,
}
POLICY = {
    "id": "0199aa0d-2222-7e33-8f44-112233445566",
    "name": "patient",
    "version": 1,
    "document": POLICY_DOCUMENT,
    "created_at": BEGAN,
}
BACKTEST: dict[str, Any] = {
    "id": "0199aa20-4444-7e55-8f66-778899001122",
    "state": "done",
    "document": POLICY_DOCUMENT,
    "most_runs": 500,
    "total": 1,
    "done": 1,
    "actor": "key dana",
    "created_at": STOPPED,
    "ended_at": STOPPED,
    "summary": {
        "runs": 1,
        "stops": 1,
        "right": 1,
        "wrong": 0,
        "unknown": 0,
        "missed": 0,
        "decided": 1,
        "only_it": 0,
        "only_decided": 0,
        "hours_after": 12.5,
        "hours_wrong": 0.0,
        "hours_unsaid": 0,
        "failed": 0,
    },
    "findings": [
        {
            "run_id": RUN_ID,
            "run_name": "ppo-7b-seed3",
            "status": "completed",
            "last_step": 400,
            "policy": "paper@1",
            "decision_id": DECISION_ID,
            "decided_step": 150,
            "state": "shadow",
            "run_outcome": "turned",
            "turn_step": 120,
            "verdict": "stop",
            "step": 190,
            "reason": "k_decline: 7 consecutive declines of eval, k = 7",
            "outcome": "right",
            "hours_after": 12.5,
            "error": None,
        }
    ],
}

EXAMPLES: dict[str, Any] = {
    "PolicyList": {"items": [POLICY]},
    "PolicyOut": POLICY,
    "BacktestIn": {"policy": "cautious", "runs": 500},
    "BacktestOut": BACKTEST,
    "BacktestPage": {"items": [BACKTEST | {"summary": None, "findings": None}], "next_cursor": None},
    "BacktestSummaryOut": BACKTEST["summary"],
    "BacktestRunOut": BACKTEST["findings"][0],
    "RolloutStageIn": {"required_precision": 0.9, "canary_share": 0.2},
    "RolloutStageOut": {
        "policy_name": "default",
        "version": 1,
        "stage": "canary",
        "required_precision": 0.6,
        "canary_share": 0.2,
        "since": STOPPED,
        "numbers": {"precision": PRECISION, "precision_since": PRECISION},
    },
}
