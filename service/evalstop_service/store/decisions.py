"""Decisions and the history of their states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.rules import decision_transitions
from evalstop_service.rules.decision_lifecycle import (
    AWAITING_CONFIRMATION,
    RETURNING,
    STOPPING,
    Action,
    DecisionState,
    Lifecycle,
    Record,
    Timeouts,
    TimePassed,
)
from evalstop_service.rules.event_types import REQUEST_EVENTS
from evalstop_service.rules.run_results import BestCheckpoint, Call, Verdict
from evalstop_service.rules.statuses import DeliveryState, RunStatus
from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import (
    decision_changes,
    decisions,
    deliveries,
    endpoints,
    events,
    policies,
    projects,
    runs,
)

UNSEEN = timedelta(seconds=30)
"""After this long past its end, a pending veto window means that nothing could be written, vetoes included."""


@dataclass(frozen=True)
class DecisionChange:
    """One transition of a decision: its new state, when, by whom and why."""

    sequence: int
    state: DecisionState
    actor: str
    reason: str
    details: dict[str, Any]
    at: datetime


@dataclass(frozen=True)
class OverdueDecision:
    """The key of a decision whose deadline has passed or whose stop was refused."""

    deadline_at: datetime
    id: UUID
    run_id: UUID
    project_id: UUID


@dataclass(frozen=True)
class Decision:
    """A stop verdict on record.

    `action`: what receivers are asked to do. `deadline_at`: when the service acts on it by itself; None: never.
    `observed_probability`: the probability with which the run was held out so that its outcome is observed.
    `state_reason`: the reason for its state. `guard_kinds`: the guards that put it on hold.
    """

    id: UUID
    run_id: UUID
    project_id: UUID
    attempt: int
    state: DecisionState
    step: int
    verdict: Verdict
    best_checkpoint: BestCheckpoint | None
    policy_id: UUID
    due_at: datetime
    created_at: datetime
    run_name: str
    policy_name: str
    policy_version: int
    observed_probability: float
    deadline_at: datetime | None = None
    escalations: int = 0
    state_reason: str = ""
    guard_kinds: list[str] = field(default_factory=list)
    action: Action = Action.STOP

    def stops(self, now: datetime) -> bool:
        """Whether the job is meant to end."""
        return self.action is Action.STOP and self.is_carried_out(now)

    def is_carried_out(self, now: datetime) -> bool:
        """Whether the stop was requested, or its veto window is over."""
        if self.state == DecisionState.PENDING:
            return self.due_at <= now
        return self.state in STOPPING

    @property
    def follows_run(self) -> bool:
        """Whether it applies to the run's next attempt too: a parked job that resumes on idle GPUs is still parked, and
        one that a person resumed is not parked again."""
        staying = AWAITING_CONFIRMATION | {DecisionState.PARKED, DecisionState.UNDONE}
        return self.action is Action.PARK and self.state in staying

    def is_recovered(self, verdict: Verdict) -> bool:
        """Whether a verdict ends it: past the decision's step the policy no longer suspects the run."""
        returning = self.action is Action.PARK and self.state in RETURNING
        return returning and verdict.verdict is Call.CONTINUE and verdict.step is not None and verdict.step > self.step

    @property
    def ordered(self) -> bool:
        """Whether a person ordered the stop without a call from the policy: there is no evidence behind it."""
        return not self.verdict.evidence

    @property
    def life(self) -> Lifecycle:
        """Its state for the state machine, as far as its row holds it."""
        guard_kinds = frozenset(self.guard_kinds)
        return Lifecycle(self.state, self.due_at, self.deadline_at, self.escalations, guard_kinds, action=self.action)

    def moved(self, life: Lifecycle, records: Sequence[Record]) -> Decision:
        """The decision in another state, with the reason of the last change; the reason stays if the state does."""
        guard_kinds = life.guard_kinds if life.state is DecisionState.ON_HOLD else ()
        return replace(
            self,
            state=life.state,
            due_at=life.due_at,
            deadline_at=life.deadline_at,
            escalations=life.escalations,
            state_reason=records[-1].state_reason if records else self.state_reason,
            guard_kinds=sorted(guard_kinds),
            action=life.action,
        )


def add_decision(tx: Transaction, decision: Decision) -> None:
    """Store a new decision."""
    tx.execute(decisions.insert().values({column.name: getattr(decision, column.name) for column in decisions.c}))


