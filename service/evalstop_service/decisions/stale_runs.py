"""The stale-run monitor: finds runs that stopped reporting and metrics without data, and announces each change once.

    check ──> nothing changed: schedule the next check                              a batch of runs, one transaction
      └─────> stale, lost, alive again, a metric fault: lock the run and record it    a run, one transaction

A check skips runs that another process has locked, so any number of processes may check. A run with a change is
rescheduled before the change is recorded: if the process dies in between, another one records it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from evalstop_service.background import PeriodicJob, Wait, handle_each
from evalstop_service.clock import Clock
from evalstop_service.decisions import commands, guards, transitions
from evalstop_service.domain.decision_events import GuardsRaised
from evalstop_service.domain.decision_lifecycle import DecisionState, GuardKind
from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.health import (
    Liveness,
    MetricFault,
    check_liveness,
    measure_cadence,
    select_new_faults,
    stale_after_seconds,
)
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.projects import policies
from evalstop_service.runs import health
from evalstop_service.store import decisions, projects, run_details, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.projects import Project
from evalstop_service.store.run_details import RunHealth
from evalstop_service.store.runs import Run
from evalstop_service.webhooks import events

log = logging.getLogger(__name__)

RUNS_AT_A_TIME = 200
CHECK_SECONDS = 1.0
"""The time between two checks; one that finds nothing due reads a partial index."""

RETRY_SECONDS = 60.0
"""When another process may record a change that this one found."""

AWAY_SECONDS = 60.0
"""A pause between two checks from which on the service counts as having been away, and runs unable to report."""

NEWEST_POSTS = 2000
"""How many of the newest values of each metric are used for the times of posts."""

EVER_SINCE = datetime.min.replace(tzinfo=UTC)


def create_job(database: Database, clock: Clock) -> PeriodicJob:
    """The periodic job that checks all runs that have not ended."""
    available_since = checked_at = clock()

    def check(pause: Wait) -> float:
        nonlocal available_since, checked_at
        now = clock()
        if (now - checked_at).total_seconds() > AWAY_SECONDS:
            available_since = now
        while check_due_runs(database, now, available_since):
            if pause(0.0):
                return 0.0
            now = clock()
        checked_at = now
        return CHECK_SECONDS

    return PeriodicJob("stale runs", check)


def check_due_runs(database: Database, now: datetime, available_since: datetime = EVER_SINCE) -> int:
    """Check some of the due runs, and record changes; returns the number checked, 0 when none was due.

    `available_since`: no run is silent for longer than it could have reported.
    """
    with database.transaction() as tx:
        due = run_details.claim_due_checks(tx, now, RUNS_AT_A_TIME)
        next_checks = _find_next_checks(tx, due, now, available_since)
        changed = [check for check in due if check.run_id not in next_checks]
        retry_at = now + timedelta(seconds=RETRY_SECONDS)
        run_details.postpone_checks(tx, next_checks | {check.run_id: retry_at for check in changed})
    handle_each(changed, lambda check: _record_change(database, check, now, available_since))
    return len(due)


def _find_next_checks(
    tx: Transaction, due: list[RunHealth], now: datetime, available_since: datetime
) -> dict[UUID, datetime | None]:
    """When to check each unchanged run again; None for those that have ended."""
    loaded = runs.load_runs(tx, [record.run_id for record in due])
    running = {run_id: run for run_id, run in loaded.items() if run.status == RunStatus.RUNNING}
    project_ids = {run.project_id for run in running.values()}
    settings = {project_id: projects.get_project(tx, project_id) for project_id in project_ids}
    faults = _find_metric_faults(tx, running.values())
    next_checks: dict[UUID, datetime | None] = {}
    for record in due:
        run = running.get(record.run_id)
        if run is None:
            next_checks[record.run_id] = None
            continue
        stale_seconds = settings[run.project_id].stale_seconds
        state, check_at = _assess_liveness(run, record, stale_seconds, record.cadence_seconds, now, available_since)
        # A cadence that raises the run's limit is measured again at each check: the run may now report more often.
        is_slow = stale_after_seconds(stale_seconds, record.cadence_seconds) > stale_seconds
        known, found = ({fault.metric for fault in listed} for listed in (record.metric_faults, faults[run.id]))
        if state == record.state and not is_slow and known == found:
            next_checks[run.id] = check_at
    return next_checks


def _assess_liveness(
    run: Run,
    record: RunHealth,
    stale_seconds: float,
    cadence_seconds: float | None,
    now: datetime,
    available_since: datetime,
) -> tuple[Liveness, datetime | None]:
    """The liveness of a run with this cadence, and when to check it again."""
    is_stale, reported_at = record.state == Liveness.STALE, health.last_report_at(run, record)
    # A run that was stale already stays so until it reports.
    silence = (now - (reported_at if is_stale else max(reported_at, available_since))).total_seconds()
    stale_for = (now - max(record.changed_at, available_since)).total_seconds() if is_stale else None
    state, seconds = check_liveness(silence, stale_for, stale_seconds, cadence_seconds)
    return state, None if state is Liveness.LOST else now + timedelta(seconds=seconds)


def _record_change(database: Database, due: RunHealth, now: datetime, available_since: datetime) -> None:
    """Record and announce a change in a run.

    1. Lock the run and read everything again: the trainer may have reported since the check.
    2. Measure the cadence, which a check does not do because it reads many rows.
    3. Save the health of the run before announcing, so that no change is announced twice.
    4. Stale: put its pending stop on hold. Lost: end the run.
    """
    with database.transaction() as tx:
        run = runs.lock_run(tx, due.project_id, due.run_id)
        before = run_details.load_health(tx, [due.run_id]).get(due.run_id)
        if before is None or run.status != RunStatus.RUNNING:
            return
        project = projects.get_project(tx, run.project_id)
        cadence_seconds = _measure_cadence(tx, run)
        state, check_at = _assess_liveness(run, before, project.stale_seconds, cadence_seconds, now, available_since)
        faults = _find_metric_faults(tx, [run])[run.id]
        after = replace(
            before,
            state=state,
            next_check_at=check_at,
            cadence_seconds=cadence_seconds,
            metric_faults=faults,
            changed_at=before.changed_at if state == before.state else now,
        )
        run_details.save_health(tx, after)
        if state != before.state:
            _apply_liveness(tx, project, run, after, now)
        for fault in select_new_faults(before.metric_faults, faults):
            events.announce_run_event(tx, EventType.METRIC_FAULT, project, run, now, metric_fault=fault)
    if state != before.state:
        log.info("run %s is %s", run.name, state, extra={"run_id": run.id})


def _measure_cadence(tx: Transaction, run: Run) -> float | None:
    readings = run_details.load_readings(tx, [(run, metric) for metric in run.metrics], NEWEST_POSTS)
    return measure_cadence([[item.received_at for item in of_metric] for of_metric in readings.values()], NEWEST_POSTS)


def _apply_liveness(tx: Transaction, project: Project, run: Run, record: RunHealth, now: datetime) -> None:
    last_seen_at = health.last_report_at(run, record)
    report = {"state": record.state, "last_seen_at": last_seen_at, "cadence_seconds": record.cadence_seconds}
    if record.state == Liveness.STALE:
        events.announce_run_event(tx, EventType.STALE, project, run, now, health=report)
        decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
        if decision is not None and decision.state == DecisionState.PENDING:
            raised = guards.find_guards(tx, projects.lock_project(tx, project.id), run, now, decision)
            silent = GuardsRaised(now, tuple(guard for guard in raised if guard.kind is GuardKind.STALE))
            transitions.move_decision(tx, run, decisions.lock_decision(tx, run.id, decision.id), silent, project)
    elif record.state == Liveness.LOST:
        run = commands.end_run(tx, run, Liveness.LOST, now)
        events.announce_run_event(tx, EventType.LOST, project, run, now, health=report)


def _find_metric_faults(tx: Transaction, running: Collection[Run]) -> Mapping[UUID, tuple[MetricFault, ...]]:
    """The metric faults of each run."""
    judging = {policy_id: policies.read_policy(tx, policy_id) for policy_id in {run.policy_id for run in running}}
    return health.load_metric_faults(tx, [(run, judging[run.policy_id]) for run in running])
