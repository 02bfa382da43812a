"""Deadlines: escalates or fails requested stops that no receiver confirmed in time, and rechecks stops on hold.

A stop that every receiver refuses, for example because it is too large, fails at once. One that nobody was handed
waits for what holds it. A pause with an end is ended.

Any number of processes may do this concurrently.
"""

from __future__ import annotations

import logging
from datetime import datetime
from itertools import takewhile

from evalstop_service.background import PeriodicJob, Wait, handle_each
from evalstop_service.clock import Clock
from evalstop_service.decisions import holds, transitions
from evalstop_service.decisions import pause as pausing
from evalstop_service.domain.decision_events import TimePassed
from evalstop_service.domain.decision_lifecycle import SERVICE, DecisionState, GuardKind
from evalstop_service.store import decisions, hand_overs, projects, runs
from evalstop_service.store.database import Database, read_now
from evalstop_service.store.hand_overs import OverdueDecision
from evalstop_service.store.queue import outbox

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""The time between two checks; each reads one index and the deliveries of unconfirmed stops."""


def create_job(database: Database, clock: Clock) -> PeriodicJob:
    """The periodic job that processes overdue decisions, by the same clock as deliveries."""

    def check(pause: Wait) -> float:
        with database.reading() as tx:
            now = read_now(tx, clock)
            over = projects.list_ended_pauses(tx, now)
        process_overdue(database, now, pause)
        holds.withdraw_stops(database, now)
        for project_id in over:
            pausing.resume_project(database, project_id, SERVICE, now, only_if_over=True)
        return CHECK_SECONDS

    return PeriodicJob("deadlines", check)


def process_overdue(database: Database, now: datetime, pause: Wait = lambda _: False) -> None:
    """Process all decisions whose deadline has passed, each in its own transaction, until `pause` asks to stop.

    An error does not delay the other decisions; it is raised at the end.
    """
    with database.reading() as tx:
        overdue = hand_overs.list_overdue(tx, now)
    due = takewhile(lambda _: not pause(0.0), overdue)
    handle_each(due, lambda decision: _process_decision(database, decision, now))


def _process_decision(database: Database, overdue: OverdueDecision, now: datetime) -> None:
    with database.transaction() as tx:
        run = runs.lock_run(tx, overdue.project_id, overdue.run_id)
        decision = decisions.lock_decision(tx, run.id, overdue.id)
        if decision.state == DecisionState.ON_HOLD:
            moved = transitions.recheck_guards(tx, run, decision, now)
        else:
            refusal = outbox.read_stop_reach(tx, run.id, decision.id).refusal
            event = TimePassed(now, attempt_over=run.attempt != decision.attempt, refusal=refusal)
            moved = transitions.move_decision(tx, run, decision, event)
    if moved.guard_kinds == [GuardKind.SHARED_JOB]:
        holds.release_job(database, overdue.project_id, run.id, now)
    if moved.state != decision.state or moved.escalations != decision.escalations:
        log.info("decision %s of run %s is %s: its deadline passed", moved.id, moved.run_name, moved.state)
