"""Decisions and the history of their states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import DecisionState, Lifecycle, Record
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.errors import require
from evalstop_service.store import projects, runs
from evalstop_service.store.database import Transaction, append_row, find_all, find_one, find_page, match_given
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run
from evalstop_service.store.tables import UtcTime, decision_changes, decisions
from evalstop_service.store.tables import runs as run_table
from evalstop_service.store.tables.columns import columns_of
from evalstop_service.store.tables.decisions import ENDS_ATTEMPT
from evalstop_service.store.tables.decisions import Decision as Decision
from evalstop_service.store.tables.decisions import DecisionChange as DecisionChange


def add_decision(tx: Transaction, decision: Decision) -> None:
    """Store a new decision."""
    tx.execute(decisions.insert().values({column.name: getattr(decision, column.name) for column in _COLUMNS}))


def lock_decision(tx: Transaction, run_id: UUID, decision_id: UUID) -> Decision:
    """The run's decision with this id, which must exist, locked until the transaction ends; its run was locked
    before."""
    query = SELECT.where(decisions.c.run_id == run_id, decisions.c.id == decision_id)
    # Rows that refer to its key need not wait.
    row = tx.execute(query.with_for_update(key_share=True)).mappings().one()
    return Decision(**row)


def lock_with_run(tx: Transaction, project_id: UUID, decision_id: UUID) -> tuple[Decision, Run, Project]:
    """The project's decision with this id, its run and their project; raises NotFound.

    The run is locked until the transaction ends, then the decision, the project is not.
    """
    run = runs.lock_run(tx, project_id, load_decision(tx, project_id, decision_id).run_id)
    return lock_decision(tx, run.id, decision_id), run, projects.get_project(tx, project_id)


def update_decision(tx: Transaction, decision: Decision, moved: Decision) -> bool:
    """Store a transition from the state in which the decision was read; False if another transaction was faster."""
    row = {"of_run": decision.run_id, "of_id": decision.id, "from_state": decision.state}
    row["as_handed_over"] = decision.handed_over_at
    values = {column.name: getattr(moved, column.name) for column in columns_of(decisions, Lifecycle)}
    values |= {"asked_at": None, "asked_by": None}
    return tx.execute(_MOVE, row | values).rowcount == 1


def carry_to_attempt(tx: Transaction, decision: Decision, attempt: int) -> Decision:
    """Assign a decision that follows its run to another attempt."""
    is_decision = (decisions.c.run_id == decision.run_id, decisions.c.id == decision.id)
    tx.execute(decisions.update().where(*is_decision).values(attempt=attempt))
    return replace(decision, attempt=attempt)


def add_change(tx: Transaction, run_id: UUID, decision_id: UUID, entry: Record, now: datetime) -> None:
    """Append to the history of a decision that this transaction changed or created."""
    values = {"state": entry.state, "actor": entry.actor, "reason": entry.reason, "details": entry.details, "at": now}
    append_row(tx, decision_changes, {"run_id": run_id, "decision_id": decision_id}, values)


def load_decision(tx: Transaction, project_id: UUID, decision_id: UUID) -> Decision:
    """The project's decision with this id; raises NotFound."""
    decision = find_one(tx, Decision, _LOAD, {"of_project": project_id, "of_id": decision_id})
    return require(decision, f"decision {decision_id} in this project")


def find_decision_of_attempt(tx: Transaction, run_id: UUID, attempt: int) -> Decision | None:
    """The decision to end an attempt of a run."""
    return find_one(tx, Decision, _FIND_OF_ATTEMPT, {"of_run": run_id, "of_attempt": attempt})


def list_of_attempt(tx: Transaction, run_id: UUID, attempt: int) -> list[Decision]:
    """All decisions on an attempt of a run: exploits, and what the rule of its group only recorded, too."""
    return find_all(tx, Decision, SELECT.where(decisions.c.run_id == run_id, decisions.c.attempt == attempt))


def load_decisions(tx: Transaction, run_ids: Iterable[UUID]) -> dict[UUID, Decision]:
    """The decision to end the current attempt of each of these runs that has one."""
    of_attempt = (decisions.c.attempt == run_table.c.attempt, sa.text(ENDS_ATTEMPT))
    query = SELECT.join(run_table, run_table.c.id == decisions.c.run_id)
    query = query.where(decisions.c.run_id.in_(list(run_ids)), *of_attempt)
    return {decision.run_id: decision for decision in find_all(tx, Decision, query)}


def count_issued_stops(
    tx: Transaction, project_id: UUID, since: datetime, but_for: tuple[UUID, int]
) -> tuple[int, int]:
    """How many stops of a project were or will be delivered to receivers after a moment, and how many of these are of
    runs that no longer run; the run and attempt `but_for` are left out."""
    never = ("shadow", "held_out", "on_hold", "vetoed", "moot")
    query = (
        sa.select(sa.func.count(), sa.func.count().filter(run_table.c.status != RunStatus.RUNNING))
        .join(run_table, run_table.c.id == decisions.c.run_id)
        .where(
            decisions.c.project_id == project_id,
            decisions.c.state.not_in(never),
            sa.text(ENDS_ATTEMPT),
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
    exact = {table.state: state, table.run_id: run_id, table.policy_name: policy}
    created = match_given(exact, since={table.created_at: since}, before={table.created_at: until})
    query = SELECT.where(table.project_id == project_id, *created)
    return find_page(tx, Decision, query, table.id, before, limit)


def list_of_group(tx: Transaction, project_id: UUID, group: str, limit: int) -> list[Decision]:
    """The newest decisions of the rule of a group, newest first."""
    query = SELECT.where(decisions.c.project_id == project_id, decisions.c.group == group)
    return find_page(tx, Decision, query, decisions.c.id, None, limit)


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


_COLUMNS = columns_of(decisions, Decision)

SELECT = sa.select(*_COLUMNS)
"""Selects the fields of `Decision`."""

# The state is inlined, not bound: only then does SQLite use the partial index.
PENDING = decisions.c.state == sa.literal_column("'pending'")
"""The condition that a decision is pending."""

# The statements of frequent requests are built once: SQLAlchemy takes longer to build one than to execute it.
_LOAD = SELECT.where(decisions.c.project_id == sa.bindparam("of_project"), decisions.c.id == sa.bindparam("of_id"))

_FIND_OF_ATTEMPT = SELECT.where(
    decisions.c.run_id == sa.bindparam("of_run"),
    decisions.c.attempt == sa.bindparam("of_attempt"),
    sa.text(ENDS_ATTEMPT),
)

_MOVE = decisions.update().where(
    decisions.c.run_id == sa.bindparam("of_run"),
    decisions.c.id == sa.bindparam("of_id"),
    decisions.c.state == sa.bindparam("from_state"),
    decisions.c.handed_over_at.is_not_distinct_from(sa.bindparam("as_handed_over", type_=UtcTime)),
)

_CHANGES = decision_changes.c

_LOAD_CHANGES = (
    sa.select(_CHANGES.decision_id, *columns_of(decision_changes, DecisionChange))
    .where(
        _CHANGES.run_id.in_(sa.bindparam("of_runs", expanding=True)),
        _CHANGES.decision_id.in_(sa.bindparam("of_ids", expanding=True)),
    )
    .order_by(_CHANGES.sequence)
)
