"""What a visitor does about a run: stop and label it, veto, release and undo its decisions, by forms on any page."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Form, Response

from evalstop_service.decisions import commands
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.web.dashboard import forms
from evalstop_service.web.dashboard.responses import PageRoute
from evalstop_service.web.dashboard.visitor import Operating, Site, SiteOf, Visitor

router = APIRouter(route_class=PageRoute)

Why = Annotated[str, Form(alias="reason")]
Note = Annotated[str, Form()]
Next = Annotated[str, Form(alias="next")]
"""The page to go back to; by default the run's."""

Said = Annotated[Literal["right", "wrong", "unknown"], Form()]


@router.post("/decisions/{decision_id}/veto")
def veto(decision_id: UUID, site: SiteOf, visitor: Operating, why: Why = "", target: Next = "") -> Response:
    """Let the run go on."""
    return _do(commands.veto_decision, decision_id, site, visitor, why, target)


@router.post("/decisions/{decision_id}/release")
def release(decision_id: UUID, site: SiteOf, visitor: Operating, why: Why = "", target: Next = "") -> Response:
    """Have an on-hold stop carried out."""
    return _do(commands.release_decision, decision_id, site, visitor, why, target)


@router.post("/decisions/{decision_id}/undo")
def undo(decision_id: UUID, site: SiteOf, visitor: Operating, why: Why = "", target: Next = "") -> Response:
    """Take back a stop that was handed out."""
    return _do(commands.undo_decision, decision_id, site, visitor, why, target)


@router.post("/runs/{run_id}/stop")
def stop(run_id: UUID, site: SiteOf, visitor: Operating, why: Why = "", target: Next = "") -> Response:
    """Have a run stopped at once."""
    commands.stop_run(site.database, visitor.project.id, run_id, visitor.actor, forms.reason(why), site.clock())
    return forms.back(run_id, target)


@router.post("/runs/{run_id}/outcome")
def judge_run(
    run_id: UUID,
    site: SiteOf,
    visitor: Operating,
    outcome: Said,
    turn_step: Annotated[str, Form()] = "",
    note: Note = "",
    target: Next = "",
) -> Response:
    """Say whether it was right to let a run go on that was never flagged."""
    commands.record_run_outcome(
        site.database,
        visitor.project.id,
        run_id,
        outcome=outcome,
        turn_step=forms.step(turn_step),
        actor=visitor.actor,
        note=forms.note(note),
        now=site.clock(),
    )
    return forms.back(run_id, target)


@router.post("/decisions/{decision_id}/outcome")
def judge(
    decision_id: UUID,
    site: SiteOf,
    visitor: Operating,
    outcome: Said,
    turn_step: Annotated[str, Form()] = "",
    note: Note = "",
    target: Next = "",
) -> Response:
    """Say whether the decision was right."""
    decision = commands.record_decision_outcome(
        site.database,
        visitor.project.id,
        decision_id,
        outcome=outcome,
        turn_step=forms.step(turn_step),
        actor=visitor.actor,
        note=forms.note(note),
        now=site.clock(),
    )
    return forms.back(decision.run_id, target)


def _do(
    act: Callable[[Database, UUID, UUID, str, str, datetime], Decision],
    decision_id: UUID,
    site: Site,
    visitor: Visitor,
    why: str,
    target: str,
) -> Response:
    decision = act(site.database, visitor.project.id, decision_id, visitor.actor, forms.reason(why), site.clock())
    return forms.back(decision.run_id, target)
