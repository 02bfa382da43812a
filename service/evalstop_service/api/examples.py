"""One example of every body and answer, told as one story: a run whose gold turned at step 120."""

from __future__ import annotations

from typing import Any

RUN_ID = "0199aa10-7c3e-7b51-9d3f-5a0d6f2c8e11"
DECISION_ID = "0199aa12-0b7d-7f0e-8a44-1d2c3b4a5f60"
ENDPOINT_ID = "0199aa0f-55aa-7c01-b1c2-0f1e2d3c4b5a"
KEY_ID = "0199aa0e-1111-7d22-9e33-aabbccddeeff"
OVERDUE = "2026-01-01T14:46:07.250000Z"
BEGAN, SAVED, STOPPED = "2026-01-01T12:00:00Z", "2026-01-01T14:03:00Z", "2026-01-01T14:31:07.250000Z"
SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"  # noqa: S105 - an example

BEST = {"step": 120, "uri": "s3://runs/ppo-7b-seed3/step-120", "score": 0.71, "chosen_by": "raw_maximum"}
FINDING = {
    "detector": "k_decline",
    "signals": ["eval"],
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
CHANGE = {
    "state": "requested",
    "at": STOPPED,
    "actor": "policy paper version 1",
    "reason": VERDICT["reason"],
    "details": {},
}
AUDIT_ENTRY = {
    "id": "0199aa13-2222-7a33-8b44-5c6d7e8f9a0b",
    "at": STOPPED,
    "actor": "key operators",
    "action": "decision.vetoed",
    "subject": f"decision {DECISION_ID}",
    "details": {"run": "ppo-7b-seed3", "said_by": "dana", "reason": "the eval set was broken this morning"},
}
POLICY_NAME = {"name": "default", "version": 1}
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
PRECISION = {
    "value": 0.896,
    "low": 0.703,
    "high": 0.984,
    "bounds": {"low": 0.626, "high": 0.985},
    "decided": 48,
    "undecided": 4,
}
OUTCOME = {
    "outcome": "right",
    "turn_step": 120,
    "derived": True,
    "actor": "evalstop",
    "note": "gold ended 62% of its gain below its best, 9.4 standard errors",
    "details": {"truth": "turned", "evals": 40, "window": 4, "gain": 0.34, "drop": 0.21, "stderr": 0.022},
    "at": STOPPED,
}
CASE = {
    "truth": "turned",
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
RUN = {
    "id": RUN_ID,
    "name": "ppo-7b-seed3",
    "status": "running",
    "attempt": 1,
    "created_at": BEGAN,
    "updated_at": STOPPED,
    "ended_at": None,
    "metrics": {
        "reward/gold": {"signal": "eval", "direction": "maximize"},
        "reward/proxy": {"signal": "proxy", "direction": "maximize"},
        "kl": {"signal": "kl", "direction": "minimize"},
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
REHEARSAL: dict[str, Any] = {
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
            "truth": "turned",
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
PATTERN = {"pattern": "val-core/*/mean@*", "signal": "eval", "direction": "maximize"}
PROJECT = {
    "id": "0199aa0c-3333-7f44-9a55-665544332211",
    "name": "alignment",
    "default_policy": "default",
    "default_mode": "enforce",
    "grace_seconds": 300.0,
    "stops_per_hour": 30,
    "stops_share": 0.5,
    "confirm_seconds": 900.0,
    "stale_seconds": 300.0,
    "held_out_share": 0.1,
    "price_per_gpu_hour": 2.5,
    "currency": "USD",
    "role_patterns": [PATTERN],
    "paused_at": None,
    "paused_by": None,
    "paused_reason": None,
    "created_at": BEGAN,
}
KEY = {"id": KEY_ID, "name": "trainers", "scopes": ["ingest"], "created_at": BEGAN, "revoked_at": None}
ENDPOINT = {
    "id": ENDPOINT_ID,
    "url": "https://receiver.example:8788/",
    "event_types": ["run.stop_requested"],
    "format": "standard",
    "enabled": True,
    "created_at": BEGAN,
    "failures": 0,
    "open_until": None,
    "previous_secret_until": None,
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
DELIVERY = {
    "id": "0199aa12-4444-7a55-8b66-0a0b0c0d0e0f",
    "run_id": RUN_ID,
    "event_id": "0199aa12-5555-7b66-9c77-f0e0d0c0b0a0",
    "event_type": "run.stop_requested",
    "decision_id": DECISION_ID,
    "endpoint_id": ENDPOINT_ID,
    "url": ENDPOINT["url"],
    "state": "delivered",
    "attempts": 1,
    "due_at": "2026-01-01T14:32:07.260000Z",
    "last_error": None,
    "created_at": STOPPED,
    "settled_at": "2026-01-01T14:31:07.300000Z",
    "log": [
        {"number": 1, "at": "2026-01-01T14:31:07.300000Z", "duration_ms": 12.5, "status_code": 200, "error": None}
        | {"url": ENDPOINT["url"], "answer": "ok"}
    ],
}


EVENT_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "run.stopped",
    "type": "object",
    "required": ["type", "timestamp", "data"],
}


def _page(*items: dict[str, Any]) -> dict[str, Any]:
    return {"items": [*items], "next_cursor": None}


EXAMPLES: dict[str, Any] = {
    "BatchIn": {"observations": [OBSERVATION, {"metric": "kl", "step": 150, "value": "NaN"}]},
    "CheckpointIn": CHECKPOINT,
    "CheckpointList": {"items": [CHECKPOINT | {"attempt": 1, "created_at": SAVED}]},
    "ClaimIn": {"wait_seconds": 25, "limit": 10, "lease_seconds": 30},
    "DecisionOut": DECISION,
    "DecisionPage": _page(DECISION),
    "DeliveryOut": DELIVERY,
    "DeliveryDetail": DELIVERY
    | {
        "request": {
            "method": "POST",
            "url": ENDPOINT["url"],
            "headers": {"content-type": "application/json", "webhook-id": DELIVERY["event_id"]},
            "body": '{"type":"run.stop_requested","timestamp":"2026-01-01T14:31:07.250000Z","data":{}}',
        }
    },
    "DeliveryPage": _page(DELIVERY),
    "EndpointChange": {"enabled": False},
    "EndpointIn": {"url": ENDPOINT["url"], "event_types": ENDPOINT["event_types"]},
    "EndpointList": {"items": [ENDPOINT]},
    "EndpointOut": ENDPOINT,
    "EndpointWithSecret": ENDPOINT | {"secret": SECRET},
    "EventSchema": EVENT_SCHEMA,
    "EventSchemas": {"run.stopped": EVENT_SCHEMA},
    "FinishIn": {"status": "completed"},
    "Health": {"status": "ok"},
    "KeyIn": {"name": "trainers", "scopes": ["ingest"]},
    "KeyList": {"items": [KEY]},
    "Line": LINES[0],
    "Lines": LINES,
    "NewKeyOut": KEY | {"key": "esk_kZ3Yw0m9V1x2Qf4n6b8C0d1E2f3G4h5J6k7L8m9N0pQ"},
    "ObservationPage": _page(OBSERVATION | {"attempt": 1, "superseded_by": None, "received_at": STOPPED}),
    "OutcomeIn": {"outcome": "right", "turn_step": 120, "note": "gold fell on a second eval set too"},
    "PolicyList": {"items": [POLICY]},
    "PolicyOut": POLICY,
    "ProblemDetails": {
        "type": "about:blank",
        "title": "The request is not valid",
        "status": 422,
        "detail": "1 thing wrong with the request; nothing of it was stored",
        "instance": f"/api/v1/runs/{RUN_ID}/observations",
        "errors": [{"pointer": "/observations/3/step", "detail": "Input should be greater than or equal to 0"}],
    },
    "ProjectChange": {"default_mode": "enforce", "grace_seconds": 300, "stops_per_hour": 10},
    "ProjectIn": {"name": "alignment", "default_mode": "enforce", "grace_seconds": 300},
    "MetricsIn": {
        "metrics": {"val-core/gsm8k/mean@4": {"signal": "eval"}, "critic/score/mean": {"signal": "proxy"}},
    },
    "PatternsIn": {"role_patterns": [PATTERN]},
    "ProgressIn": {
        "trainerStatus": {
            "metrics": [{"name": "eval_accuracy", "value": "0.61"}, {"name": "current_step", "value": "1200"}],
        },
    },
    "ProgressOut": {"run_id": RUN_ID, "accepted": 1, "should_stop": False},
    "ProjectList": {"items": [PROJECT]},
    "ProjectOut": PROJECT,
    "ProjectPauseIn": {"actor": "dana", "reason": "the eval set is being repaired"},
    "ProjectResumeIn": {"actor": "dana"},
    "PullEndpointIn": {
        "name": "login-node",
        "event_types": ["run.stop_requested", "run.stop_escalated", "run.resume_requested"],
    },
    "PulledEvents": {
        "events": [
            {
                "delivery_id": DELIVERY["id"],
                "attempt": 1,
                "lease_until": "2026-01-01T14:31:37.300000Z",
                "headers": {
                    "webhook-id": DELIVERY["event_id"],
                    "webhook-timestamp": "1767277867",
                    "webhook-signature": "v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=",
                },
                "body": '{"type":"run.stop_requested","timestamp":"2026-01-01T14:31:07.250000Z","data":{}}',
            }
        ]
    },
    "ReceiptOut": {
        "accepted": 2,
        "duplicates": 0,
        "conflict_count": 1,
        "conflicts": [{"metric": "kl", "step": 140, "stored_value": 8.1, "sent_value": 8.2}],
        "verdict": VERDICT,
        "should_stop": True,
        "best_checkpoint": BEST,
    },
    "ReplayIn": {"since": BEGAN, "types": ["run.stopped"]},
    "ReplayOut": {"replayed": 12, "passed_over": 0, "next_after": None},
    "TrialOut": {
        "event_id": DELIVERY["event_id"],
        "url": ENDPOINT["url"],
        "delivered": True,
        "status_code": 200,
        "error": None,
        "answer": "ok",
        "duration_ms": 12.5,
    },
    "ReportIn": {
        "state": "confirmed",
        "actor": "evalstop-receiver process",
        "reason": "the process group is gone",
        "details": {"exit_status": -15, "signal": "SIGTERM", "ended_at": STOPPED},
    },
    "ResumeIn": {"step": 120},
    "RunIn": {
        "name": "ppo-7b-seed3",
        "metrics": {
            "reward/gold": {"signal": "eval"},
            "reward/proxy": {"signal": "proxy"},
            "kl": {"signal": "kl"},
        },
        "labels": {"slurm_job_id": "4711"},
        "policy": "paper",
        "mode": "enforce",
        "total_steps": 10000,
    },
    "RunOut": RUN,
    "AuditPage": _page(AUDIT_ENTRY),
    "RunPage": _page(RUN),
    "SavedOut": CHECKPOINT | {"created": True, "best_checkpoint": BEST},
    "SettleIn": {"delivery_id": DELIVERY["id"], "attempt": 1, "status": 202},
    "Settlement": {"settled": True},
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
    "TallyOut": TALLY,
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
    "VerdictPage": _page({"sequence": 2, "attempt": 1, "at": STOPPED, "verdict": VERDICT}),
    "RehearsalIn": {"policy": "cautious", "runs": 500},
    "RehearsalOut": REHEARSAL,
    "RehearsalPage": {"items": [REHEARSAL | {"summary": None, "findings": None}], "next_cursor": None},
    "RehearsalSummaryOut": REHEARSAL["summary"],
    "RehearsedRunOut": REHEARSAL["findings"][0],
    "AuthorityIn": {"precision_wanted": 0.9, "canary_share": 0.2},
    "AuthorityOut": {
        "policy_name": "default",
        "version": 1,
        "stage": "canary",
        "precision_wanted": 0.6,
        "canary_share": 0.2,
        "since": STOPPED,
        "numbers": {"precision": PRECISION, "precision_since": PRECISION},
    },
    "CasePage": _page(
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
    "OutcomesOut": {"attempt": 1, "items": [OUTCOME], "case": CASE},
    "WordIn": {"actor": "dana", "reason": "the eval set was broken this morning"},
}
"""By the name of its schema."""
