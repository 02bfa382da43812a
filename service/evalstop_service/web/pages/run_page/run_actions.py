"""Forms that act on a run: stop it, veto, release or undo its decision, label, describe, correct its metric roles; and
forms that confirm or refuse a proposal.
"""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from evalstop_detectors import ROLES
from fastapi import APIRouter, Depends, Form, Request, Response
from fastapi.responses import RedirectResponse

from evalstop_service.decisions import commands, second_person
from evalstop_service.domain.decision_commands import Undone, Vetoed
from evalstop_service.domain.fields import remove_controls
from evalstop_service.domain.run import LONGEST_STEP_NOTE, DescriptionIn, MetricFields
from evalstop_service.domain.statuses import DecisionOutcome
from evalstop_service.errors import Invalid
from evalstop_service.ingest import Message, RolesCorrected
from evalstop_service.projects.project_settings import parse_form
from evalstop_service.runs.descriptions import add_step_note, describe_run, remove_step_note
from evalstop_service.security.scopes import VisitorRole
from evalstop_service.store import decisions, proposals
from evalstop_service.store.cases import Outcome
from evalstop_service.web.pages import forms
from evalstop_service.web.pages.responses import Forbidden, PageRoute, SignInOutdated
from evalstop_service.web.pages.sign_in import safe_path
from evalstop_service.web.pages.visitor import Operator, Site, SiteOf, Visitor

router = APIRouter(route_class=PageRoute)

Text = Annotated[str, Form()]
Next = Annotated[str, Form(alias="next")]
"""The page to return to; by default that of the run, or of the queue."""


async def _read_label(
    site: SiteOf,
    visitor: Operator,
    outcome: Annotated[DecisionOutcome, Form()],
    turn_step: Text = "",
    note: Text = "",
) -> Outcome:
    """The label, given now by this visitor; raises Invalid for a turn that is no step."""
    step, text = forms.parse_step(turn_step), forms.parse_note(note)
    return Outcome(outcome=outcome, turn_step=step, note=text, actor=visitor.actor, at=site.clock())


LabelOf = Annotated[Outcome, Depends(_read_label)]


@router.post("/decisions/{decision_id}/outcome")
def label_decision(decision_id: UUID, site: SiteOf, visitor: Operator, label: LabelOf, target: Next = "") -> Response:
    """Label whether a decision was right."""
    decision = commands.label_decision(site.database, visitor.project.id, decision_id, label)
    return forms.redirect_back(decision.run_id, target)


@router.post("/runs/{run_id}/outcome")
def label_run(run_id: UUID, site: SiteOf, visitor: Operator, label: LabelOf, target: Next = "") -> Response:
    """Label whether letting a run continue that was never flagged was right."""
    commands.label_run(site.database, visitor.project.id, run_id, label)
    return forms.redirect_back(run_id, target)


@router.post("/decisions/{decision_id}/veto")
@router.post("/decisions/{decision_id}/release")
@router.post("/decisions/{decision_id}/undo")
def act_on_decision(
    request: Request, decision_id: UUID, site: SiteOf, visitor: Operator, reason: Text = "", target: Next = ""
) -> Response:
    """Veto a stop that nobody was handed yet, carry out one that is on hold, or undo one."""
    now, action = site.context.read_time(), request.url.path.rpartition("/")[2]
    reason = forms.parse_reason(reason)
    if action == "release":
        second_person.release_stop(site.database, visitor.author(now), decision_id, reason)
    else:
        command = Vetoed if action == "veto" else Undone
        commands.apply_command(site.database, visitor.project.id, decision_id, command(now, visitor.actor, reason))
    with site.database.reading() as tx:
        decision = decisions.load_decision(tx, visitor.project.id, decision_id)
    return forms.redirect_back(decision.run_id, target)


@router.post("/runs/{run_id}/stop")
def stop_run(run_id: UUID, site: SiteOf, visitor: Operator, reason: Text = "", target: Next = "") -> Response:
    """Stop a run now, or propose it."""
    author = visitor.author(site.context.read_time())
    second_person.stop_run(site.database, author, run_id, forms.parse_reason(reason))
    return forms.redirect_back(run_id, target)


