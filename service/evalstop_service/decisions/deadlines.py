"""Deadlines: decisions that nobody has moved on in time are looked after, here and in any number of processes."""

from __future__ import annotations

import logging
from datetime import datetime

import sqlalchemy as sa

from evalstop_service.background import Chore, Pause
from evalstop_service.clock import Clock
from evalstop_service.decisions import transitions
from evalstop_service.rules.decision_lifecycle import DecisionState, TimePassed
from evalstop_service.store import decisions, runs
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import OverdueDecision
from evalstop_service.store.queue import queues

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""The longest rest, because any process may set a deadline meanwhile; a look is one step into an index."""


def chore(database: Database, clock: Clock) -> Chore:
    """Looking after what is overdue, by the same clock as deliveries come due."""

    def do(pause: Pause) -> float:
        with database.reading() as tx:
            now, _ = queues.read_clock(tx, clock())
            deadline_at = decisions.find_next_deadline(tx)
        if deadline_at is None or deadline_at > now:
            left_seconds = LOOK_SECONDS if deadline_at is None else (deadline_at - now).total_seconds()
            return min(left_seconds, LOOK_SECONDS)
        process_overdue(database, now, pause)
        return 0.0

    return Chore("deadlines", do)


def process_overdue(database: Database, now: datetime, pause: Pause = lambda _: False) -> None:
    """Look after all decisions whose deadline is over, a transaction each, until `pause` says that it is time to end.

    One that cannot be looked after keeps none of the others waiting; what it raised is raised in the end.
    """
    failure: Exception | None = None
    last: OverdueDecision | None = None
    while True:
        with database.reading() as tx:
            found = decisions.list_overdue(tx, now, last)
        if not found:
            break
        for one in found:
            if pause(0.0):
                return
            try:
                _look_after(database, one, now)
            except sa.exc.OperationalError:  # the others would not fare better
                raise
            except Exception as error:
                error.add_note(f"while looking after the decision {one.id}")
                failure = error
        last = found[-1]
    if failure is not None:
        raise failure


def _look_after(database: Database, overdue: OverdueDecision, now: datetime) -> None:
    with database.transaction() as tx:
        run = runs.lock_run(tx, overdue.project_id, overdue.run_id)
        decision = decisions.find_decision(tx, overdue.project_id, overdue.id)
        if run is None or decision is None:
            return
        decision = decisions.lock_decision(tx, decision)  # which shows whether another process was faster
        if decision.state == DecisionState.ON_HOLD:
            moved = transitions.recheck_guards(tx, run, decision, now)
        else:
            moved = transitions.move_decision(
                tx, run, decision, TimePassed(now, gone_on=run.attempt != decision.attempt)
            )
    if moved.state != decision.state or moved.escalations != decision.escalations:
        log.info("decision %s of run %s is %s: its deadline was over", moved.id, moved.run_name, moved.state)
