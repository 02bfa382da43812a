"""The answer to a batch of observations, the same whichever way the batch came in."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from evalstop_service.ingest import Receipt
from evalstop_service.web.api.schemas import encode_number

MOST_CONFLICTS = 100

_encode = msgspec.json.Encoder().encode


def receipt_document(receipt: Receipt, now: datetime) -> dict[str, Any]:
    """What became of a batch, and where the run stands after it, as JSON has it."""
    conflicts = [
        {
            "metric": item.point.metric,
            "step": item.point.step,
            "stored_value": encode_number(item.stored_value),
            "sent_value": encode_number(item.point.value),
        }
        for item in receipt.conflicts[:MOST_CONFLICTS]
    ]
    return {
        "accepted": receipt.accepted,
        "duplicates": receipt.duplicates,
        "conflict_count": len(receipt.conflicts),
        "conflicts": conflicts,
        "verdict": receipt.run.verdict,
        "should_stop": receipt.decision is not None and receipt.decision.stops(now),
        "best_checkpoint": receipt.run.best_checkpoint,
        "guessed": receipt.run.recognition.guessed if receipt.run.recognition is not None else [],
    }


def receipt_json(receipt: Receipt, now: datetime) -> bytes:
    """The document, encoded."""
    return _encode(receipt_document(receipt, now))
