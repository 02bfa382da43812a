"""Replays: new deliveries of past events, under their original event ids.

A stop is replayed only while it still holds: the decision is to end the job, and the run has not resumed in a new
attempt. `run.resume_requested` is replayed only while the stop is taken back, `run.stop_pending` only while people can
veto it. Otherwise a replay could end a job that a person let continue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import STOPPING, DecisionState
from evalstop_service.domain.event_types import PENDING_EVENTS, REQUEST_EVENTS, EventType
from evalstop_service.store.database import Transaction
from evalstop_service.store.queue import outbox
from evalstop_service.store.tables import decisions, events, runs


@dataclass(frozen=True)
class Replay:
    """The new deliveries, how many events were `passed_over`, and the last event examined if there may be more."""

    deliveries: Sequence[UUID]
    passed_over: int
    last: UUID | None


def replay_range(
    tx: Transaction,
    project_id: UUID,
    endpoint_id: UUID,
    *,
    since: datetime,
    until: datetime,
    types: Iterable[str] | None,
    after: UUID | None,
    limit: int,
    now: datetime,
) -> Replay:
    """Replay the events of a project from `since` to before `until`, oldest first, at most `limit` of them.

    `types`: only these. `after`: only events after this one, to continue an earlier replay.
    """
    query = _select_events(project_id).where(events.c.created_at >= since, events.c.created_at < until)
    if types is not None:
        query = query.where(events.c.type.in_(list(types)))
    if after is not None:
        query = query.where(events.c.id > after)
    replayed = tx.execute(query.order_by(events.c.id).limit(limit)).all()
    delivery_ids = _send_events(tx, endpoint_id, replayed, now)
    return Replay(delivery_ids, len(replayed) - len(delivery_ids), replayed[-1].id if len(replayed) == limit else None)


def replay_event(tx: Transaction, project_id: UUID, endpoint_id: UUID, event_id: UUID, now: datetime) -> UUID | None:
    """Replay one event; returns the new delivery. None: there is no such event, or it no longer holds."""
    delivery_ids = _send_events(
        tx, endpoint_id, tx.execute(_select_events(project_id).where(events.c.id == event_id)).all(), now
    )
    return delivery_ids[0] if delivery_ids else None


def may_replay(tx: Transaction, project_id: UUID, event_id: UUID) -> bool:
    """Whether an event may be replayed now. Only events about stops are ever denied: when they no longer
    hold."""
    return bool(_list_holding_events(tx, tx.execute(_select_events(project_id).where(events.c.id == event_id)).all()))


def _select_events(project_id: UUID) -> sa.Select[Any]:
    columns = (events.c.run_id, events.c.id, events.c.type, events.c.decision_id)
    return sa.select(*columns).where(events.c.project_id == project_id)


def _send_events(tx: Transaction, endpoint_id: UUID, candidates: Sequence[Any], now: datetime) -> list[UUID]:
    holding = [(event.run_id, event.id, event.type, endpoint_id) for event in _list_holding_events(tx, candidates)]
    return outbox.add_deliveries(tx, holding, now)


def _list_holding_events(tx: Transaction, candidates: Sequence[Any]) -> list[Any]:
    """The events that still hold; they keep holding until this transaction ends."""
    states = _lock_states(tx, [event for event in candidates if event.type in _HOLDS_IN])
    return [
        event
        for event in candidates
        if event.type not in _HOLDS_IN or states.get(event.decision_id) in _HOLDS_IN[event.type]
    ]


_HOLDS_IN: dict[str, Collection[DecisionState]] = {
    **dict.fromkeys(REQUEST_EVENTS, STOPPING),
    **dict.fromkeys(PENDING_EVENTS, frozenset({DecisionState.PENDING})),
    EventType.RESUME_REQUESTED: {DecisionState.UNDONE},
}


def _lock_states(tx: Transaction, stops: Sequence[Any]) -> dict[UUID, str]:
    """The states of decisions on the current attempts of their runs; both are locked until this transaction ends."""
    if not stops:
        return {}
    of_runs = sa.select(runs.c.id, runs.c.attempt).where(runs.c.id.in_({event.run_id for event in stops}))
    locked = tx.execute(of_runs.order_by(runs.c.id).with_for_update(read=True))
    attempts = {row.id: row.attempt for row in locked}
    table = decisions.c
    query = sa.select(table.run_id, table.id, table.attempt, table.state)
    query = query.where(table.id.in_({event.decision_id for event in stops if event.decision_id is not None}))
    rows = tx.execute(query.order_by(table.run_id, table.id).with_for_update(read=True))
    return {row.id: row.state for row in rows if attempts.get(row.run_id) == row.attempt}
