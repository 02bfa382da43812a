"""Projects, their keys, and what was changed by whom."""

from __future__ import annotations

from typing import Any

from evalstop_service.web.api.examples.story import BEGAN, DECISION_ID, STOPPED, page

KEY_ID = "0199aa0e-1111-7d22-9e33-aabbccddeeff"
AUDIT_ENTRY = {
    "id": "0199aa13-2222-7a33-8b44-5c6d7e8f9a0b",
    "at": STOPPED,
    "actor": "key operators",
    "action": "decision.vetoed",
    "subject": f"decision {DECISION_ID}",
    "details": {"run": "ppo-7b-seed3", "said_by": "dana", "reason": "the eval set was broken this morning"},
}
PATTERN = {"pattern": "val-core/*/mean@*", "role": "eval", "direction": "maximize"}
PROJECT = {
    "id": "0199aa0c-3333-7f44-9a55-665544332211",
    "name": "alignment",
    "default_policy": "default",
    "default_mode": "enforce",
    "veto_window_seconds": 300.0,
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

EXAMPLES: dict[str, Any] = {
    "NewProject": {"name": "alignment", "default_mode": "enforce", "veto_window_seconds": 300},
    "ProjectOut": PROJECT,
    "ProjectList": {"items": [PROJECT]},
    "ProjectChange": {"default_mode": "enforce", "veto_window_seconds": 300, "stops_per_hour": 10},
    "ProjectPauseIn": {"actor": "dana", "reason": "the eval set is being repaired"},
    "ProjectResumeIn": {"actor": "dana"},
    "RolePatterns": {"role_patterns": [PATTERN]},
    "KeyIn": {"name": "trainers", "scopes": ["ingest"]},
    "KeyList": {"items": [KEY]},
    "NewKeyOut": KEY | {"key": "esk_kZ3Yw0m9V1x2Qf4n6b8C0d1E2f3G4h5J6k7L8m9N0pQ"},
    "AuditPage": page(AUDIT_ENTRY),
}
