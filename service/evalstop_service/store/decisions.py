"""Decisions and the history of their states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import (
    AWAITING_CONFIRMATION,
    RETURNING,
    STOPPING,
    Action,
    DecisionState,
    Lifecycle,
    Record,
)
from evalstop_service.domain.fields import doc
from evalstop_service.domain.run import BestCheckpoint, Call, Verdict
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.errors import require
from evalstop_service.store.database import Transaction, find_all, find_one, find_page, match_given, read_columns
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import POLICY_COLUMNS, Run
from evalstop_service.store.tables import UtcTime, decision_changes, decisions, policies, projects, runs
from evalstop_service.store.tables.runs import IS_UNSENT


@dataclass(frozen=True)
class DecisionChange:
    """One transition of a decision: its new state, when, by whom and why."""

    sequence: int
    state: DecisionState
    actor: Annotated[str, doc("a person, a key, a receiver, or evalstop")]
    reason: Annotated[str, doc("why it changed")]
    details: Annotated[dict[str, Any], doc("the receiver's report, or the guards that held it")]
    at: Annotated[datetime, doc("when it changed")]


_LIFE = ("state", "due_at", "deadline_at", "escalations", "action", "handed_over_at", "handed_over_to")
"""The fields that a decision shares with its life cycle."""


@dataclass(frozen=True)
class Decision:
    """A stop verdict on record.

    `observed_probability`: the probability with which the run was held out so that its outcome is observed.
    `guard_kinds`: the guards that put it on hold.
    """

    id: Annotated[UUID, doc("id of the decision")]
    run_id: Annotated[UUID, doc("the run to be stopped")]
    project_id: UUID
    attempt: Annotated[int, doc("the run's attempt")]
    state: Annotated[DecisionState, doc("its state in the life cycle")]
    step: Annotated[int, doc("the step at which the policy wanted the stop")]
    verdict: Annotated[Verdict, doc("the verdict at that time, with its evidence")]
    best_checkpoint: Annotated[BestCheckpoint | None, doc("at the time of the decision")]
    policy_id: UUID
    due_at: Annotated[datetime, doc("the end of the veto window; it can be vetoed until it is handed over")]
    created_at: Annotated[datetime, doc("when the policy wanted the stop")]
    run_name: Annotated[str, doc("the run's name")]
    policy_name: str
    policy_version: int
    observed_probability: float
    deadline_at: Annotated[
        datetime | None, doc("next check: a stop on hold is tried again, an unconfirmed one is escalated")
    ] = None
    escalations: Annotated[int, doc("how often it was not confirmed in time")] = 0
    state_reason: Annotated[str, doc("why it is in this state; for a stop on hold, the guards' reasons")] = ""
    guard_kinds: list[str] = field(default_factory=list)
    action: Annotated[Action, doc("stop the job, or park it so that it can resume")] = Action.STOP
    handed_over_at: Annotated[datetime | None, doc("when the stop first went out; null: it can still be vetoed")] = None
    handed_over_to: Annotated[str | None, doc("to whom it went out first, a receiver or the trainer")] = None

    @property
    def stops(self) -> bool:
        """Whether the job is meant to end. Its trainer must not hear of it before the stop is handed over."""
        return self.action is Action.STOP and self.is_requested

    @property
    def is_requested(self) -> bool:
        """Whether receivers are or were asked to carry it out."""
        return self.state in STOPPING

    @property
    def should_stop(self) -> bool:
        """Whether the trainer may be told to stop."""
        return self.stops and self.handed_over_at is not None

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
        fields = {name: getattr(self, name) for name in _LIFE}
        return Lifecycle(guard_kinds=frozenset(self.guard_kinds), reason=self.state_reason, **fields)

    def moved(self, life: Lifecycle, records: Sequence[Record]) -> Decision:
        """The decision in another state, with the reason of the last change; the reason stays if the state does."""
        fields = {name: getattr(life, name) for name in _LIFE}
        guard_kinds = sorted(life.guard_kinds) if life.state is DecisionState.ON_HOLD else []
        reason = records[-1].state_reason if records else self.state_reason
        return replace(self, state_reason=reason, guard_kinds=guard_kinds, **fields)


class LockedDecision(NamedTuple):
    """A decision, its run and their project; the run was locked before the decision, the project is not."""

    decision: Decision
    run: Run
    project: Project


def add_decision(tx: Transaction, decision: Decision) -> None:
    """Store a new decision."""
    tx.execute(decisions.insert().values({column.name: getattr(decision, column.name) for column in _COLUMNS}))


def lock_decision(tx: Transaction, run_id: UUID, decision_id: UUID) -> Decision:
    """The run's decision with this id, which must exist, locked until the transaction ends; its run was locked
    before."""
    query = SELECT.where(decisions.c.run_id == run_id, decisions.c.id == decision_id)
    # Rows that refer to its key need not wait.
    row = tx.execute(query.with_for_update(key_share=True, of=decisions)).mappings().one()
    return Decision(**row)


def lock_with_run(tx: Transaction, project_id: UUID, decision_id: UUID) -> LockedDecision:
    """The project's decision with this id and its run, locked until the transaction ends; raises NotFound."""
    parameters = {"of_project": project_id, "of_id": decision_id}
    rows = tx.execute(_LOCK_WITH_RUN, parameters).mappings()
    # If the run's policy changed while PostgreSQL waited for the lock, the join has no row: see `runs.lock_run`.
    row = rows.one_or_none() or tx.execute(_LOCK_WITH_RUN, parameters).mappings().one_or_none()
    row = require(row, f"decision {decision_id} in this project")
    run_policy = {"policy_name": row[_RUN_POLICIES.c.name], "policy_version": row[_RUN_POLICIES.c.version]}
    run = Run(**read_columns(row, runs.c), **run_policy)
    names = {"run_name": run.name, "policy_name": row["policy_name"], "policy_version": row["policy_version"]}
    decision = Decision(**read_columns(row, _COLUMNS), **names)
    return LockedDecision(decision, run, Project(**read_columns(row, projects.c)))


