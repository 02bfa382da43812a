"""The outbox: events, written in the transaction that caused them, with their deliveries, which operators list.

waiting ──> delivered         a worker leases a waiting delivery: see `leases`
   │  └───> dead
   └──────> cancelled         the stop no longer holds or is requested again, or its endpoint was deleted

A replay adds a delivery of a past event, under the original event id. A stop is replayed only while it still holds: the
decision is to end the job, and the run has not resumed in a new attempt. `run.resume_requested` is replayed only while
the stop is taken back, `run.stop_pending` only while people can veto it. Otherwise a replay could end a job that a
person let continue.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.clock import rfc3339
from evalstop_service.domain.decision_lifecycle import STOPPING, DecisionState
from evalstop_service.domain.event_types import PENDING_EVENTS, REQUEST_EVENTS, URGENT_EVENTS, EventType
from evalstop_service.domain.fields import doc
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.errors import require
from evalstop_service.store import endpoints
from evalstop_service.store.database import Transaction, find_one, find_page, match_given
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables import decisions, deliveries, delivery_attempts, events, runs
from evalstop_service.store.tables import endpoints as targets_of
from evalstop_service.store.tables.columns import columns_of
from evalstop_service.store.tables.webhooks import DeliveryAttempt as DeliveryAttempt


@dataclass(frozen=True)
class StopReach:
    """Whether a stop is `addressed` to any receiver, and whether any delivery of it was `tried`.

    `refusal`: the answer of one receiver, if all refused.
    """

    addressed: bool
    tried: bool
    refusal: str | None = None


def add_event(
    tx: Transaction,
    project_id: UUID,
    run_id: UUID,
    event_type: EventType,
    data: dict[str, Any],
    now: datetime,
    decision_id: UUID | None = None,
) -> UUID:
    """Write an event and one delivery for each endpoint that subscribed to it; returns the event's id (`webhook-id`).

    `data` must be plain JSON without NaN. A stop replaces earlier stops of its decision that still wait for the
    same endpoint, so that the endpoint does not get all of them at once.
    """
    event_id = new_id()
    event = {"type": event_type, "timestamp": rfc3339(now), "data": data}
    body = json.dumps(event, separators=(",", ":"), allow_nan=False)
    key = {"run_id": run_id, "id": event_id, "project_id": project_id, "decision_id": decision_id}
    tx.execute(sa.insert(events).values(key | {"type": event_type, "body": body, "created_at": now}))
    listed = endpoints.list_endpoints(tx, project_id)
    targets = [endpoint for endpoint in listed if endpoint.enabled and endpoint.wants(event_type)]
    if targets:
        if event_type in REQUEST_EVENTS and decision_id is not None:
            cancel = _cancel_stops(deliveries.c.endpoint_id.in_([endpoint.id for endpoint in targets]))
            _cancel(tx, cancel, run_id, decision_id, now, "the stop was requested again")
        add_deliveries(tx, [(run_id, event_id, event_type, endpoint.id) for endpoint in targets], now)
    return event_id


def list_data(
    tx: Transaction, run_id: UUID, types: Collection[EventType], *, since: datetime | None = None, limit: int = 100
) -> list[tuple[datetime, dict[str, Any]]]:
    """When a run's newest events of these types were written, and their data, newest first."""
    query = sa.select(events.c.created_at, events.c.body).where(events.c.run_id == run_id, events.c.type.in_(types))
    query = query if since is None else query.where(events.c.created_at > since)
    rows = tx.execute(query.order_by(events.c.id.desc()).limit(limit))
    return [(created_at, json.loads(body)["data"]) for created_at, body in rows]


def add_deliveries(tx: Transaction, requested: Iterable[tuple[UUID, UUID, str, UUID]], now: datetime) -> list[UUID]:
    """Add one delivery for each (run, event, event type, endpoint); returns their ids."""
    rows: list[dict[str, Any]] = [
        {
            "run_id": run_id,
            "id": new_id(),
            "event_id": event_id,
            "endpoint_id": endpoint_id,
            "state": DeliveryState.WAITING,
            "attempts": 0,
            "due_at": now,
            "urgent": event_type in URGENT_EVENTS,
            "created_at": now,
        }
        for run_id, event_id, event_type, endpoint_id in requested
    ]
    if rows:
        statement = sa.insert(deliveries)
        if tx.dialect.name == "postgresql":  # a clock ahead of the database's would delay it
            statement = statement.values(due_at=sa.func.least(sa.bindparam("due_at"), sa.func.now()))
        tx.execute(statement, rows)
    return [row["id"] for row in rows]


