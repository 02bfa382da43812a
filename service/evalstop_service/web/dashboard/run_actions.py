"""Forms that act on a run: stop it, veto, release or undo its decision, label its outcome."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Form, Response

from evalstop_service.decisions import commands
from evalstop_service.rules.statuses import DecisionOutcome
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.web.dashboard import forms
from evalstop_service.web.dashboard.responses import PageRoute
from evalstop_service.web.dashboard.visitor import Operator, Site, SiteOf, Visitor

router = APIRouter(route_class=PageRoute)

Reason = Annotated[str, Form()]
Note = Annotated[str, Form()]
Next = Annotated[str, Form(alias="next")]
"""The page to return to; by default the run's."""

Outcome = Annotated[DecisionOutcome, Form()]


@router.post("/decisions/{decision_id}/veto")
def veto_stop(decision_id: UUID, site: SiteOf, visitor: Operator, reason: Reason = "", target: Next = "") -> Response:
    """Cancel a stop that is on hold or pending."""
    return _act_on_decision(commands.veto_decision, decision_id, site, visitor, reason, target)


@router.post("/decisions/{decision_id}/release")
def release_stop(
    decision_id: UUID, site: SiteOf, visitor: Operator, reason: Reason = "", target: Next = ""
) -> Response:
    """Carry out a stop that is on hold."""
    return _act_on_decision(commands.release_decision, decision_id, site, visitor, reason, target)


@router.post("/decisions/{decision_id}/undo")
def undo_stop(decision_id: UUID, site: SiteOf, visitor: Operator, reason: Reason = "", target: Next = "") -> Response:
    """Take back a stop that was requested."""
    return _act_on_decision(commands.undo_decision, decision_id, site, visitor, reason, target)


@router.post("/runs/{run_id}/stop")
def stop_run(run_id: UUID, site: SiteOf, visitor: Operator, reason: Reason = "", target: Next = "") -> Response:
    """Stop a run now."""
    commands.stop_run(
        site.database, visitor.project.id, run_id, visitor.actor, forms.parse_reason(reason), site.clock()
    )
    return forms.redirect_back(run_id, target)


@router.post("/runs/{run_id}/outcome")
def label_run(
    run_id: UUID,
    site: SiteOf,
    visitor: Operator,
    outcome: Outcome,
    turn_step: Annotated[str, Form()] = "",
    note: Note = "",
    target: Next = "",
) -> Response:
    """Label whether it was right to let a run continue that was never flagged."""
    commands.record_run_outcome(
        site.database,
        visitor.project.id,
        run_id,
        outcome=outcome,
        turn_step=forms.parse_step(turn_step),
        actor=visitor.actor,
        note=forms.parse_note(note),
        now=site.clock(),
    )
    return forms.redirect_back(run_id, target)


@router.post("/decisions/{decision_id}/outcome")
def label_decision(
    decision_id: UUID,
    site: SiteOf,
    visitor: Operator,
    outcome: Outcome,
    turn_step: Annotated[str, Form()] = "",
    note: Note = "",
    target: Next = "",
) -> Response:
    """Label whether a decision was right."""
    decision = commands.record_decision_outcome(
        site.database,
        visitor.project.id,
        decision_id,
        outcome=outcome,
        turn_step=forms.parse_step(turn_step),
        actor=visitor.actor,
        note=forms.parse_note(note),
        now=site.clock(),
    )
    return forms.redirect_back(decision.run_id, target)


def _act_on_decision(
    act: Callable[[Database, UUID, UUID, str, str, datetime], Decision],
    decision_id: UUID,
    site: Site,
    visitor: Visitor,
    reason: str,
    target: str,
) -> Response:
    decision = act(
        site.database, visitor.project.id, decision_id, visitor.actor, forms.parse_reason(reason), site.clock()
    )
    return forms.redirect_back(decision.run_id, target)