def update_decision(tx: Transaction, decision: Decision, moved: Decision) -> bool:
    """Store a transition from the state in which the decision was read; False if another transaction was faster."""
    row = {"of_run": decision.run_id, "of_id": decision.id, "from_state": decision.state}
    row["as_handed_over"] = decision.handed_over_at
    values = {name: getattr(moved, name) for name in (*_LIFE, "state_reason", "guard_kinds")} | {
        "asked_at": None,
        "asked_by": None,
    }
    return tx.execute(_MOVE, row | values).rowcount == 1


def carry_to_attempt(tx: Transaction, decision: Decision, attempt: int) -> Decision:
    """Assign a decision that follows its run to another attempt."""
    is_decision = (decisions.c.run_id == decision.run_id, decisions.c.id == decision.id)
    tx.execute(decisions.update().where(*is_decision).values(attempt=attempt))
    return replace(decision, attempt=attempt)


def add_change(tx: Transaction, run_id: UUID, decision_id: UUID, entry: Record, now: datetime) -> None:
    """Append to the history of a decision that this transaction changed or created."""
    row = {"run_id": run_id, "decision_id": decision_id, "at": now}
    row |= {"state": entry.state, "actor": entry.actor, "reason": entry.reason, "details": entry.details}
    tx.execute(_ADD_CHANGE, row | {"of_run": run_id, "of_id": decision_id})


def list_unsent_runs(tx: Transaction, project_id: UUID) -> list[UUID]:
    """The runs of a project with a stop that is to go out and that nobody was handed, longest pending first."""
    query = sa.select(decisions.c.run_id).where(sa.text(IS_UNSENT), decisions.c.project_id == project_id)
    return list(tx.execute(query.order_by(decisions.c.due_at, decisions.c.id)).scalars())


def load_decision(tx: Transaction, project_id: UUID, decision_id: UUID) -> Decision:
    """The project's decision with this id; raises NotFound."""
    decision = find_one(tx, Decision, _LOAD, {"of_project": project_id, "of_id": decision_id})
    return require(decision, f"decision {decision_id} in this project")


def find_decision_of_attempt(tx: Transaction, run_id: UUID, attempt: int) -> Decision | None:
    """The decision on an attempt of a run."""
    return find_one(tx, Decision, _FIND_OF_ATTEMPT, {"of_run": run_id, "of_attempt": attempt})


