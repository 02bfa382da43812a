"""What people and receivers say of a decision, and trainers of their run's end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from msgspec import structs

from evalstop_service import events, hindsight
from evalstop_service.errors import Conflict, NotFound
from evalstop_service.lifecycle import State, may_follow
from evalstop_service.store import decisions, outbox, projects, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run


@dataclass(frozen=True)
class Report:
    """What a receiver says became of the job: `confirmed` (it is gone) or `failed`."""

    state: State
    actor: str
    reason: str
    details: dict[str, Any]


def veto(database: Database, project_id: UUID, decision_id: UUID, actor: str, reason: str, now: datetime) -> Decision:
    """Let the run go on; raises Conflict once the grace period is over. Vetoing twice is harmless."""
    with _locked(database, project_id, decision_id) as (tx, run, decision):
        if decision.state == State.VETOED:
            return decision
        if decision.state != State.PENDING or decision.due_at <= now:
            raise Conflict(
                f"the decision is {decision.state} and its grace period ended at {decision.due_at.isoformat()}; "
                "only a pending decision can be vetoed"
            )
        outbox.cancel(tx, run.id, decision.id, now)
        return _change(tx, decision, State.VETOED, actor, reason, {}, now)


def report(database: Database, project_id: UUID, decision_id: UUID, said: Report, now: datetime) -> Decision:
    """Record what a receiver saw. Saying the same twice is harmless; raises Conflict on what cannot follow."""
    with _locked(database, project_id, decision_id) as (tx, run, decision):
        if decision.state == said.state:
            return decision
        if decision.state == State.PENDING and decision.due_at <= now:
            decision = _change(tx, decision, State.REQUESTED, "evalstop", "the grace period is over", {}, now)
        if not may_follow(State(decision.state), said.state):
            raise Conflict(f"the decision is {decision.state}; it cannot become {said.state}")
        details = said.details
        if said.state == State.CONFIRMED and run.attempt == decision.attempt:
            run = _ended(tx, run, "stopped", now)
            runs.save(tx, run)
            details = details | ({"turn_step": run.turn["step"]} if run.turn else {})
        decision = _change(tx, decision, said.state, said.actor, said.reason, details, now)
        outbox.announce(
            tx,
            project_id=project_id,
            run_id=run.id,
            type="run.stopped" if said.state == State.CONFIRMED else "run.stop_failed",
            data=events.data(projects.get(tx, project_id), run, decision) | {"report": said.details},
            now=now,
            decision_id=decision.id,
        )
        return decision


def judge(
    database: Database,
    project_id: UUID,
    decision_id: UUID,
    *,
    outcome: str,
    turn_step: int | None,
    actor: str,
    note: str,
    now: datetime,
) -> Decision:
    """Record what turned out to be true of a decision; changing one's mind is a new row."""
    with _locked(database, project_id, decision_id) as (tx, _, decision):
        decisions.add_outcome(tx, decision, outcome=outcome, turn_step=turn_step, actor=actor, note=note, now=now)
        return decision


def finish(database: Database, project_id: UUID, run_id: UUID, status: str, now: datetime) -> Run:
    """Record that a run ended by itself; a run that was stopped stays stopped."""
    with database.transaction() as tx:
        run = runs.lock(tx, project_id, run_id)
        if run is None:
            raise NotFound(f"there is no run {run_id} in this project")
        if run.status == "running":
            run = _ended(tx, run, status, now)
            runs.save(tx, run)
        return run


def _ended(tx: Transaction, run: Run, status: str, now: datetime) -> Run:
    turn = hindsight.turn_of(tx, run)
    return structs.replace(run, version=run.version + 1, status=status, ended_at=now, updated_at=now, turn=turn)


@contextmanager
def _locked(database: Database, project_id: UUID, decision_id: UUID) -> Iterator[tuple[Transaction, Run, Decision]]:
    """A decision and its run, locked run first as everywhere, so that two transactions cannot wait in a ring."""
    with database.transaction() as tx:
        found = decisions.find(tx, project_id, decision_id)
        run = runs.lock(tx, project_id, found.run_id) if found else None
        decision = decisions.find(tx, project_id, decision_id)
        if run is None or decision is None:
            raise NotFound(f"there is no decision {decision_id} in this project")
        yield tx, run, decision


def _change(
    tx: Transaction, decision: Decision, state: State, actor: str, reason: str, details: dict[str, Any], now: datetime
) -> Decision:
    if not decisions.change(tx, decision, state, actor=actor, reason=reason, details=details, now=now):
        raise Conflict(f"the decision {decision.id} was changed by another at the same time; read it and try again")
    return replace(decision, state=state)