def lock_decision(tx: Transaction, run_id: UUID, decision_id: UUID) -> Decision:
    """The run's decision with this id, which must exist, locked until the transaction ends; its run was locked
    before."""
    query = _SELECT.where(decisions.c.run_id == run_id, decisions.c.id == decision_id)
    # Rows that refer to its key need not wait.
    row = tx.execute(query.with_for_update(key_share=True, of=decisions)).mappings().one()
    return Decision(**row)


def update_decision(tx: Transaction, decision: Decision, moved: Decision) -> bool:
    """Store a transition from the state in which the decision was read; False if another transaction was faster."""
    query = decisions.update().where(
        decisions.c.run_id == decision.run_id, decisions.c.id == decision.id, decisions.c.state == decision.state
    )
    moving = ("state", "due_at", "deadline_at", "escalations", "state_reason", "guard_kinds", "action")
    return tx.execute(query.values({name: getattr(moved, name) for name in moving})).rowcount == 1


def carry_to_attempt(tx: Transaction, decision: Decision, attempt: int) -> Decision:
    """Assign a decision that follows its run to another attempt."""
    is_decision = (decisions.c.run_id == decision.run_id, decisions.c.id == decision.id)
    tx.execute(decisions.update().where(*is_decision).values(attempt=attempt))
    return replace(decision, attempt=attempt)


def add_change(tx: Transaction, decision: Decision, entry: Record, now: datetime) -> None:
    """Append to the history of a decision that this transaction changed or created."""
    table = decision_changes.c
    of_decision = (table.run_id == decision.run_id, table.decision_id == decision.id)
    last = sa.select(sa.func.coalesce(sa.func.max(table.sequence), 0)).where(*of_decision).scalar_subquery()
    tx.execute(
        decision_changes.insert().values(
            run_id=decision.run_id,
            decision_id=decision.id,
            sequence=last + 1,
            state=entry.state,
            actor=entry.actor,
            reason=entry.reason,
            details=entry.details,
            at=now,
        )
    )


def request_due_decisions(tx: Transaction, now: datetime) -> int:
    """Move the decisions whose veto window is over from pending to requested; returns their number."""
    # In a fixed order, so that two workers cannot deadlock.
    query = _SELECT.add_columns(projects.c.confirm_seconds).join(projects, projects.c.id == decisions.c.project_id)
    due = query.where(_is_due(now)).order_by(decisions.c.due_at, decisions.c.id)
    count = 0
    for row in tx.execute(due).mappings().all():
        fields = dict(row)
        terms = Timeouts(veto_window_seconds=0.0, confirm_seconds=fields.pop("confirm_seconds"))
        decision = Decision(**fields)
        life, instructions = decision_transitions.apply_event(decision.life, TimePassed(now), terms)
        entries = [entry for entry in instructions if isinstance(entry, Record)]
        assert len(entries) == len(instructions), "the event was written when the veto window began"
        if update_decision(tx, decision, decision.moved(life, entries)):
            count += 1
            for entry in entries:
                add_change(tx, decision, entry, now)
    return count


def is_any_unseen(tx: Transaction, now: datetime) -> bool:
    """Whether some veto window ended so long ago that the service must have been unable to write."""
    return tx.execute(sa.select(sa.exists().where(_is_due(now - UNSEEN)))).scalar_one()


def is_any_due(tx: Transaction, now: datetime) -> bool:
    """Whether any pending decision's veto window is over."""
    query = sa.exists().where(_is_due(now))
    return tx.execute(sa.select(query)).scalar_one()


def list_pending_runs(tx: Transaction, project_id: UUID) -> list[UUID]:
    """The runs of a project with a pending decision, longest pending first."""
    query = sa.select(decisions.c.run_id).where(_PENDING, decisions.c.project_id == project_id)
    return list(tx.execute(query.order_by(decisions.c.due_at, decisions.c.id)).scalars())


def list_unheld_projects(tx: Transaction) -> list[UUID]:
    """The paused projects that have a pending decision."""
    query = sa.select(decisions.c.project_id).join(projects, projects.c.id == decisions.c.project_id)
    return list(tx.execute(query.where(_PENDING, projects.c.paused_at.is_not(None)).distinct()).scalars())


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