def load_decisions(tx: Transaction, run_ids: Iterable[UUID]) -> dict[UUID, Decision]:
    """The decision on the current attempt of each of these runs that has one."""
    query = SELECT.where(decisions.c.run_id.in_(list(run_ids)), decisions.c.attempt == runs.c.attempt)
    return {decision.run_id: decision for decision in find_all(tx, Decision, query)}


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
    table = decisions.c
    exact = {table.state: state, table.run_id: run_id, policies.c.name: policy}
    created = match_given(exact, since={table.created_at: since}, before={table.created_at: until})
    query = SELECT.where(table.project_id == project_id, *created)
    return find_page(tx, Decision, query, table.id, before, limit)


def list_changes(tx: Transaction, decision: Decision) -> list[DecisionChange]:
    """All changes of a decision, oldest first."""
    return load_changes(tx, [decision])[decision.id]


def load_changes(tx: Transaction, of_decisions: Sequence[Decision]) -> dict[UUID, list[DecisionChange]]:
    """All changes of each of these decisions, oldest first."""
    changes: dict[UUID, list[DecisionChange]] = {decision.id: [] for decision in of_decisions}
    if not changes:
        return changes
    run_ids = list({decision.run_id for decision in of_decisions})
    for decision_id, *columns in tx.execute(_LOAD_CHANGES, {"of_runs": run_ids, "of_ids": list(changes)}):
        changes[decision_id].append(DecisionChange(*columns))
    return changes


_COLUMNS = [column for column in decisions.c if column.name not in ("asked_at", "asked_by")]
"""What a `Decision` holds; who asked for a stop concerns its hand-over alone (`hand_overs`)."""

SELECT = (
    sa.select(*_COLUMNS, runs.c.name.label("run_name"), *POLICY_COLUMNS)
    .join(runs, runs.c.id == decisions.c.run_id)
    .join(policies, policies.c.id == decisions.c.policy_id)
)
"""Selects the fields of `Decision`."""

# The state is inlined, not bound: only then does SQLite use the partial index.
PENDING = decisions.c.state == sa.literal_column("'pending'")
"""The condition that a decision is pending."""

# The statements of frequent requests are built once: SQLAlchemy takes longer to build one than to execute it.
_LOAD = SELECT.where(decisions.c.project_id == sa.bindparam("of_project"), decisions.c.id == sa.bindparam("of_id"))

_FIND_OF_ATTEMPT = SELECT.where(
    decisions.c.run_id == sa.bindparam("of_run"), decisions.c.attempt == sa.bindparam("of_attempt")
)

_RUN_POLICIES = policies.alias()

_LOCK_WITH_RUN = (
    SELECT.add_columns(*runs.c, *projects.c, _RUN_POLICIES.c.name, _RUN_POLICIES.c.version)
    .join(_RUN_POLICIES, _RUN_POLICIES.c.id == runs.c.policy_id)
    .join(projects, projects.c.id == decisions.c.project_id)
    .where(decisions.c.project_id == sa.bindparam("of_project"), decisions.c.id == sa.bindparam("of_id"))
    .with_for_update(key_share=True, of=(runs, decisions))  # PostgreSQL locks them in this order
)

_MOVE = decisions.update().where(
    decisions.c.run_id == sa.bindparam("of_run"),
    decisions.c.id == sa.bindparam("of_id"),
    decisions.c.state == sa.bindparam("from_state"),
    decisions.c.handed_over_at.is_not_distinct_from(sa.bindparam("as_handed_over", type_=UtcTime)),
)

_CHANGES = decision_changes.c

_LAST_SEQUENCE = (
    sa.select(sa.func.coalesce(sa.func.max(_CHANGES.sequence), 0))
    .where(_CHANGES.run_id == sa.bindparam("of_run"), _CHANGES.decision_id == sa.bindparam("of_id"))
    .scalar_subquery()
)

_ADD_CHANGE = decision_changes.insert().values(sequence=_LAST_SEQUENCE + 1).inline()

_LOAD_CHANGES = (
    sa.select(
        *(_CHANGES.decision_id, _CHANGES.sequence, _CHANGES.state, _CHANGES.actor, _CHANGES.reason, _CHANGES.details),
        _CHANGES.at,
    )
    .where(
        _CHANGES.run_id.in_(sa.bindparam("of_runs", expanding=True)),
        _CHANGES.decision_id.in_(sa.bindparam("of_ids", expanding=True)),
    )
    .order_by(_CHANGES.sequence)
)
