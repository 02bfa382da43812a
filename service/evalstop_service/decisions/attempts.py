"""Attempts: closing one when the next begins, through a resume, a reopening or a person's order."""

from __future__ import annotations

from datetime import datetime

from msgspec import structs

from evalstop_service.decisions import transitions
from evalstop_service.domain.decision_lifecycle import STOPPING, DecisionState, RunResumed
from evalstop_service.evaluation.cases import record_case
from evalstop_service.store import cases, decisions, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.queue import outbox
from evalstop_service.store.runs import Run

SPENT = STOPPING | {DecisionState.MOOT}
"""States in which the stop of an attempt was or never will be sent: a run that continues could no longer be stopped.
Decisions that follow their run are not included."""


def leave_attempt(tx: Transaction, run: Run, step: int, now: datetime) -> None:
    """Cancel the undelivered stop of a run's current attempt, and record its case; the run is locked."""
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    if decision is not None:  # an undelivered stop must not apply to the attempt that begins now
        tried = outbox.read_stop_reach(tx, run.id, decision.id).tried
        locked = decisions.lock_decision(tx, run.id, decision.id)
        transitions.move_decision(tx, run, locked, RunResumed(now, step, tried))
    if run.ended_at is None:
        record_case(tx, run, now)


def carry_decision(tx: Transaction, run: Run) -> Decision | None:
    """Detach a decision that follows the run from the previous attempt; None: the run begins without one."""
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt - 1)
    if decision is None or not decision.follows_run:
        return None
    cases.delete_case(tx, run.id, decision.attempt)
    return decisions.carry_to_attempt(tx, decision, run.attempt)


def begin_attempt(tx: Transaction, run: Run, now: datetime) -> Run:
    """The run, which is locked, in a new attempt that continues from the same step: all its observations count.

    The caller saves its row, and raises its version.
    """
    step = run.last_step or 0
    leave_attempt(tx, run, step, now)
    runs.add_attempt(tx, run.id, run.attempt + 1, step, now)
    return structs.replace(run, attempt=run.attempt + 1, updated_at=now)


def continue_lost_run(tx: Transaction, run: Run, now: datetime) -> Run:
    """A lost run, which is locked, as it continues: in a new attempt if its stop was moot since it was lost.

    The caller saves its row, whose version was raised.
    """
    cases.delete_case(tx, run.id, run.attempt)
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    if decision is None or decision.state is not DecisionState.MOOT:
        return run
    return begin_attempt(tx, run, now)


def is_spent(tx: Transaction, run: Run) -> bool:
    """Whether the stop of the run's current attempt was sent, or can no longer be."""
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    return decision is not None and decision.state in SPENT and not decision.follows_run