def cancel_stop(tx: Transaction, run_id: UUID, decision_id: UUID, now: datetime, reason: str) -> int:
    """Cancel the waiting deliveries of a decision's stop, and of its announcement; returns their number.

    A delivery that a worker holds may still arrive. Events that report on the decision, such as `run.stopped`,
    are still delivered.
    """
    return _cancel(tx, _CANCEL_STOPS, run_id, decision_id, now, reason)


def read_stop_reach(tx: Transaction, run_id: UUID, decision_id: UUID) -> StopReach:
    """How far a decision's stop has come towards its receivers; chat endpoints do not count."""
    query = (
        sa.select(
            sa.func.count(),
            sa.func.coalesce(sa.func.max(deliveries.c.attempts), 0),
            sa.func.count().filter(deliveries.c.state.in_((DeliveryState.WAITING, DeliveryState.DELIVERED))),
            sa.func.max(deliveries.c.last_error).filter(deliveries.c.state == DeliveryState.DEAD),
        )
        .join(targets_of, targets_of.c.id == deliveries.c.endpoint_id)
        .where(
            deliveries.c.run_id == run_id,
            deliveries.c.event_id.in_(select_stops(run_id, decision_id)),
            targets_of.c.format == "standard",
            (deliveries.c.state != DeliveryState.CANCELLED) | (deliveries.c.attempts > 0),
        )
    )
    count, attempts, open_or_taken, refusal = tx.execute(query).one()
    return StopReach(addressed=count > 0, tried=attempts > 0, refusal=None if open_or_taken else refusal)


def list_stop_endpoints(tx: Transaction, run_id: UUID, decision_id: UUID | None = None) -> frozenset[UUID]:
    """The endpoints that a decision's stop, or without a decision any stop of the run, is or was addressed to."""
    stops = sa.select(events.c.id).where(events.c.run_id == run_id, events.c.type.in_(REQUEST_EVENTS))
    if decision_id is not None:
        stops = select_stops(run_id, decision_id)
    query = sa.select(deliveries.c.endpoint_id).where(deliveries.c.run_id == run_id, deliveries.c.event_id.in_(stops))
    return frozenset(tx.execute(query).scalars())


def select_stops(
    run_id: UUID | sa.BindParameter[Any],
    decision_id: UUID | sa.BindParameter[Any],
    types: Iterable[EventType] = REQUEST_EVENTS,
) -> sa.Select[tuple[UUID]]:
    """The ids of the events that request a decision's stop."""
    return sa.select(events.c.id).where(
        events.c.run_id == run_id, events.c.decision_id == decision_id, events.c.type.in_(types)
    )


def replay_event(tx: Transaction, project_id: UUID, endpoint_id: UUID, event_id: UUID, now: datetime) -> UUID | None:
    """Replay one event; returns the new delivery. None: there is no such event, or it no longer holds."""
    columns = (events.c.run_id, events.c.id, events.c.type, events.c.decision_id)
    query = sa.select(*columns).where(events.c.project_id == project_id, events.c.id == event_id)
    event = tx.execute(query).one_or_none()
    if event is None or not _holds(tx, event):
        return None
    return add_deliveries(tx, [(event.run_id, event.id, event.type, endpoint_id)], now)[0]


def _cancel(tx: Transaction, cancel: sa.Update, run_id: UUID, decision_id: UUID, now: datetime, reason: str) -> int:
    settled = {"state": DeliveryState.CANCELLED, "last_error": reason, "settled_at": now}
    return tx.execute(cancel, {"of_run": run_id, "of_decision": decision_id} | settled).rowcount


def _cancel_stops(*conditions: sa.ColumnElement[bool]) -> sa.Update:
    """Cancels the waiting deliveries of a decision's stop that satisfy the conditions."""
    run_id: sa.BindParameter[Any] = sa.bindparam("of_run")
    stops = select_stops(run_id, sa.bindparam("of_decision"), (*REQUEST_EVENTS, *PENDING_EVENTS))
    waiting = (deliveries.c.run_id == run_id, deliveries.c.state == DeliveryState.WAITING)
    query = sa.select(deliveries.c.id).where(*waiting, deliveries.c.event_id.in_(stops), *conditions)
    # Locked in key order, as workers settle them: otherwise the two can deadlock.
    locked = query.order_by(deliveries.c.id).with_for_update()
    return sa.update(deliveries).where(*waiting, deliveries.c.id.in_(locked))


_HOLDS_IN: dict[str, Collection[DecisionState]] = {
    **dict.fromkeys(REQUEST_EVENTS, STOPPING),
    **dict.fromkeys(PENDING_EVENTS, frozenset({DecisionState.PENDING})),
    EventType.RESUME_REQUESTED: {DecisionState.UNDONE},
}


