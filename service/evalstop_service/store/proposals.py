"""Proposals that wait for confirmation, and what became of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.statuses import PROPOSAL_OPEN_FOR, ProposalKind, ProposalState
from evalstop_service.errors import require
from evalstop_service.store.database import Transaction, find_all, find_one, find_page, insert_if_new
from evalstop_service.store.tables import proposals
from evalstop_service.store.tables.projects import Approval as Approval
from evalstop_service.store.tables.projects import Proposal as Proposal


def add_proposal(tx: Transaction, proposal: Proposal) -> bool:
    """Store a new proposal; False if an open one of the same kind and subject exists."""
    return insert_if_new(tx, proposals, vars(proposal))


def add_approval(tx: Transaction, proposal: Proposal, approval: Approval) -> Proposal | None:
    """Store another approval of an open proposal; None if it has changed since it was read."""
    query = sa.select(proposals).where(*_of(proposal.project_id, proposal.id)).with_for_update()
    if find_one(tx, Proposal, query) != proposal:
        return None
    approved = replace(proposal, approvals=(*proposal.approvals, approval))
    tx.execute(proposals.update().where(*_of(proposal.project_id, proposal.id)).values(approvals=approved.approvals))
    return approved


def close_proposal(tx: Transaction, proposal: Proposal, state: ProposalState, now: datetime) -> bool:
    """Close an open proposal, with its approvals; False if it was closed already."""
    query = proposals.update().where(*_of(proposal.project_id, proposal.id), proposals.c.state == ProposalState.OPEN)
    return tx.execute(query.values(state=state, approvals=proposal.approvals, closed_at=now)).rowcount > 0


def load_proposal(tx: Transaction, project_id: UUID, proposal_id: UUID) -> Proposal:
    """The proposal with this id; raises NotFound."""
    proposal = find_one(tx, Proposal, sa.select(proposals).where(*_of(project_id, proposal_id)))
    return require(proposal, f"proposal {proposal_id} in this project")


def find_newest(tx: Transaction, project_id: UUID, kind: ProposalKind, subject: str) -> Proposal | None:
    """The open proposal about a subject, if there is one, else the newest by id."""
    query = sa.select(proposals).where(
        proposals.c.project_id == project_id, proposals.c.kind == kind, proposals.c.subject == subject
    )
    # Not by id alone: the clock of the replica that gave the open one its id may be behind.
    order = ((proposals.c.state == ProposalState.OPEN).desc(), proposals.c.id.desc())
    return find_one(tx, Proposal, query.order_by(*order).limit(1))


def list_proposals(
    tx: Transaction,
    project_id: UUID,
    now: datetime,
    *,
    state: ProposalState | None = None,
    before: UUID | None = None,
    limit: int = 50,
) -> list[Proposal]:
    """The proposals of a project that are in this state now, newest first, before the proposal `before`."""
    query = sa.select(proposals).where(proposals.c.project_id == project_id)
    if state is not None:
        query = query.where(_is_in_state(state, now - PROPOSAL_OPEN_FOR))
    return find_page(tx, Proposal, query, proposals.c.id, before, limit)


def list_open(tx: Transaction, project_id: UUID, now: datetime, subjects: Collection[str]) -> list[Proposal]:
    """The proposals about these subjects that can be confirmed, newest first: at most one of each kind."""
    query = sa.select(proposals).where(
        proposals.c.project_id == project_id,
        proposals.c.subject.in_(subjects),
        _is_in_state(ProposalState.OPEN, now - PROPOSAL_OPEN_FOR),
    )
    return find_all(tx, Proposal, query.order_by(proposals.c.id.desc()))


def _is_in_state(state: ProposalState, expired_at: datetime) -> sa.ColumnElement[bool]:
    """As in `Proposal.state_at`: nothing is written when a proposal expires. `expired_at`: when the latest that has
    expired was created."""
    over = (proposals.c.kind != ProposalKind.RAISE_STAGE) & (proposals.c.created_at <= expired_at)
    expired = (proposals.c.state == ProposalState.OPEN) & over
    in_state = proposals.c.state == state
    return in_state | expired if state is ProposalState.EXPIRED else in_state & ~expired


def _of(project_id: UUID, proposal_id: UUID) -> tuple[sa.ColumnElement[bool], ...]:
    return proposals.c.project_id == project_id, proposals.c.id == proposal_id
