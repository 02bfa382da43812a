"""A trainer that goes on from a checkpoint: what its earlier attempt observed past it no longer counts."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from evalstop_service import lifecycle
from evalstop_service.ingest.live import LiveRun
from evalstop_service.ingest.work import Work
from evalstop_service.store import checkpoints, decisions, observations, outbox, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.runs import Run


def begin(work: Work, live: LiveRun, at: int) -> int | None:
    """Begin a new attempt at a step; gives the number of superseded observations, None if it has begun there already.

    What is left of the live run is its row: its monitor and its scores have to be brought back.
    """
    tx, run = work.tx, live.run
    if run.status == "running" and runs.resumed_from(tx, run) == at and not _anything_since(tx, run):
        return None
    _withdraw(tx, run, at, work.now)
    run = replace(run, attempt=run.attempt + 1, status="running", ended_at=None, turn=None)
    superseded = observations.supersede(tx, run.id, at, run.attempt)
    checkpoints.supersede(tx, run.id, at, run.attempt)
    runs.add_attempt(tx, run, at, work.now)
    live.last_steps = observations.last_steps(tx, [run.id]).get(run.id, {})
    live.run = replace(run, last_step=max(live.last_steps.values(), default=None))
    live.decided, live.scores = False, None
    return superseded


def _anything_since(tx: Transaction, run: Run) -> bool:
    saved = any(checkpoint.attempt == run.attempt for checkpoint in checkpoints.listing(tx, run.id))
    return saved or observations.any_since(tx, run.id, run.attempt)


def _withdraw(tx: Transaction, run: Run, at: int, now: datetime) -> None:
    """A stop that still waits for its grace period to end is not for the attempt that begins now."""
    decision = decisions.of_attempt(tx, run.id, run.attempt)
    if decision is None or decision.state != lifecycle.State.PENDING or decision.due_at <= now:
        return
    outbox.cancel(tx, run.id, decision.id, now)
    why = f"the trainer went on from step {at} before the grace period was over"
    decisions.change(tx, decision, lifecycle.State.VETOED, actor="evalstop", reason=why, details={}, now=now)
