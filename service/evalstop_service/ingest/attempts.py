"""A trainer that goes on from a checkpoint: what its earlier attempt observed past it no longer counts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from evalstop_service.decisions import transitions
from evalstop_service.evaluation import cases
from evalstop_service.ingest.run_cache import LiveRun
from evalstop_service.ingest.unit_of_work import Work
from evalstop_service.rules.decision_lifecycle import RunResumed
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.store import checkpoints, decisions, observations, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.queue import outbox
from evalstop_service.store.runs import Run


@dataclass(frozen=True)
class Begun:
    """An attempt that has begun: what it changes in the run's row, and what is left of the one before."""

    changes: dict[str, Any]
    last_steps: dict[str, int]
    superseded: int


def begin(work: Work, live: LiveRun, at: int) -> Begun | None:
    """Begin a new attempt at a step; None if it has begun there already. All that was observed has been written."""
    tx, run = work.tx, live.run
    if run.status == RunStatus.RUNNING and runs.get_resumed_step(tx, run) == at and not _anything_since(tx, run):
        return None
    _withdraw(tx, run, at, work.now)
    if run.ended_at is None:
        cases.record_case(tx, run, work.now)
    attempt = run.attempt + 1
    superseded = observations.supersede_observations(tx, run.id, at, attempt)
    checkpoints.supersede_checkpoints(tx, run.id, at, attempt)
    runs.add_attempt(tx, run.id, attempt, at, work.now)
    last_steps = observations.load_last_steps(tx, [run.id])[run.id]
    changes = {
        "attempt": attempt,
        "status": RunStatus.RUNNING,
        "ended_at": None,
        "turn": None,
        "last_step": max(last_steps.values(), default=None),
    }
    return Begun(changes, last_steps, superseded)


def _anything_since(tx: Transaction, run: Run) -> bool:
    saved = any(checkpoint.attempt == run.attempt for checkpoint in checkpoints.list_checkpoints(tx, run.id))
    return saved or observations.has_observations(tx, run.id, run.attempt)


def _withdraw(tx: Transaction, run: Run, at: int, now: datetime) -> None:
    """A stop that is not delivered yet is not for the attempt that begins now."""
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    if decision is not None:
        told = outbox.read_stop_reach(tx, run.id, decision.id).tried
        transitions.move_decision(tx, run, decisions.lock_decision(tx, decision), RunResumed(now, at, told))