@router.post("/runs/{run_id}/description")
def describe(
    run_id: UUID, site: SiteOf, visitor: Operator, owner: Text = "", group: Text = "", tags: Text = "", notes: Text = ""
) -> Response:
    """Change the description of a run; empty fields are removed. One tag per line."""
    fields = {
        "owner": forms.clean_text(owner) or None,
        "group": forms.clean_text(group) or None,
        "tags": [tag for line in tags.split("\n") if (tag := forms.clean_text(line))],
        "notes": notes.replace("\r\n", "\n").strip(),
    }
    describe_run(site.database, visitor.author(site.clock()), run_id, parse_form(DescriptionIn, fields).change)
    return forms.redirect_back(run_id, "")


@router.post("/runs/{run_id}/notes")
def add_note(run_id: UUID, site: SiteOf, visitor: Operator, step: Text = "", text: Text = "") -> Response:
    """Add a note at a step of a run."""
    at, note = forms.parse_step(step), forms.clean_text(text)[:LONGEST_STEP_NOTE]
    if at is None or not note:
        raise Invalid("enter a step and a note")
    add_step_note(site.database, visitor.author(site.clock()), run_id, at, note)
    return forms.redirect_back(run_id, "")


@router.post("/runs/{run_id}/notes/{note_id}/remove")
def remove_note(run_id: UUID, note_id: UUID, site: SiteOf, visitor: Operator) -> Response:
    """Remove a note from a run."""
    remove_step_note(site.database, visitor.author(site.clock()), run_id, note_id)
    return forms.redirect_back(run_id, "")


HINTS = {str(role): traits.meaning for role, traits in ROLES.items() if traits.hints}
"""The roles that may only raise a suspicion."""

_MINIMIZED = ("kl", "loss")


async def _read_roles(request: Request) -> dict[str, MetricFields]:
    """What a form says: a field for each role has the names of its metrics. Raises Invalid."""
    form, metrics = await request.form(), dict[str, MetricFields]()
    for role in ("eval", "proxy", *_MINIMIZED, *HINTS):
        direction = "minimize" if role in _MINIMIZED or f"{role}_lower" in form else "maximize"
        for metric in form.getlist(role):
            name = remove_controls(str(metric))[:256]  # not stripped: spaces are part of a logged name
            if name in metrics:
                raise Invalid(f"{name!r} is chosen for two roles; a metric has one role")
            if name:
                metrics[name] = {"role": role, "direction": direction}
    return metrics


@router.post("/runs/{run_id}/metrics")
def correct_roles(
    run_id: UUID, site: SiteOf, visitor: Operator, metrics: Annotated[dict[str, MetricFields], Depends(_read_roles)]
) -> Response:
    """Set the roles of all metrics of a run. The run is judged again from its first observation."""
    if not visitor.may_correct_roles:
        raise Forbidden("This project asks for a second person: only admins correct the roles of metrics.")
    with site.database.reading() as tx:
        visitor.load_run(tx, run_id)
    site.context.committer.submit_and_wait(Message(visitor.project.id, run_id, RolesCorrected(metrics, visitor.actor)))
    return forms.redirect_back(run_id, "")


@router.post("/proposals/{proposal_id}/confirm")
def confirm_proposal(proposal_id: UUID, site: SiteOf, visitor: Operator, target: Next = forms.QUEUE) -> Response:
    """Confirm a proposal of another person, or of the service."""
    _require_right(proposal_id, site, visitor, target)
    second_person.confirm_proposal(site.database, visitor.author(site.clock()), proposal_id)
    return RedirectResponse(safe_path(target), 303)


@router.post("/proposals/{proposal_id}/refuse")
def refuse_proposal(proposal_id: UUID, site: SiteOf, visitor: Operator, target: Next = forms.QUEUE) -> Response:
    """Refuse a proposal, or withdraw your own."""
    _require_right(proposal_id, site, visitor, target)
    second_person.refuse_proposal(site.database, visitor.author(site.clock()), proposal_id)
    return RedirectResponse(safe_path(target), 303)


def _require_right(proposal_id: UUID, site: Site, visitor: Visitor, target: str) -> None:
    """Raise unless the visitor may answer the proposal; one that allows more stops needs an admin who has just signed
    in."""
    with site.database.reading() as tx:
        proposal = proposals.load_proposal(tx, visitor.project.id, proposal_id)
    if proposal.kind.needs_admin:
        if not visitor.role.covers(VisitorRole.ADMIN):
            raise Forbidden(f"You are signed in as {visitor.role}. This needs the role admin.")
        if not visitor.has_just_signed_in(site.clock()):
            raise SignInOutdated(safe_path(target))
