"""The vigil: runs are looked at when they would have been silent for too long, and what is found is told once.

    look ──> nothing new: put off until silence would be too long again             a batch of runs, one transaction
      └────> stale, lost, alive again, blind, another cadence: lock the run and tell     a run, one transaction

A look takes the pulses that are due and passes over those that another process holds, so any number of processes may be
at it. What a look leaves to be told is put off for a while before it is begun: a process that dies over it is relieved.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from evalstop_detectors import GuardKind, Policy

from evalstop_service.background import Chore, Pause
from evalstop_service.clock import Clock
from evalstop_service.decisions import commands, guards, transitions
from evalstop_service.projects import policies
from evalstop_service.rules import dead_metrics, liveness
from evalstop_service.rules.dead_metrics import Dead
from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.rules.event_types import EventType
from evalstop_service.rules.liveness import Liveness
from evalstop_service.runs import health
from evalstop_service.store import decisions, projects, run_health, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.projects import Project
from evalstop_service.store.run_health import RunHealth
from evalstop_service.store.runs import Run
from evalstop_service.webhooks import events

log = logging.getLogger(__name__)

RUNS_AT_A_TIME = 200
LOOK_SECONDS = 5.0
"""The longest rest: a run that is opened meanwhile may have to be looked at sooner than all others."""

HELD_SECONDS = 60.0
"""As long a run is left to the process that found something about it."""

Policies = dict[UUID, Policy | None]
"""Policies by their ids; None is one that cannot be read."""


def chore(database: Database, clock: Clock) -> Chore:
    """Looking after all runs that have not ended."""
    known: Policies = {}

    def do(pause: Pause) -> float:
        while check_due_runs(database, clock(), known):
            if pause(0.0):
                return 0.0
        with database.reading() as tx:
            next_check_at = run_health.find_next_check(tx)
        left_seconds = LOOK_SECONDS if next_check_at is None else (next_check_at - clock()).total_seconds()
        return min(max(left_seconds, 0.0), LOOK_SECONDS)

    return Chore("vigil", do)


def check_due_runs(database: Database, now: datetime, known: Policies | None = None) -> int:
    """Look at some of the runs whose time has come, and tell what is new; gives their number, 0 when none was due.

    `known`: policies that were read before, by their ids.
    """
    with database.transaction() as tx:
        due = run_health.claim_due_checks(tx, now, RUNS_AT_A_TIME)
        looks = _looks(tx, due, {} if known is None else known, now)
        new = [pulse for pulse in due if pulse.run_id not in looks]
        until = now + timedelta(seconds=HELD_SECONDS)
        run_health.postpone_checks(tx, looks | {pulse.run_id: until for pulse in new})
    for pulse in new:
        _tell(database, pulse, now)
    return len(due)


def _looks(tx: Transaction, due: list[RunHealth], known: Policies, now: datetime) -> dict[UUID, datetime | None]:
    """When to look again at each run of which there is nothing new; None for those that have ended."""
    found = runs.load_runs(tx, [pulse.run_id for pulse in due])
    running = {run_id: run for run_id, run in found.items() if run.status == "running"}
    settings = {
        project_id: projects.get_project(tx, project_id) for project_id in {run.project_id for run in running.values()}
    }
    dead = _dead(tx, list(running.values()), known)
    looks: dict[UUID, datetime | None] = {}
    for pulse in due:
        run = running.get(pulse.run_id)
        if run is None:
            looks[pulse.run_id] = None
            continue
        stale_seconds = settings[run.project_id].stale_seconds
        state, next_check_at = _judge(run, pulse, stale_seconds, pulse.cadence_seconds, now)
        # A habit that sets the run's limit is learnt anew at each look: the run may have become a quicker one.
        is_slow = liveness.stale_after_seconds(stale_seconds, pulse.cadence_seconds) > stale_seconds
        if state == pulse.state and not is_slow and not dead_metrics.differ(pulse.dead, dead[run.id]):
            looks[run.id] = next_check_at
    return looks


def _judge(
    run: Run, pulse: RunHealth, stale_seconds: float, cadence_seconds: float | None, now: datetime
) -> tuple[Liveness, datetime | None]:
    """How a run is by this cadence, and when to look again."""
    silence = (now - health.last_report_at(run, pulse)).total_seconds()
    stale_for = (now - pulse.changed_at).total_seconds() if pulse.state == Liveness.STALE else None
    state = liveness.assess_liveness(silence, stale_for, stale_seconds, cadence_seconds)
    if state is Liveness.LOST:
        return state, None
    return state, now + timedelta(
        seconds=liveness.seconds_until_check(silence, stale_for, stale_seconds, cadence_seconds)
    )


def _tell(database: Database, held: RunHealth, now: datetime) -> None:
    """Record what is new about a run, and tell of it."""
    with database.transaction() as tx:
        run = runs.lock_run(tx, held.project_id, held.run_id)
        pulse = run_health.load_health(tx, [held.run_id]).get(held.run_id)
        if run is None or pulse is None or run.status != "running":
            return
        project = projects.get_project(tx, run.project_id)
        cadence_seconds = health.load_cadence(tx, run)
        state, next_check_at = _judge(run, pulse, project.stale_seconds, cadence_seconds, now)
        dead = _dead(tx, [run], {})[run.id]
        found = replace(
            pulse,
            state=state,
            next_check_at=next_check_at,
            cadence_seconds=cadence_seconds,
            dead=dead_metrics.as_json(dead),
            changed_at=pulse.changed_at if state == pulse.state else now,
        )
        run_health.save_health(tx, found)
        if state != pulse.state:
            _turned(tx, project, run, found, now)
        for one in dead_metrics.as_json(dead_metrics.news(pulse.dead, dead)):
            events.announce_run_event(tx, EventType.METRIC_UNUSABLE, project, run, now, metric=one)
    if state != pulse.state:
        log.info("run %s is %s", run.name, state, extra={"run_id": run.id})


def _turned(tx: Transaction, project: Project, run: Run, pulse: RunHealth, now: datetime) -> None:
    heard_at = health.last_report_at(run, pulse)
    told = {"state": pulse.state, "last_seen_at": heard_at, "cadence_seconds": pulse.cadence_seconds}
    if pulse.state == Liveness.STALE:
        events.announce_run_event(tx, EventType.STALE, project, run, now, health=told)
        decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
        if decision is not None and decision.state == DecisionState.PENDING:
            against = guards.find_guards(tx, projects.lock_project(tx, project.id), run, now)
            transitions.hold_stop(tx, run, [guard for guard in against if guard.kind == GuardKind.STALE], now)
    elif pulse.state == Liveness.LOST:
        run = commands.end_run(tx, run, Liveness.LOST, now)
        events.announce_run_event(tx, EventType.LOST, project, run, now, health=told)


def _dead(tx: Transaction, found: list[Run], known: Policies) -> dict[UUID, tuple[Dead, ...]]:
    """The dead metrics of each run; none where its policy cannot be read, which must not end the vigil over others."""
    for policy_id in {run.policy_id for run in found} - known.keys():
        known[policy_id] = policies.read(tx, policy_id)
    judged = [(run, policy) for run in found if (policy := known[run.policy_id]) is not None]
    return {run.id: () for run in found} | dict(health.load_metric_faults(tx, judged))
