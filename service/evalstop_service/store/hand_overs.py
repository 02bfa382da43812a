"""Hands stops over: to a receiver that claims one, or to the trainer that gets `should_stop` in an answer. Then it
can't be vetoed.

Without a veto window that happens at once. With one, whoever wants the stop only asks for it, and comes again; the
processes that hear vetoes hand it over once all of them have written after that (`decisions.veto_windows`). Until it is
handed over, a stop is held by whatever would hold a pending one: a pause, the hours of the project, other runs of its
job.

Also the decisions on which the service acts by itself: their veto window or deadline is over, or they were refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import SERVICE, STOPPING, Action, DecisionState, GuardKind, Record
from evalstop_service.domain.event_types import REQUEST_EVENTS
from evalstop_service.domain.statuses import OPEN, DeliveryState
from evalstop_service.store import runs
from evalstop_service.store.database import Transaction, save_row
from evalstop_service.store.decisions import PENDING, Decision, add_change, list_changes, load_decision
from evalstop_service.store.runs import JobRun, Run
from evalstop_service.store.tables import UtcTime, decisions, deliveries, endpoints, events, projects, veto_listeners
from evalstop_service.store.tables import runs as run_table
from evalstop_service.store.tables.decisions import IS_UNSENT

TRAINER = "the trainer"
"""To whom an answer with `should_stop` hands a stop over."""


@dataclass(frozen=True)
class UnsentStop:
    """The key of a pending or requested stop that nobody was handed, the veto window of its project, and who asked for
    it."""

    id: UUID
    run_id: UUID
    project_id: UUID
    window_seconds: float
    asked_by: str | None


def hand_over(tx: Transaction, receivers: Mapping[tuple[UUID, UUID], str], now: datetime) -> set[UUID]:
    """Hand stops over or ask for them; returns the decisions whose stops may go out.

    `receivers`: who wants the stop, by run and decision. A stop that another transaction holds may be being vetoed: it
    has to wait. Waiting for it here could deadlock, because a veto locks the decision before its deliveries.
    """
    columns = decisions.c
    query = (
        sa.select(columns.run_id, columns.id, columns.state, columns.handed_over_at, columns.asked_at)
        .add_columns(columns.project_id, projects.c.veto_window_seconds)
        .join(projects, projects.c.id == columns.project_id)
        .where(sa.tuple_(columns.run_id, columns.id).in_(list(receivers)))
        .order_by(columns.run_id, columns.id)
        .with_for_update(key_share=True, skip_locked=True, of=decisions)
    )
    gone = set()
    for row in tx.execute(query).all():
        key, receiver = {"of_run": row.run_id, "of_id": row.id}, receivers[row.run_id, row.id]
        if row.handed_over_at is not None:
            gone.add(row.id)
        elif row.state not in STOPPING:
            continue
        elif row.veto_window_seconds > 0:
            if row.asked_at is None:
                tx.execute(_ASK, key | {"asked_at": now, "asked_by": receiver})
        else:
            run = runs.load_run(tx, row.project_id, row.run_id)
            if try_hand_over(tx, run, load_decision(tx, row.project_id, row.id), receiver, now):
                gone.add(row.id)
    return gone


def try_hand_over(tx: Transaction, run: Run, decision: Decision, receiver: str, now: datetime) -> bool:
    """Hand a stop over, and with it those of the other runs that end with its job; False if it has to wait.

    The decision is locked. The others are locked here, so that none of them is vetoed meanwhile.
    """
    columns = decisions.c
    copies = decision.action is Action.EXPLOIT  # which reaches its own run alone
    others = [] if copies else [other for other in runs.list_others(tx, run) if other.decision_id is not None]
    locked = sa.select(columns.id).where(columns.id.in_([other.decision_id for other in others]))
    if others and len(tx.execute(locked.with_for_update(key_share=True, skip_locked=True)).all()) < len(others):
        return False
    if not may_go_out(tx, run, decision, now):
        return False
    own = runs.find_own_part(run, decision.action)
    ended = [decision.id]
    if others:
        spared = {other.id for other in runs.list_spared_runs(tx, run, decision.action)}
        ended += [other.decision_id for other in others if other.id not in spared and (own is None or not spared)]
    is_unsent = (columns.handed_over_at.is_(None), columns.state.in_(STOPPING))
    tx.execute(
        decisions.update().where(columns.id.in_(ended), *is_unsent).values(handed_over_at=now, handed_over_to=receiver)
    )
    return True


def may_go_out(tx: Transaction, run: Run, decision: Decision, now: datetime) -> bool:
    """Whether nothing holds a requested stop that nobody was handed."""
    query = sa.select(projects.c.paused_at, projects.c.stop_hours).where(projects.c.id == run.project_id)
    paused_at, hours = tx.execute(query).one()
    if paused_at is not None or (hours is not None and hours.find_opening(now) > now):
        return False
    if run.job_key is None or decision.action is Action.EXPLOIT:
        return True
    if runs.has_pending_stop(tx, run, decision.action):
        return False
    return not list_endangered(tx, run, decision) and not has_grown(tx, run, decision)


def list_endangered(tx: Transaction, run: Run, decision: Decision) -> list[JobRun]:
    """The live runs that would end with a stop's job though nobody wants that, nor released the stop despite them."""
    others = runs.list_endangered_runs(tx, run, decision.action)
    if not others:
        return []
    released = {
        name
        for change in list_changes(tx, decision)
        if change.state is not DecisionState.ON_HOLD
        for guard in change.details.get("guards", ())
        if guard["kind"] == GuardKind.SHARED_JOB
        for name in guard["details"]["runs"]
    }
    return [other for other in others if other.name not in released]