def find_decision(tx: Transaction, project_id: UUID, decision_id: UUID) -> Decision | None:
    """The project's decision with this id."""
    return _load_one(tx, (decisions.c.id == decision_id) & (decisions.c.project_id == project_id))


def find_decision_of_attempt(tx: Transaction, run_id: UUID, attempt: int) -> Decision | None:
    """The decision on an attempt of a run."""
    return _load_one(tx, (decisions.c.run_id == run_id) & (decisions.c.attempt == attempt))


def load_decisions(tx: Transaction, run_ids: Iterable[UUID]) -> dict[UUID, Decision]:
    """The decision on the current attempt of each of these runs that has one."""
    query = _SELECT.where(decisions.c.run_id.in_(list(run_ids)), decisions.c.attempt == runs.c.attempt)
    return {row["run_id"]: Decision(**row) for row in tx.execute(query).mappings()}


def count_issued_stops(
    tx: Transaction, project_id: UUID, since: datetime, but_for: tuple[UUID, int]
) -> tuple[int, int]:
    """How many stops of a project were or will be delivered to receivers after a moment, and how many of these are of
    runs that no longer run; the run and attempt `but_for` are left out."""
    never = ("shadow", "held_out", "on_hold", "vetoed", "moot")
    query = (
        sa.select(sa.func.count(), sa.func.count().filter(runs.c.status != RunStatus.RUNNING))
        .join(runs, runs.c.id == decisions.c.run_id)
        .where(
            decisions.c.project_id == project_id,
            decisions.c.state.not_in(never),
            (decisions.c.due_at > since) | (decisions.c.state == sa.literal_column("'pending'")),
            (decisions.c.run_id != but_for[0]) | (decisions.c.attempt != but_for[1]),
        )
    )
    count, ended = tx.execute(query).one()
    return count, ended


def list_decisions(
    tx: Transaction,
    project_id: UUID,
    *,
    state: DecisionState | None = None,
    run_id: UUID | None = None,
    policy: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    before: UUID | None = None,
    limit: int = 50,
) -> list[Decision]:
    """A project's decisions, newest first, older than the decision `before`.

    `since`, `until`: created at or after, and before.
    """
    query = _SELECT.where(decisions.c.project_id == project_id)
    if state is not None:
        query = query.where(decisions.c.state == state)
    if run_id is not None:
        query = query.where(decisions.c.run_id == run_id)
    if policy is not None:
        query = query.where(policies.c.name == policy)
    if since is not None:
        query = query.where(decisions.c.created_at >= since)
    if until is not None:
        query = query.where(decisions.c.created_at < until)
    if before is not None:
        query = query.where(decisions.c.id < before)
    return [Decision(**row) for row in tx.execute(query.order_by(decisions.c.id.desc()).limit(limit)).mappings()]


def list_changes(tx: Transaction, decision: Decision) -> list[DecisionChange]:
    """All changes of a decision, oldest first."""
    return load_changes(tx, [decision])[decision.id]


def load_changes(tx: Transaction, of_decisions: Sequence[Decision]) -> dict[UUID, list[DecisionChange]]:
    """All changes of each of these decisions, oldest first."""
    changes: dict[UUID, list[DecisionChange]] = {decision.id: [] for decision in of_decisions}
    if not changes:
        return changes
    table = decision_changes.c
    query = sa.select(
        table.decision_id, table.sequence, table.state, table.actor, table.reason, table.details, table.at
    )
    run_ids = {decision.run_id for decision in of_decisions}
    query = query.where(table.run_id.in_(run_ids), table.decision_id.in_(changes)).order_by(table.sequence)
    for decision_id, *columns in tx.execute(query):
        changes[decision_id].append(DecisionChange(*columns))
    return changes


_SELECT = (
    sa.select(
        *decisions.c,
        runs.c.name.label("run_name"),
        policies.c.name.label("policy_name"),
        policies.c.version.label("policy_version"),
    )
    .join(runs, runs.c.id == decisions.c.run_id)
    .join(policies, policies.c.id == decisions.c.policy_id)
)


# The state is inlined, not bound: only then does SQLite use the partial index.
_PENDING = decisions.c.state == sa.literal_column("'pending'")


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
    return _PENDING & (decisions.c.due_at <= now)


def _load_one(tx: Transaction, condition: sa.ColumnElement[bool]) -> Decision | None:
    row = tx.execute(_SELECT.where(condition)).mappings().one_or_none()
    return Decision(**row) if row else None
