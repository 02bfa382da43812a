"""The response to a batch of observations, the same for every way to post one."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from evalstop_service.ingest import Receipt, ValueConflict
from evalstop_service.store.eval_requests import EvalRequest
from evalstop_service.web.api.schemas import encode_number

MOST_CONFLICTS = 100

_DECISION_FIELDS = ("id", "state", "state_reason", "guard_kinds")

_encode = msgspec.json.Encoder().encode


def receipt_json(receipt: Receipt, should_stop: bool, now: datetime) -> bytes:
    """The result of a batch and the resulting state of the run, as JSON; `should_stop`: as recorded before."""
    run, decision, request = receipt.run, receipt.decision, receipt.eval_request
    return _encode(
        {
            "accepted": receipt.accepted,
            "duplicates": receipt.duplicates,
            "conflict_count": len(receipt.conflicts),
            "conflicts": [_describe_conflict(conflict) for conflict in receipt.conflicts[:MOST_CONFLICTS]],
            "verdict": run.verdict.for_json,
            "should_stop": should_stop,
            "decision": decision and {name: getattr(decision, name) for name in _DECISION_FIELDS},
            "best_checkpoint": run.best_checkpoint,
            "guessed": run.recognition.guessed if run.recognition is not None else [],
            "missing": receipt.missing,
            "unwatched": receipt.unwatched,
            "status": run.status,
            "eval_request": _describe_request(request) if request is not None and request.is_open(now) else None,
        }
    )


def _describe_conflict(conflict: ValueConflict) -> dict[str, Any]:
    return {
        "metric": conflict.point.metric,
        "step": conflict.point.step,
        "stored_value": encode_number(conflict.stored_value),
        "sent_value": encode_number(conflict.point.value),
    }


def _describe_request(request: EvalRequest) -> dict[str, Any]:
    best = {"step": request.best_step, "uri": request.best_uri}
    shared = {name: getattr(request, name) for name in ("id", "step", "multiplier", "seed", "deadline_at")}
    return shared | {"best_checkpoint": best}
