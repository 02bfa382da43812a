"""Decisions on which the service acts by itself: their veto window or deadline is over, or receivers refused them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.rules import decision_transitions
from evalstop_service.rules.decision_lifecycle import DecisionState, Record, Timeouts, TimePassed
from evalstop_service.rules.event_types import REQUEST_EVENTS
from evalstop_service.rules.statuses import DeliveryState
from evalstop_service.store import job_runs, runs
from evalstop_service.store.database import Transaction, read_rows
from evalstop_service.store.decisions import PENDING, SELECT, Decision, add_change, update_decision
from evalstop_service.store.tables import decisions, deliveries, endpoints, events, projects

UNSEEN = timedelta(seconds=30)
"""After this long past its end, a pending veto window means that nothing could be written, vetoes included."""


@dataclass(frozen=True)
class OverdueDecision:
    """The key of a decision whose deadline has passed or whose stop was refused."""

    deadline_at: datetime
    id: UUID
    run_id: UUID
    project_id: UUID


def request_due_decisions(tx: Transaction, now: datetime) -> int:
    """Move the decisions whose veto window is over from pending to requested, except unreadable ones; returns
    their number."""
    # In a fixed order, so that two workers cannot deadlock.
    query = SELECT.add_columns(projects.c.confirm_seconds).join(projects, projects.c.id == decisions.c.project_id)
    due = query.where(_is_due(now)).order_by(decisions.c.due_at, decisions.c.id)
    count = 0
    for row in read_rows(tx.execute(due)):
        fields = row._asdict()
        terms = Timeouts(veto_window_seconds=0.0, confirm_seconds=fields.pop("confirm_seconds"))
        decision = Decision(**fields)
        if job_runs.list_endangered_runs(tx, runs.load_run(tx, decision.project_id, decision.run_id), decision.action):
            continue  # it is about to be put on hold
        life, instructions = decision_transitions.apply_event(decision.life, TimePassed(now), terms)
        entries = [entry for entry in instructions if isinstance(entry, Record)]
        assert len(entries) == len(instructions), "the event was written when the veto window began"
        if update_decision(tx, decision, decision.moved(life, entries)):
            count += 1
            for entry in entries:
                add_change(tx, decision.run_id, decision.id, entry, now)
    return count


def is_any_unseen(tx: Transaction, now: datetime) -> bool:
    """Whether some veto window ended so long ago that the service must have been unable to write."""
    return tx.execute(sa.select(sa.exists().where(_is_due(now - UNSEEN)))).scalar_one()


def is_any_due(tx: Transaction, now: datetime) -> bool:
    """Whether any pending decision's veto window is over."""
    query = sa.exists().where(_is_due(now))
    return tx.execute(sa.select(query)).scalar_one()


def list_unheld_projects(tx: Transaction) -> list[UUID]:
    """The paused projects that have a pending decision."""
    query = sa.select(decisions.c.project_id).join(projects, projects.c.id == decisions.c.project_id)
    return list(tx.execute(query.where(PENDING, projects.c.paused_at.is_not(None)).distinct()).scalars())


def list_overdue(tx: Transaction, now: datetime, after: OverdueDecision | None = None) -> list[OverdueDecision]:
    """Decisions after the given one whose deadline has passed or whose stop was refused, by deadline."""
    table = decisions.c
    query = sa.select(table.deadline_at, table.id, table.run_id, table.project_id)
    query = query.where((table.deadline_at <= now) | _REFUSED)
    if after is not None:
        query = query.where(sa.tuple_(table.deadline_at, table.id) > (after.deadline_at, after.id))
    return [OverdueDecision(*row) for row in tx.execute(query.order_by(table.deadline_at, table.id).limit(100))]


def find_next_deadline(tx: Transaction) -> datetime | None:
    """The earliest deadline of any decision, passed or not; None when there is none."""
    query = sa.select(decisions.c.deadline_at).where(decisions.c.deadline_at.is_not(None))
    return tx.execute(query.order_by(decisions.c.deadline_at).limit(1)).scalar()


def is_any_refused(tx: Transaction) -> bool:
    """Whether any stop was refused by all receivers that it was addressed to."""
    return tx.execute(sa.select(sa.exists().where(_REFUSED))).scalar_one()


def _is_delivery(*states: DeliveryState) -> sa.ColumnElement[bool]:
    """Whether a delivery of the decision's stop to a receiver is in one of these states."""
    of_stop = sa.select(deliveries.c.id).join(
        events, (events.c.run_id == deliveries.c.run_id) & (events.c.id == deliveries.c.event_id)
    )
    return (
        of_stop.join(endpoints, endpoints.c.id == deliveries.c.endpoint_id)
        .where(
            deliveries.c.run_id == decisions.c.run_id,
            events.c.decision_id == decisions.c.id,
            events.c.type.in_(REQUEST_EVENTS),
            endpoints.c.format == "standard",
            deliveries.c.state.in_(states),
        )
        .correlate(decisions)
        .exists()
    )


_REFUSED = (
    decisions.c.deadline_at.is_not(None)
    & decisions.c.state.in_((DecisionState.REQUESTED, DecisionState.ESCALATED))
    & _is_delivery(DeliveryState.DEAD)
    & ~_is_delivery(DeliveryState.WAITING, DeliveryState.DELIVERED)
)


def _is_due(now: datetime) -> sa.ColumnElement[bool]:
    return PENDING & (decisions.c.due_at <= now)
