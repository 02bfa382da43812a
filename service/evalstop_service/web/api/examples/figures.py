"""How often it was right."""

from __future__ import annotations

from typing import Any

from evalstop_service.web.api.examples.story import DECISION_ID, POLICY_NAME, RUN_ID, STOPPED, page

PRECISION = {
    "value": 0.896,
    "low": 0.703,
    "high": 0.984,
    "bounds": {"low": 0.626, "high": 0.985},
    "decided": 48,
    "undecided": 4,
}
CASE = {
    "run_outcome": "turned",
    "derived": True,
    "turn_step": 120,
    "outcome": "right",
    "treatment": "let_run",
    "observed_probability": 0.1,
    "detectors": ["plateau_drop"],
    "stated_risk": 0.01,
    "delay_steps": 30,
    "gpu_hours": 96.0,
    "gpu_hours_saved": 41.5,
    "gpu_hours_lost": 0.0,
    "ended_at": STOPPED,
}

EXAMPLES: dict[str, Any] = {
    "PrecisionOut": {
        "alpha": 0.05,
        "group_by": ["policy"],
        "groups": [
            {
                "policy": POLICY_NAME,
                "detector": None,
                "job_kind": None,
                "begins": None,
                "precision": PRECISION,
                "recall": {
                    "value": 0.986,
                    "low": 0.828,
                    "high": 1.0,
                    "bounds": {"low": 0.757, "high": 1.0},
                    "decided": 49,
                    "undecided": 26,
                },
                "false_stops_per_healthy_run": {
                    "value": 0.139,
                    "low": 0.024,
                    "high": 0.374,
                    "bounds": {"low": 0.022, "high": 0.461},
                    "decided": 315,
                    "undecided": 26,
                },
                "delay_steps": {"cases": 43, "lower": 20.0, "median": 30.0, "upper": 70.0},
                "gpu_hours": {
                    "saved": 1840.0,
                    "lost": 96.0,
                    "lost_as_told": 61.5,
                    "would_have_saved": 204.0,
                    "would_have_lost": 10.5,
                    "unsaid": 3,
                },
                "stated_risk": 0.01,
                "counts": {
                    "let_run": {"right": 43, "wrong": 5, "unknown": 4},
                    "stopped": {"right": 61, "wrong": 4, "unknown": 380},
                    "prevented": {"right": 1, "wrong": 6, "unknown": 2},
                    "passed": {"right": 310, "wrong": 6, "unknown": 22},
                },
                "cases": {
                    "let_run": {"right": "/api/v1/cases?policy=default&version=1&treatment=let_run&outcome=right"}
                },
            }
        ],
    },
    "CasePage": page(
        CASE
        | {
            "run_id": RUN_ID,
            "run_name": "ppo-7b-seed3",
            "attempt": 1,
            "policy": POLICY_NAME,
            "job_kind": "rlhf",
            "decision_id": DECISION_ID,
            "decided_step": 150,
            "gpus": 8.0,
        }
    ),
}
