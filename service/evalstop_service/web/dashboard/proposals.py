"""Forms that confirm or refuse a proposal, and the proposals that pages show."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Form, Response
from fastapi.responses import RedirectResponse

from evalstop_service.decisions import second_person
from evalstop_service.security.scopes import VisitorRole
from evalstop_service.store import proposals
from evalstop_service.web.dashboard import forms
from evalstop_service.web.dashboard.responses import Forbidden, PageRoute, SignInOutdated
from evalstop_service.web.dashboard.sign_in import safe_path
from evalstop_service.web.dashboard.visitor import Operator, Site, SiteOf, Visitor

router = APIRouter(prefix="/proposals/{proposal_id}", route_class=PageRoute)

QUEUE = "/#queue"

Next = Annotated[str, Form(alias="next")]
"""The page to return to."""


@router.post("/confirm")
def confirm_proposal(
    proposal_id: UUID, site: SiteOf, visitor: Operator, reason: Annotated[str, Form()] = "", target: Next = QUEUE
) -> Response:
    """Confirm a proposal of another person, or of the service."""
    _require_right(proposal_id, site, visitor, target)
    note = forms.parse_note(reason)
    second_person.confirm_proposal(site.database, visitor.author(site.clock()), proposal_id, note)
    return RedirectResponse(safe_path(target), 303)


@router.post("/refuse")
def refuse_proposal(proposal_id: UUID, site: SiteOf, visitor: Operator, target: Next = QUEUE) -> Response:
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
