"""Routes of proposals: changes that wait for another person's approval."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Path, Query
from fastapi.responses import JSONResponse
from pydantic import Field

from evalstop_service.decisions import second_person
from evalstop_service.domain.statuses import ProposalState
from evalstop_service.store import proposals
from evalstop_service.store.database import Database
from evalstop_service.store.proposals import Proposal
from evalstop_service.web.api.json_body import API, create_router
from evalstop_service.web.api.list_filters import ListQuery
from evalstop_service.web.api.schemas import Answer, Page, Time, answers
from evalstop_service.web.context import Caller, Db, Now, Operate, Read, allowed

router = create_router("projects", prefix=f"{API}/proposals")

ProposalId = Annotated[UUID, Path(description="`id` of the proposal, as listed or returned with 202")]


@answers(Proposal)
class ProposalOut(Answer):
    """A proposed change, who proposed it, and who approved it."""

    summary: str = Field(
        description="the change, for people", examples=["Move policy early version 3 from shadow to canary"]
    )
    document: dict[str, Any] | None = Field(description="the policy that would be stored; null: it is about no policy")
    open_until: Time | None = Field(description="it can be confirmed until then; null: as long as its numbers hold")


def view_proposal(proposal: Proposal, now: datetime) -> ProposalOut:
    """The API's representation of a proposal."""
    return ProposalOut.model_validate(
        vars(proposal)
        | {"state": proposal.state_at(now), "open_until": proposal.open_until, "document": proposal.document}
    )


WAITS: dict[int | str, dict[str, Any]] = {
    202: {"model": ProposalOut, "description": "The change waits for a second person."}
}
"""Additional response of routes that create proposals in projects with `second_person`."""


def answer_proposal(proposal: Proposal, now: datetime) -> JSONResponse:
    """The response to a request that another person must confirm."""
    return JSONResponse(view_proposal(proposal, now).model_dump(mode="json"), 202)


class ProposalQuery(ListQuery):
    """Which proposals to list, and which page."""

    state: ProposalState | None = Field(None, description="proposals in this state")


@router.get("")
def list_proposals(caller: Read, database: Db, now: Now, query: Annotated[ProposalQuery, Query()]) -> Page[ProposalOut]:
    """The project's proposals, newest first."""
    with database.reading() as tx:
        listed = proposals.list_proposals(tx, caller.project_id, now, **query.to_arguments())
    return Page[ProposalOut].of([view_proposal(proposal, now) for proposal in listed], query.limit)


@router.get("/{proposal_id}")
def get_proposal(proposal_id: ProposalId, caller: Read, database: Db, now: Now) -> ProposalOut:
    """A proposal with its approvals."""
    with database.reading() as tx:
        return view_proposal(proposals.load_proposal(tx, caller.project_id, proposal_id), now)


@router.post("/{proposal_id}/confirm")
def confirm_proposal(proposal_id: ProposalId, caller: Operate, database: Db, now: Now) -> ProposalOut:
    """Approve someone else's proposal: the last required approval carries it out. Stops require the scope `operate`,
    everything else `admin`. Takes no body; approving twice counts once."""
    _require_scope(database, caller, proposal_id)
    return view_proposal(second_person.confirm_proposal(database, caller.author(now), proposal_id), now)


@router.post("/{proposal_id}/refuse")
def refuse_proposal(proposal_id: ProposalId, caller: Operate, database: Db, now: Now) -> ProposalOut:
    """Refuse a proposal, or withdraw your own, with the same scopes. Takes no body."""
    _require_scope(database, caller, proposal_id)
    return view_proposal(second_person.refuse_proposal(database, caller.author(now), proposal_id), now)


def _require_scope(database: Database, caller: Caller, proposal_id: UUID) -> None:
    with database.reading() as tx:
        proposal = proposals.load_proposal(tx, caller.project_id, proposal_id)
    if proposal.kind.needs_admin:
        allowed(caller.key, "admin")
