"""Decisions on which the service acts by itself: their veto window or deadline is over, or receivers refused them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import SERVICE, DecisionState, Record
from evalstop_service.domain.event_types import REQUEST_EVENTS
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.store import runs
from evalstop_service.store.database import Transaction, save_row
from evalstop_service.store.decisions import PENDING, add_change
from evalstop_service.store.tables import UtcTime, decisions, deliveries, endpoints, events, projects, veto_listeners


@dataclass(frozen=True)
class PendingDecision:
    """The key of a decision whose veto window is open, and the length of a window in its project."""

    id: UUID
    run_id: UUID
    project_id: UUID
    window_seconds: float


@dataclass(frozen=True)
class OverdueDecision:
    """The key of a decision whose deadline has passed or whose stop was refused."""

    deadline_at: datetime
    id: UUID
    run_id: UUID
    project_id: UUID


def read_windows(tx: Transaction, now: datetime) -> tuple[datetime | None, datetime | None]:
    """The earliest end of an open veto window, or time when a stop was asked for, and the next end after `now`; None:
    there is none."""
    of_pending = sa.select(sa.func.min(decisions.c.due_at)).where(PENDING)
    earliest = of_pending.scalar_subquery()
    following = of_pending.where(decisions.c.due_at > now).scalar_subquery()
    asked = sa.select(sa.func.min(decisions.c.asked_at)).where(
        decisions.c.asked_at.is_not(None), decisions.c.handed_over_at.is_(None)
    )
    first, after, asked_at = tx.execute(sa.select(earliest, following, asked.scalar_subquery())).one()
    return min(filter(None, (first, asked_at)), default=None), after


def read_heard_until(tx: Transaction) -> datetime | None:
    """Until when all listeners have heard vetoes; None: there is no listener."""
    heard_until: datetime | None = tx.execute(sa.select(sa.func.min(veto_listeners.c.heard_until))).scalar_one()
    return heard_until


def list_windows_over(tx: Transaction, heard_until: datetime, limit: int) -> list[PendingDecision]:
    """Up to `limit` pending decisions whose windows ended until then, oldest first."""
    query = _PENDING_DECISIONS.where(decisions.c.due_at <= heard_until)
    rows = tx.execute(query.order_by(decisions.c.due_at, decisions.c.id).limit(limit)).all()
    return [PendingDecision(*row) for row in rows]


def extend_windows(
    tx: Transaction, now: datetime, longest_seconds: float, project_ids: Collection[UUID] | None, reason: str
) -> int:
    """Keep the open windows of these projects (None: of all) open for another window, at most `longest_seconds`;
    returns how many end later now. Runs are locked first, in the order of their ids.
    """
    query = _PENDING_DECISIONS.where(decisions.c.due_at < now + timedelta(seconds=longest_seconds))
    if project_ids is not None:
        query = query.where(decisions.c.project_id.in_(project_ids))
    ending = [PendingDecision(*row) for row in tx.execute(query.order_by(decisions.c.run_id)).all()]
    runs.lock_runs(tx, [decision.run_id for decision in ending])
    extended = 0
    for decision in ending:
        until = now + timedelta(seconds=min(longest_seconds, decision.window_seconds))
        row = {"of_run": decision.run_id, "of_id": decision.id, "until": until}
        if tx.execute(_EXTEND, row).rowcount:
            extended += 1
            add_change(tx, decision.run_id, decision.id, Record(DecisionState.PENDING, SERVICE, reason), now)
    return extended


def read_listeners(tx: Transaction) -> dict[UUID, datetime]:
    """Until when each listener has heard vetoes."""
    return {row.id: row.heard_until for row in tx.execute(sa.select(veto_listeners))}


def save_listener(tx: Transaction, listener_id: UUID, heard_until: datetime) -> None:
    """Record until when a listener has heard vetoes."""
    save_row(tx, veto_listeners, {"id": listener_id, "heard_until": heard_until})


def remove_listeners(tx: Transaction, listener_ids: Collection[UUID]) -> None:
    """Remove listeners that ended or were lost."""
    tx.execute(veto_listeners.delete().where(veto_listeners.c.id.in_(listener_ids)))


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

_EXTEND = (
    decisions.update()
    .where(
        decisions.c.run_id == sa.bindparam("of_run"),
        decisions.c.id == sa.bindparam("of_id"),
        decisions.c.due_at < sa.bindparam("until", type_=UtcTime),
        PENDING,
    )
    .values(due_at=sa.bindparam("until", type_=UtcTime))
)

_PENDING_DECISIONS = (
    sa.select(decisions.c.id, decisions.c.run_id, decisions.c.project_id, projects.c.veto_window_seconds)
    .join(projects, projects.c.id == decisions.c.project_id)
    .where(PENDING)
)