def _holds(tx: Transaction, event: Any) -> bool:
    """Whether an event still holds. Its run and its decision are locked until this transaction ends."""
    if event.type not in _HOLDS_IN:
        return True
    of_run = sa.select(runs.c.attempt).where(runs.c.id == event.run_id)
    attempt = tx.execute(of_run.with_for_update(read=True)).scalar()
    table = decisions.c
    query = sa.select(table.attempt, table.state).where(table.run_id == event.run_id, table.id == event.decision_id)
    decision = tx.execute(query.with_for_update(read=True)).one_or_none()
    return decision is not None and decision.attempt == attempt and decision.state in _HOLDS_IN[event.type]


_CANCEL_STOPS = _cancel_stops()


@dataclass(frozen=True)
class Delivery:
    """One event on its way to one endpoint."""

    id: Annotated[UUID, doc("id of the delivery")]
    run_id: Annotated[UUID, doc("the run that the event is about")]
    project_id: UUID
    event_id: Annotated[UUID, doc("the `webhook-id`, with which receivers drop repeats")]
    event_type: Annotated[str, doc("what happened")]
    decision_id: Annotated[UUID | None, doc("the decision that the event is about; null: none")]
    endpoint_id: Annotated[UUID, doc("the endpoint that it goes to")]
    url: Annotated[str, doc("current URL of the endpoint")]
    state: Annotated[DeliveryState, doc("waiting, delivered, dead or cancelled")]
    attempts: Annotated[int, doc("number of attempts")]
    due_at: Annotated[datetime, doc("it is not sent before this time")]
    last_error: Annotated[str | None, doc("why the last attempt failed, or why it was cancelled; null: neither")]
    created_at: Annotated[datetime, doc("when the event was created")]
    settled_at: Annotated[datetime | None, doc("when it was delivered, given up or cancelled; null: not yet")]


def find_newest_announcement(tx: Transaction, run_id: UUID, decision_id: UUID) -> UUID | None:
    """The event that announced the latest veto window of a decision."""
    of_decision = (events.c.run_id == run_id, events.c.decision_id == decision_id, events.c.type.in_(PENDING_EVENTS))
    return tx.execute(sa.select(events.c.id).where(*of_decision).order_by(events.c.id.desc()).limit(1)).scalar()


def find_delivery(tx: Transaction, delivery_id: UUID) -> Delivery | None:
    """The delivery with this id, of any project."""
    return find_one(tx, Delivery, _DELIVERIES.where(deliveries.c.id == delivery_id))


def load_delivery(tx: Transaction, project_id: UUID, delivery_id: UUID) -> Delivery:
    """The project's delivery with this id; raises NotFound."""
    delivery = find_delivery(tx, delivery_id)
    is_found = delivery is not None and delivery.project_id == project_id
    return require(delivery if is_found else None, f"delivery {delivery_id} in this project")


def list_deliveries(
    tx: Transaction,
    project_id: UUID,
    *,
    state: DeliveryState | None = None,
    endpoint_id: UUID | None = None,
    run_id: UUID | None = None,
    event_type: EventType | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    before: UUID | None = None,
    limit: int = 50,
) -> list[Delivery]:
    """A project's deliveries, newest first, older than the delivery `before`.

    `since`, `until`: created at or after, and before.
    """
    table = deliveries.c
    exact = {table.state: state, table.endpoint_id: endpoint_id, table.run_id: run_id, events.c.type: event_type}
    created = match_given(exact, since={table.created_at: since}, before={table.created_at: until})
    return find_page(
        tx, Delivery, _DELIVERIES.where(targets_of.c.project_id == project_id, *created), table.id, before, limit
    )


def list_attempts(tx: Transaction, delivery: Delivery) -> list[DeliveryAttempt]:
    """All settled attempts of a delivery, oldest first."""
    table = delivery_attempts.c
    query = sa.select(*columns_of(delivery_attempts, DeliveryAttempt))
    query = query.where(table.run_id == delivery.run_id, table.delivery_id == delivery.id)
    return [DeliveryAttempt(*row) for row in tx.execute(query.order_by(table.number))]


def get_content(tx: Transaction, delivery: Delivery) -> tuple[str, str]:
    """The event that a delivery carries, and the format of its endpoint."""
    query = sa.select(events.c.body, targets_of.c.format).join(targets_of, targets_of.c.id == delivery.endpoint_id)
    query = query.where(events.c.run_id == delivery.run_id, events.c.id == delivery.event_id)
    body, channel = tx.execute(query).one()
    return body, channel


# Each delivery with its event and its endpoint.
_DELIVERIES = (
    sa.select(*columns_of(deliveries, Delivery), events.c.type.label("event_type"))
    .add_columns(events.c.decision_id, targets_of.c.project_id, targets_of.c.url)
    .join(events, (events.c.run_id == deliveries.c.run_id) & (events.c.id == deliveries.c.event_id))
    .join(targets_of, targets_of.c.id == deliveries.c.endpoint_id)
)
