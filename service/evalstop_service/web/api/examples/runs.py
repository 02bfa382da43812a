"""Runs, what is observed of them, and what is made of it."""

from __future__ import annotations

from typing import Any

from evalstop_service.web.api.examples.decisions import DECISION
from evalstop_service.web.api.examples.story import BEGAN, BEST, POLICY_NAME, RUN_ID, SAVED, STOPPED, VERDICT, page

RUN = {
    "id": RUN_ID,
    "name": "ppo-7b-seed3",
    "status": "running",
    "attempt": 1,
    "created_at": BEGAN,
    "updated_at": STOPPED,
    "ended_at": None,
    "metrics": {
        "reward/gold": {"role": "eval", "direction": "maximize"},
        "reward/proxy": {"role": "proxy", "direction": "maximize"},
        "kl": {"role": "kl", "direction": "minimize"},
    },
    "recognition": {
        "open": False,
        "preset": None,
        "sources": {"reward/gold": "trainer", "reward/proxy": "trainer", "kl": "trainer"},
        "reasons": {},
        "warnings": [],
    },
    "labels": {"slurm_job_id": "4711"},
    "policy": POLICY_NAME,
    "mode": "enforce",
    "total_steps": 10000,
    "last_step": 150,
    "verdict": VERDICT,
    "should_stop": True,
    "best_checkpoint": BEST,
    "raw_maximum": {"step": 120, "score": 0.71},
    "decision": DECISION,
    "pulse": {"state": "alive", "heard_at": STOPPED, "cadence_seconds": 31.5, "dead": []},
}
OBSERVATION = {"metric": "reward/gold", "step": 150, "value": 0.52, "stderr": 0.02, "time": STOPPED}
LINES = [
    {"run_id": RUN_ID} | OBSERVATION,
    {"run_id": RUN_ID, "observations": [OBSERVATION, {"metric": "kl", "step": 150, "value": "NaN"}]},
]
TALLY = {
    "lines": 3,
    "accepted": 2,
    "duplicates": 1,
    "conflict_count": 0,
    "error_count": 1,
    "errors": [
        {"line": 3, "title": "The line is not valid", "detail": "/step: Input should be greater than or equal to 0"}
    ],
    "runs": [
        {"run_id": RUN_ID, "accepted": 2, "verdict": "stop", "should_stop": True, "best_checkpoint": BEST},
    ],
}
CHECKPOINT = {"step": 120, "uri": BEST["uri"]}

EXAMPLES: dict[str, Any] = {
    "RunIn": {
        "name": "ppo-7b-seed3",
        "metrics": {
            "reward/gold": {"role": "eval"},
            "reward/proxy": {"role": "proxy"},
            "kl": {"role": "kl"},
        },
        "labels": {"slurm_job_id": "4711"},
        "policy": "paper",
        "mode": "enforce",
        "total_steps": 10000,
    },
    "RunOut": RUN,
    "RunPage": page(RUN),
    "MetricsIn": {
        "metrics": {"val-core/gsm8k/mean@4": {"role": "eval"}, "critic/score/mean": {"role": "proxy"}},
    },
    "FinishIn": {"status": "completed"},
    "ResumeIn": {"step": 120},
    "BatchIn": {"observations": [OBSERVATION, {"metric": "kl", "step": 150, "value": "NaN"}]},
    "ReceiptOut": {
        "accepted": 2,
        "duplicates": 0,
        "conflict_count": 1,
        "conflicts": [{"metric": "kl", "step": 140, "stored_value": 8.1, "sent_value": 8.2}],
        "verdict": VERDICT,
        "should_stop": True,
        "best_checkpoint": BEST,
    },
    "ObservationPage": page(OBSERVATION | {"attempt": 1, "superseded_by": None, "received_at": STOPPED}),
    "SeriesOut": {
        "metric": "eval",
        "buckets": [
            {
                "first_step": 0,
                "last_step": 120,
                "count": 13,
                "lowest": 0.12,
                "highest": 0.41,
                "last": 0.41,
                "nan_count": 0,
                "infinite_count": 0,
            }
        ],
    },
    "VerdictPage": page({"sequence": 2, "attempt": 1, "at": STOPPED, "verdict": VERDICT}),
    "CheckpointIn": CHECKPOINT,
    "CheckpointList": {"items": [CHECKPOINT | {"attempt": 1, "created_at": SAVED}]},
    "SavedOut": CHECKPOINT | {"created": True, "best_checkpoint": BEST},
    "Line": LINES[0],
    "Lines": LINES,
    "TallyOut": TALLY,
    "StreamProblem": {
        "type": "about:blank",
        "title": "The body cannot be unpacked",
        "status": 400,
        "detail": "it ends in the middle, after 4096 bytes unpacked. The first 3 lines were taken in, see `so_far`; it "
        "broke off after them. To send all of it again is harmless: what was stored counts as duplicates",
        "instance": "/api/v1/observations",
        "lines_stored": 3,
        "so_far": TALLY,
    },
    "ProgressIn": {
        "trainerStatus": {
            "metrics": [{"name": "eval_accuracy", "value": "0.61"}, {"name": "current_step", "value": "1200"}],
        },
    },
    "ProgressOut": {"run_id": RUN_ID, "accepted": 1, "should_stop": False},
}