def has_grown(tx: Transaction, run: Run, decision: Decision) -> bool:
    """Whether a run entered the job after its stop was requested, so that a smaller part of the job is to end now."""
    if runs.find_own_part(run, decision.action) is None:
        return False
    spared = runs.list_spared_runs(tx, run, decision.action)
    changes = list_changes(tx, decision) if spared else []
    requested_at = max((change.at for change in changes if change.state is DecisionState.REQUESTED), default=None)
    return requested_at is not None and any(other.created_at > requested_at for other in spared)


def list_asked(tx: Transaction, heard_until: datetime, limit: int) -> list[UnsentStop]:
    """Up to `limit` stops that somebody asked for until then, oldest first."""
    query = _UNSENT.where(decisions.c.asked_at <= heard_until, decisions.c.handed_over_at.is_(None))
    return [UnsentStop(*row) for row in tx.execute(query.order_by(decisions.c.asked_at).limit(limit))]


def list_requested(tx: Transaction) -> list[UnsentStop]:
    """All requested stops that nobody was handed, by run."""
    query = _UNSENT.where(sa.text(IS_UNSENT), decisions.c.state != DecisionState.PENDING)
    return [UnsentStop(*row) for row in tx.execute(query.order_by(decisions.c.run_id))]


def list_held(tx: Transaction, now: datetime) -> list[UnsentStop]:
    """The stops that nobody was handed and that a pause, closed hours (if they were requested) or runs of their job may
    hold, by run."""
    is_requested = decisions.c.state != DecisionState.PENDING
    query = (
        _UNSENT.add_columns(projects.c.paused_at, is_requested, projects.c.stop_hours, _HAS_SPARED)
        .join(run_table, run_table.c.id == decisions.c.run_id)
        .where(sa.text(IS_UNSENT))
        .where(projects.c.paused_at.is_not(None) | (is_requested & projects.c.stop_hours.is_not(None)) | _HAS_SPARED)
        .order_by(decisions.c.run_id)
    )
    return [
        UnsentStop(*key)
        for *key, paused_at, requested, hours, has_spared in tx.execute(query).all()
        if paused_at is not None or has_spared or (requested and hours is not None and hours.find_opening(now) > now)
    ]


_ASK = decisions.update().where(decisions.c.run_id == sa.bindparam("of_run"), decisions.c.id == sa.bindparam("of_id"))

_UNSENT = sa.select(
    decisions.c.id, decisions.c.run_id, decisions.c.project_id, projects.c.veto_window_seconds, decisions.c.asked_by
).join(projects, projects.c.id == decisions.c.project_id)

_OTHER, _OTHERS_DECISION = run_table.alias(), decisions.alias()

# Another live run of the job for which nobody wants the action.
_HAS_SPARED = (decisions.c.action != Action.EXPLOIT) & sa.exists().where(
    _OTHER.c.project_id == run_table.c.project_id,
    _OTHER.c.job_key == run_table.c.job_key,
    _OTHER.c.id != run_table.c.id,
    _OTHER.c.status.in_(OPEN),
    ~sa.exists().where(
        _OTHERS_DECISION.c.run_id == _OTHER.c.id,
        _OTHERS_DECISION.c.attempt == _OTHER.c.attempt,
        _OTHERS_DECISION.c.action == decisions.c.action,
        _OTHERS_DECISION.c.state.in_(runs.TO_BE_STOPPED),
    ),
)


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


def list_windows_over(tx: Transaction, heard_until: datetime, limit: int) -> list[UnsentStop]:
    """Up to `limit` pending decisions whose windows ended until then, oldest first."""
    query = _UNSENT.where(PENDING, decisions.c.due_at <= heard_until).order_by(decisions.c.due_at, decisions.c.id)
    return [UnsentStop(*row) for row in tx.execute(query.limit(limit))]


def extend_windows(
    tx: Transaction, now: datetime, longest_seconds: float, project_ids: Collection[UUID] | None, reason: str
) -> int:
    """Keep the open windows of these projects (None: of all) open for another window, at most `longest_seconds`;
    returns how many end later now. Runs are locked first, in the order of their ids.
    """
    query = _UNSENT.where(PENDING, decisions.c.due_at < now + timedelta(seconds=longest_seconds))
    if project_ids is not None:
        query = query.where(decisions.c.project_id.in_(project_ids))
    ending = [UnsentStop(*row) for row in tx.execute(query.order_by(decisions.c.run_id)).all()]
    runs.lock_runs(tx, [decision.run_id for decision in ending])
    extended = 0
    for decision in ending:
        # In a project without a window a stop may be pending too: it had one when it began, or waits for the hours.
        until = now + timedelta(seconds=min(longest_seconds, decision.window_seconds or longest_seconds))
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


class OverdueDecision(NamedTuple):
    """The key of a decision whose deadline has passed or whose stop was refused."""

    id: UUID
    run_id: UUID
    project_id: UUID


def list_overdue(tx: Transaction, now: datetime) -> list[OverdueDecision]:
    """All decisions whose deadline has passed, or whose stop all receivers refused that it was addressed to."""
    table = decisions.c
    query = sa.select(table.id, table.run_id, table.project_id)
    query = query.where(table.deadline_at.is_not(None), (table.deadline_at <= now) | _REFUSED)  # by the partial index
    return [OverdueDecision(*row) for row in tx.execute(query.order_by(table.deadline_at, table.id))]


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
    decisions.c.state.in_((DecisionState.REQUESTED, DecisionState.ESCALATED))
    & (decisions.c.action != Action.EXPLOIT)  # its trainer may make the copy, whatever receivers answer
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
