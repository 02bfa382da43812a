"""Routes of decisions: list, veto, release, undo, report and label."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Query
from fastapi.responses import JSONResponse
from pydantic import Field, field_validator

from evalstop_service.decisions import commands, second_person
from evalstop_service.domain.decision_commands import Undone, Vetoed
from evalstop_service.domain.decision_events import Reported
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.fields import Body, Line, Name, Plain, check_text
from evalstop_service.store import decisions
from evalstop_service.store.cases import Outcome
from evalstop_service.store.database import Database
from evalstop_service.store.queue import outbox
from evalstop_service.web.api.json_body import API, create_router
from evalstop_service.web.api.list_filters import CreatedQuery
from evalstop_service.web.api.proposals import WAITS, answer_proposal
from evalstop_service.web.api.run_views import DecisionOut, view_decisions
from evalstop_service.web.api.schemas import ActionIn, DecisionId, OutcomeIn, Page
from evalstop_service.web.context import Caller, DatabaseNow, Db, Now, Operate, Read, Report

router = create_router("decisions", prefix=f"{API}/decisions")

MAX_EXPECTED_SECONDS = 30 * 86_400.0


class ReportIn(Body):
    """The state of the job, from its receiver: the stop is in progress, the job is gone or parked, or the stop
    failed."""

    state: Literal["acknowledged", "confirmed", "parked", "failed"] = Field(
        description="acknowledged: in progress; confirmed: the job is gone; parked: it is set aside and can "
        "resume; failed: it cannot be ended or parked"
    )
    reason: Line = Field("", description="for people")
    details: dict[Annotated[str, Plain], Any] = Field(
        default_factory=dict,
        max_length=100,
        description="what the scheduler reports about the job, such as its exit status",
        examples=[{"exit_status": -15, "gone_at": "2026-01-01T00:00:00Z"}],
    )

    expected_seconds: float | None = Field(
        None,
        ge=0,
        le=MAX_EXPECTED_SECONDS,
        allow_inf_nan=False,
        description="with `acknowledged`: extra time beyond the project's `confirm_seconds`; else it means nothing",
    )

    @field_validator("details")
    @classmethod
    def check_details(cls, details: dict[str, Any]) -> dict[str, Any]:
        check_text(text := json.dumps(details, ensure_ascii=False, allow_nan=False))
        if "\\u0000" in text:  # PostgreSQL stores none
            raise ValueError("it must not contain the character NUL")
        return details


class DecisionQuery(CreatedQuery):
    """Which decisions to list, and which page."""

    state: DecisionState | None = Field(None, description="in this state")
    run_id: UUID | None = Field(None, description="on this run")
    policy: Name | None = Field(None, description="by a policy of this name")


@router.get("")
def list_decisions(caller: Read, database: Db, query: Annotated[DecisionQuery, Query()]) -> Page[DecisionOut]:
    """The project's decisions, newest first."""
    with database.reading() as tx:
        listed = decisions.list_decisions(tx, caller.project_id, **query.to_arguments())
        return Page[DecisionOut].of(view_decisions(tx, listed), query.limit)


@router.get("/{decision_id}")
def get_decision(decision_id: DecisionId, caller: Read, database: Db) -> DecisionOut:
    """A decision with its history and outcome."""
    with database.reading() as tx:
        return view_decisions(tx, [decisions.load_decision(tx, caller.project_id, decision_id)])[0]


@router.post("/{decision_id}/veto")
def veto_decision(decision_id: DecisionId, body: ActionIn, caller: Operate, database: Db, now: Now) -> DecisionOut:
    """Cancel a stop that nobody was handed yet; 409 says to whom one was handed, and when."""
    commands.apply_command(database, caller.project_id, decision_id, Vetoed(now, caller.actor, body.reason))
    return get_decision(decision_id, caller, database)


@router.post("/{decision_id}/release", response_model=DecisionOut, responses=WAITS)
def release_decision(
    decision_id: DecisionId, body: ActionIn, caller: Operate, database: Db, now: DatabaseNow
) -> DecisionOut | JSONResponse:
    """Carry out a stop that is on hold despite its guards; not while the project is paused."""
    waiting = second_person.release_stop(database, caller.author(now), decision_id, body.reason)
    return get_decision(decision_id, caller, database) if waiting is None else answer_proposal(waiting, now)


@router.post("/{decision_id}/undo")
def undo_decision(decision_id: DecisionId, body: ActionIn, caller: Operate, database: Db, now: Now) -> DecisionOut:
    """Undo a requested stop, or resume a parked job: receivers are asked to resume it if they can."""
    commands.apply_command(database, caller.project_id, decision_id, Undone(now, caller.actor, body.reason))
    return get_decision(decision_id, caller, database)


@router.post("/{decision_id}/report")
def report_decision(
    decision_id: DecisionId, body: ReportIn, caller: Report, database: Db, now: DatabaseNow
) -> DecisionOut:
    """Report the state of the job; receivers call this."""
    _require_addressed(database, caller, decision_id)
    expected_seconds = body.expected_seconds or 0.0
    report = Reported(now, DecisionState(body.state), caller.actor, body.reason, body.details, expected_seconds)
    commands.record_report(database, caller.project_id, decision_id, report)
    return get_decision(decision_id, caller, database)


@router.post("/{decision_id}/outcome")
def label_decision(decision_id: DecisionId, body: OutcomeIn, caller: Operate, database: Db, now: Now) -> DecisionOut:
    """Label whether the decision was right; a new label replaces the earlier one."""
    commands.label_decision(database, caller.project_id, decision_id, read_label(body, caller, now))
    return get_decision(decision_id, caller, database)


def read_label(body: OutcomeIn, caller: Operate, now: datetime) -> Outcome:
    """The label that the caller gives."""
    return Outcome(**body.model_dump(), actor=caller.actor, at=now)


def _require_addressed(database: Database, caller: Caller, decision_id: UUID) -> None:
    """Raise Problem when the key is bound to endpoints that the stop was not sent to."""
    if caller.key.endpoint_ids:
        with database.reading() as tx:
            decision = decisions.load_decision(tx, caller.project_id, decision_id)
            caller.require_endpoint(*outbox.list_stop_endpoints(tx, decision.run_id, decision.id))
