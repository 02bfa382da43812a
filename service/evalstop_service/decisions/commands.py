"""What people and receivers say of a decision, and trainers of their run's end.

What a person says is in the audit log too: there by `proved`, who they are known to be, where `actor` is what they say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from msgspec import structs

from evalstop_service.decisions import guards, transitions
from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.evaluation import cases, change_point
from evalstop_service.rules import decision_lifecycle
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.rules.liveness import Liveness
from evalstop_service.rules.outcome import DecisionOutcome
from evalstop_service.store import audit, decisions, outcomes, projects, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.queue import outbox
from evalstop_service.store.runs import Run


@dataclass(frozen=True)
class Report:
    """What a receiver sees of the job: `acknowledged` (its end is under way), `confirmed` (it is gone) or `failed`.

    `expected_seconds`: with `acknowledged`, how long it will take before the job can be gone.
    """

    state: DecisionState
    actor: str
    reason: str
    details: dict[str, Any]
    expected_seconds: float = 0.0


def veto_decision(
    database: Database,
    project_id: UUID,
    decision_id: UUID,
    actor: str,
    reason: str,
    now: datetime,
    proved: str | None = None,
) -> Decision:
    """Let the run go on; raises Conflict once the stop was handed out. Vetoing twice is harmless."""
    with _locked(database, project_id, decision_id) as (tx, run, decision):
        return _move(tx, run, decision, decision_lifecycle.Vetoed(now, actor, reason), "decision.vetoed", proved)


def release_decision(
    database: Database,
    project_id: UUID,
    decision_id: UUID,
    actor: str,
    reason: str,
    now: datetime,
    proved: str | None = None,
) -> Decision:
    """Have a stop that is on_hold carried out; raises Conflict while the project is paused. Twice is harmless."""
    with _locked(database, project_id, decision_id) as (tx, run, decision):
        project = projects.lock_project(tx, project_id)
        held_by = guards.find_guards(tx, project, run, now) if decision.state == DecisionState.ON_HOLD else ()
        released = decision_lifecycle.Released(now, actor, reason, held_by)
        return _move(tx, run, decision, released, "decision.released", proved)


def undo_decision(
    database: Database,
    project_id: UUID,
    decision_id: UUID,
    actor: str,
    reason: str,
    now: datetime,
    proved: str | None = None,
) -> Decision:
    """Take back a stop that was handed out; raises Conflict when none was. Undoing twice is harmless."""
    with _locked(database, project_id, decision_id) as (tx, run, decision):
        return _move(tx, run, decision, decision_lifecycle.Undone(now, actor, reason), "decision.undone", proved)


def stop_run(
    database: Database,
    project_id: UUID,
    run_id: UUID,
    actor: str,
    reason: str,
    now: datetime,
    proved: str | None = None,
) -> Decision:
    """Have a run stopped at once because a person wants it; raises Conflict once it has ended. Twice is harmless."""
    with database.transaction() as tx:
        run = _run(tx, project_id, run_id)
        if run.status not in ("running", Liveness.LOST):
            raise Conflict(f"the run {run.name!r} has ended: it is {run.status}")
        before = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
        decision = transitions.order_stop(tx, run, actor, reason, now)
        if before is None or before.state != decision.state:
            # Whoever remembers the run has to look again: there is a decision, or another than there was.
            runs.save_run(tx, structs.replace(run, version=run.version + 1, updated_at=now))
            subject, told = f"decision {decision.id}", {"run": run.name, "reason": reason}
            audit.record_action(tx, project_id, actor, "run.stop_ordered", subject, told, now, proved)
        return decision


def record_report(database: Database, project_id: UUID, decision_id: UUID, said: Report, now: datetime) -> Decision:
    """Record what a receiver saw. Saying the same twice is harmless; raises Conflict on what cannot follow."""
    with _locked(database, project_id, decision_id) as (tx, run, decision):
        details = said.details
        gone = said.state == DecisionState.CONFIRMED and decision.state not in (
            DecisionState.CONFIRMED,
            DecisionState.UNDONE,
        )
        if gone and run.attempt == decision.attempt:
            run = _ended(tx, run, "stopped", now)
            details = details | ({"turn_step": run.turn["step"]} if run.turn else {})
        event = decision_lifecycle.Reported(now, said.state, said.actor, said.reason, details, said.expected_seconds)
        moved = transitions.move_decision(tx, run, decision, event)
        if gone and run.attempt == decision.attempt:
            cases.record_case(tx, run, now)
        return moved


def record_decision_outcome(
    database: Database,
    project_id: UUID,
    decision_id: UUID,
    *,
    outcome: str,
    turn_step: int | None,
    actor: str,
    note: str,
    now: datetime,
    proved: str | None = None,
) -> Decision:
    """Record what turned out to be true of a decision; changing one's mind is a new row. Raises Invalid for what
    contradicts itself."""
    with _locked(database, project_id, decision_id) as (tx, run, decision):
        said = _say(tx, run, decision.attempt, decision, (outcome, turn_step, note), actor, now)
        told = {"run": run.name} | said
        audit.record_action(tx, project_id, actor, "decision.judged", f"decision {decision.id}", told, now, proved)
        return decision


def record_run_outcome(
    database: Database,
    project_id: UUID,
    run_id: UUID,
    *,
    outcome: str,
    turn_step: int | None,
    actor: str,
    note: str,
    now: datetime,
    proved: str | None = None,
) -> Run:
    """Record whether it was right to let a run go on, or to stop it if that was decided of its present attempt."""
    with database.transaction() as tx:
        run = _run(tx, project_id, run_id)
        decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
        said = _say(tx, run, run.attempt, decision, (outcome, turn_step, note), actor, now)
        audit.record_action(tx, project_id, actor, "run.judged", f"run {run.name}", said, now, proved)
        return run


def _say(
    tx: Transaction,
    run: Run,
    attempt: int,
    decision: Decision | None,
    word: tuple[str, int | None, str],
    actor: str,
    now: datetime,
) -> dict[str, Any]:
    outcome, turn_step, note = word
    if outcome == DecisionOutcome.RIGHT and turn_step is not None:
        if decision is None:
            raise Invalid("to let a run go on was right if it did not turn: leave out turn_step, or say wrong")
        if turn_step > decision.step:
            raise Invalid(
                f"a stop is right at the turn or after it, and this one was decided at step {decision.step}, "
                f"before {turn_step}: say wrong, or another turn_step"
            )
    outcomes.add_outcome(tx, run.id, attempt, outcome=outcome, turn_step=turn_step, actor=actor, note=note, now=now)
    cases.recompute_case(tx, run, attempt)
    return {"outcome": outcome, "turn_step": turn_step, "note": note}


def finish_run(database: Database, project_id: UUID, run_id: UUID, status: str, now: datetime) -> Run:
    """Record that a run ended by itself; a run that was stopped stays stopped.

    A stop that was not handed out is moot then; one that was waits for the word of the scheduler.
    """
    with database.transaction() as tx:
        run = _run(tx, project_id, run_id)
        return end_run(tx, run, status, now) if run.status in ("running", Liveness.LOST) else run


def end_run(tx: Transaction, run: Run, status: str, now: datetime) -> Run:
    """Record that a run, which is locked and has not been stopped, has ended: as its trainer says, or lost."""
    run = _ended(tx, run, status, now)
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    if decision is not None:
        told = outbox.read_stop_reach(tx, run.id, decision.id).addressed
        transitions.move_decision(
            tx, run, decisions.lock_decision(tx, decision), decision_lifecycle.RunEnded(now, status, told)
        )
    cases.record_case(tx, run, now)
    return run


def _ended(tx: Transaction, run: Run, status: str, now: datetime) -> Run:
    turn = change_point.find_change_point(tx, run)
    run = structs.replace(run, version=run.version + 1, status=status, ended_at=now, updated_at=now, turn=turn)
    runs.save_run(tx, run)
    return run


def _move(
    tx: Transaction,
    run: Run,
    decision: Decision,
    event: decision_lifecycle.Vetoed | decision_lifecycle.Released | decision_lifecycle.Undone,
    action: str,
    proved: str | None,
) -> Decision:
    moved = transitions.move_decision(tx, run, decision, event)
    if moved.state != decision.state:
        subject, told = f"decision {decision.id}", {"run": run.name, "reason": event.reason}
        audit.record_action(tx, run.project_id, event.actor, action, subject, told, event.at, proved)
    return moved


def _run(tx: Transaction, project_id: UUID, run_id: UUID) -> Run:
    run = runs.lock_run(tx, project_id, run_id)
    if run is None:
        raise NotFound(f"there is no run {run_id} in this project")
    return run


@contextmanager
def _locked(database: Database, project_id: UUID, decision_id: UUID) -> Iterator[tuple[Transaction, Run, Decision]]:
    """A decision and its run, locked run first as everywhere, so that two transactions cannot wait in a ring."""
    with database.transaction() as tx:
        decision = decisions.find_decision(tx, project_id, decision_id)
        run = runs.lock_run(tx, project_id, decision.run_id) if decision else None
        if run is None or decision is None:
            raise NotFound(f"there is no decision {decision_id} in this project")
        yield tx, run, decisions.lock_decision(tx, decision)
