"""The response to a batch of observations, the same for every way to post one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec
from msgspec import Struct

from evalstop_service.ingest import Receipt, ValueConflict
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.rules.run_results import BestCheckpoint, Verdict
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.store.eval_requests import EvalRequest
from evalstop_service.web.api.schemas import encode_number

MOST_CONFLICTS = 100

_encode = msgspec.json.Encoder().encode


class _Conflict(Struct):
    metric: str
    step: int
    stored_value: float | str
    sent_value: float | str


class _Decision(Struct):
    id: UUID
    state: DecisionState
    state_reason: str
    guard_kinds: list[str]


class _EvalRequest(Struct):
    id: UUID
    step: int
    best_checkpoint: dict[str, int | str]
    multiplier: int
    seed: int
    deadline_at: datetime


class _ObservationResult(Struct):
    accepted: int
    duplicates: int
    conflict_count: int
    conflicts: list[_Conflict]
    verdict: Verdict
    should_stop: bool
    decision: _Decision | None
    best_checkpoint: BestCheckpoint | None
    guessed: list[str]
    missing: dict[str, str]
    unwatched: list[str]
    status: RunStatus
    eval_request: _EvalRequest | None


def receipt_json(receipt: Receipt, now: datetime) -> bytes:
    """The result of a batch and the resulting state of the run, as JSON."""
    decision, request = receipt.decision, receipt.eval_request
    return _encode(
        _ObservationResult(
            accepted=receipt.accepted,
            duplicates=receipt.duplicates,
            conflict_count=len(receipt.conflicts),
            conflicts=_describe_conflicts(receipt.conflicts) if receipt.conflicts else [],
            verdict=receipt.run.verdict.for_json,
            should_stop=decision is not None and decision.stops(now),
            decision=None
            if decision is None
            else _Decision(decision.id, decision.state, decision.state_reason, decision.guard_kinds),
            best_checkpoint=receipt.run.best_checkpoint,
            guessed=receipt.run.recognition.guessed if receipt.run.recognition is not None else [],
            missing=receipt.missing,
            unwatched=receipt.unwatched,
            status=receipt.run.status,
            eval_request=None if request is None or not request.is_open(now) else _describe_request(request),
        )
    )


def _describe_conflicts(conflicts: Sequence[ValueConflict]) -> list[_Conflict]:
    return [
        _Conflict(item.point.metric, item.point.step, encode_number(item.stored_value), encode_number(item.point.value))
        for item in conflicts[:MOST_CONFLICTS]
    ]


def _describe_request(request: EvalRequest) -> _EvalRequest:
    best: dict[str, int | str] = {"step": request.best_step, "uri": request.best_uri}
    return _EvalRequest(request.id, request.step, best, request.multiplier, request.seed, request.deadline_at)
