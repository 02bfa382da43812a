"""Decisions: listed, vetoed, released and undone by people, reported on by receivers, judged."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import Field, field_validator, model_validator

from evalstop_service.decisions import commands
from evalstop_service.errors import NotFound
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.rules.fields import check_text
from evalstop_service.store import decisions
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.web.api.reading.json_body import JsonRoute
from evalstop_service.web.api.run_views import (
    DecisionOut,
    DecisionPage,
    OutcomesOut,
    decision_out,
    next_cursor,
    outcomes_out,
)
from evalstop_service.web.api.schemas import Body, Line, Name, OutcomeIn, WordIn
from evalstop_service.web.context import Db, Now, Operate, Read

router = APIRouter(prefix="/decisions", tags=["decisions"], route_class=JsonRoute)


LONGEST_EXPECTED_SECONDS = 30 * 86_400.0


class ReportIn(Body):
    """What a receiver sees of the job: its end is under way, it is gone, or it cannot be ended."""

    state: Literal["acknowledged", "confirmed", "failed"]
    actor: Name | None = Field(None, description="by default the name of the key")
    reason: Line = ""
    details: dict[str, Any] = Field(
        default_factory=dict, max_length=100, examples=[{"exit_status": -15, "ended_at": "2026-01-01T00:00:00Z"}]
    )

    expected_seconds: float | None = Field(
        None,
        ge=0,
        le=LONGEST_EXPECTED_SECONDS,
        allow_inf_nan=False,
        description="with `acknowledged`: so much longer than the project's `confirm_seconds` it may take",
    )

    @model_validator(mode="after")
    def expected_of_what_is_under_way(self) -> ReportIn:
        if self.expected_seconds is not None and self.state != "acknowledged":
            raise ValueError(f"expected_seconds goes with acknowledged, not with {self.state}")
        return self

    @field_validator("details")
    @classmethod
    def storable(cls, details: dict[str, Any]) -> dict[str, Any]:
        _check(details, depth=8)
        return details


@router.get("")
def list_decisions(
    caller: Read,
    database: Db,
    state: DecisionState | None = None,
    run_id: UUID | None = None,
    cursor: UUID | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> DecisionPage:
    """The project's decisions, newest first."""
    with database.reading() as tx:
        found = decisions.list_decisions(tx, caller.project_id, state=state, run_id=run_id, before=cursor, limit=limit)
        items = [decision_out(tx, decision) for decision in found]
    return DecisionPage(items=items, next_cursor=next_cursor(found, limit))


@router.get("/{decision_id}")
def get_decision(decision_id: UUID, caller: Read, database: Db) -> DecisionOut:
    """A decision with its history and outcome."""
    return _answer(database, caller.project_id, decision_id)


@router.post("/{decision_id}/veto")
def veto(decision_id: UUID, body: WordIn, caller: Operate, database: Db, now: Now) -> DecisionOut:
    """Let the run go on; possible while the stop is on hold or pending."""
    said_by = body.actor or caller.actor
    decision = commands.veto_decision(
        database, caller.project_id, decision_id, said_by, body.reason, now, proved=caller.actor
    )
    return _view(database, decision)


@router.post("/{decision_id}/release")
def release(decision_id: UUID, body: WordIn, caller: Operate, database: Db, now: Now) -> DecisionOut:
    """Have an on-hold stop carried out despite what speaks against it; not while the project is paused."""
    said_by = body.actor or caller.actor
    decision = commands.release_decision(
        database, caller.project_id, decision_id, said_by, body.reason, now, proved=caller.actor
    )
    return _view(database, decision)


@router.post("/{decision_id}/undo")
def undo(decision_id: UUID, body: WordIn, caller: Operate, database: Db, now: Now) -> DecisionOut:
    """Take back a stop that was handed out: receivers are asked to let the job go on, where its scheduler can."""
    said_by = body.actor or caller.actor
    decision = commands.undo_decision(
        database, caller.project_id, decision_id, said_by, body.reason, now, proved=caller.actor
    )
    return _view(database, decision)


@router.post("/{decision_id}/report")
def report(decision_id: UUID, body: ReportIn, caller: Operate, database: Db, now: Now) -> DecisionOut:
    """Say what becomes of the job; receivers call this."""
    said = commands.Report(
        DecisionState(body.state), body.actor or caller.actor, body.reason, body.details, body.expected_seconds or 0.0
    )
    return _view(database, commands.record_report(database, caller.project_id, decision_id, said, now))


@router.get("/{decision_id}/outcomes")
def list_outcomes(decision_id: UUID, caller: Read, database: Db) -> OutcomesOut:
    """All that was ever said of the attempt that the decision is about, by people and by later evals."""
    with database.reading() as tx:
        decision = _found(tx, caller.project_id, decision_id)
        return outcomes_out(tx, decision.run_id, decision.attempt)


@router.post("/{decision_id}/outcome")
def judge(decision_id: UUID, body: OutcomeIn, caller: Operate, database: Db, now: Now) -> DecisionOut:
    """Say whether the decision was right; changing one's mind adds a row."""
    decision = commands.record_decision_outcome(
        database,
        caller.project_id,
        decision_id,
        outcome=body.outcome,
        turn_step=body.turn_step,
        actor=body.actor or caller.actor,
        note=body.note,
        now=now,
        proved=caller.actor,
    )
    return _view(database, decision)


def _answer(database: Database, project_id: UUID, decision_id: UUID) -> DecisionOut:
    with database.reading() as tx:
        return decision_out(tx, _found(tx, project_id, decision_id))


def _found(tx: Transaction, project_id: UUID, decision_id: UUID) -> Decision:
    decision = decisions.find_decision(tx, project_id, decision_id)
    if decision is None:
        raise NotFound(f"there is no decision {decision_id} in this project")
    return decision


def _view(database: Database, decision: Decision) -> DecisionOut:
    with database.reading() as tx:
        return decision_out(tx, decision)


def _check(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError("it may be nested 8 deep")
    match value:
        case dict():
            for key, item in value.items():
                _check(key, depth - 1)
                _check(item, depth - 1)
        case list():
            for item in value:
                _check(item, depth - 1)
        case str():
            check_text(value)
        case float() if value != value or value in (float("inf"), float("-inf")):
            raise ValueError("NaN and the infinities go as strings")
