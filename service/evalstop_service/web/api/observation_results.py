"""The answer to a batch of observations, the same whichever way the batch came in."""

from __future__ import annotations

from datetime import datetime

import msgspec
from msgspec import Struct

from evalstop_service.ingest import Receipt
from evalstop_service.rules.run_results import BestCheckpoint, Verdict
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.web.api.schemas import encode_number

MOST_CONFLICTS = 100

_encode = msgspec.json.Encoder().encode


class _Conflict(Struct):
    metric: str
    step: int
    stored_value: float | str
    sent_value: float | str


class _ObservationResult(Struct):
    accepted: int
    duplicates: int
    conflict_count: int
    conflicts: list[_Conflict]
    verdict: Verdict
    should_stop: bool
    best_checkpoint: BestCheckpoint | None
    guessed: list[str]
    status: RunStatus


def receipt_json(receipt: Receipt, now: datetime) -> bytes:
    """What became of a batch, and where the run stands after it, as JSON."""
    conflicts = [
        _Conflict(item.point.metric, item.point.step, encode_number(item.stored_value), encode_number(item.point.value))
        for item in receipt.conflicts[:MOST_CONFLICTS]
    ]
    return _encode(
        _ObservationResult(
            accepted=receipt.accepted,
            duplicates=receipt.duplicates,
            conflict_count=len(receipt.conflicts),
            conflicts=conflicts,
            verdict=receipt.run.verdict,
            should_stop=receipt.decision is not None and receipt.decision.stops(now),
            best_checkpoint=receipt.run.best_checkpoint,
            guessed=receipt.run.recognition.guessed if receipt.run.recognition is not None else [],
            status=receipt.run.status,
        )
    )
