"""Notices to people, which decide nothing: alerts of trainers, and runs that meet a rule of their project.

A job looks at the running runs of projects that have rules. A value counts when it was received since the job's last
look, so that a spike between two looks is found, and values that are sent again are not. After a notice a rule pauses.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from uuid import UUID

from evalstop_service.background import PeriodicJob, Wait, handle_each
from evalstop_service.clock import Clock
from evalstop_service.domain import metric_rules
from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.labels import read_gpus
from evalstop_service.domain.metric_rules import MetricRule, RuleBreach, RuleKind
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.errors import Conflict
from evalstop_service.store import observations, projects, run_lists, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.queue import outbox
from evalstop_service.store.run_lists import RunFilter
from evalstop_service.store.runs import Run
from evalstop_service.webhooks import events
from evalstop_service.webhooks.event_data import Alert

EVERY_SECONDS = 15.0

OVERLAP_SECONDS = 30.0
"""How far a look reaches back beyond the last one: a commit may become visible later than the time that it wrote."""

FIRST_LOOK_SECONDS = 3600.0
"""How far the first look reaches back: values may have been received while no process ran the job."""

MOST_RUNS = 1000
"""The newest running runs of a project that are looked at."""

USED: dict[str, Callable[[float, float | None], float | None]] = {
    "evalstop/hours": lambda hours, _: hours,
    "evalstop/gpu_hours": lambda hours, gpus: None if gpus is None else hours * gpus,
}
"""What a run has used since it was opened, by the names that rules have for it; None: its GPUs are not known."""

MOST_ALERTS = 20
"""The most alerts of a run in an hour."""


def raise_alert(tx: Transaction, project_id: UUID, run_id: UUID, alert: Alert, now: datetime) -> Run:
    """Announce an alert; sent again, it counts once. Raises NotFound, and Conflict beyond `MOST_ALERTS`."""
    run = runs.lock_run(tx, project_id, run_id)
    earlier = outbox.list_data(tx, run.id, [EventType.ALERT], since=now - timedelta(hours=1))
    if all(data["alert"]["id"] != str(alert.id) for _, data in earlier):
        if len(earlier) >= MOST_ALERTS:
            raise Conflict(f"the run has raised {MOST_ALERTS} alerts within an hour; further ones are dropped")
        project = projects.get_project(tx, project_id)
        events.announce_run_event(tx, EventType.ALERT, project, run, now, alert=alert)
    return run


def create_job(database: Database, clock: Clock) -> PeriodicJob:
    """The periodic job that looks at all running runs of projects with rules."""
    looked_at = clock() - timedelta(seconds=FIRST_LOOK_SECONDS)

    def look(pause: Wait) -> float:
        nonlocal looked_at
        since, now = looked_at - timedelta(seconds=OVERLAP_SECONDS), clock()
        check_rules(database, since, now)
        looked_at = now
        return EVERY_SECONDS

    return PeriodicJob("rules", look)


def check_rules(database: Database, since: datetime, now: datetime) -> None:
    """Announce what meets a rule by the values received since then."""
    with database.reading() as tx:
        found = [
            (run, breach, rule.pause_seconds)
            for project in projects.list_projects(tx)
            if (rules := [metric_rules.parse_rule(text) for text in project.rules or ()])
            for run in run_lists.list_runs(tx, project.id, RunFilter(status=RunStatus.RUNNING), MOST_RUNS)
            for rule in rules
            if (breach := _check_run(tx, run, rule, since, now)) is not None
        ]
    handle_each(found, lambda item: _announce(database, *item, now))


def _check_run(tx: Transaction, run: Run, rule: MetricRule, since: datetime, now: datetime) -> RuleBreach | None:
    """The last breach of the rule, if there is a new one."""
    if rule.kind is RuleKind.ABSENT_FOR:
        newest = observations.list_newest(tx, run.id, rule.metric, 1)
        silent_since = newest[0].received_at if newest else run.created_at
        return metric_rules.find_absence(rule, (now - silent_since).total_seconds())
    if rule.metric in USED:
        used = USED[rule.metric]((now - run.created_at).total_seconds() / 3600, read_gpus(run.labels))
        return None if used is None else metric_rules.find_breach(rule, [(run.last_step or 0, used)])
    if run.updated_at < since:
        return None
    newest = observations.list_newest(tx, run.id, rule.metric, metric_rules.MOST_OVER * 2)[::-1]
    points = [(item.step, item.value) for item in newest]
    breaches = (
        metric_rules.find_breach(rule, points[: place + 1])
        for place in range(len(points) - 1, -1, -1)
        if newest[place].received_at >= since
    )
    return next((breach for breach in breaches if breach is not None), None)


def _announce(database: Database, run: Run, breach: RuleBreach, pause_seconds: float, now: datetime) -> None:
    """Announce a breach, unless it was announced, or its rule was for this run within the pause. The run is locked, so
    that of several processes one announces it."""
    with database.transaction() as tx:
        run = runs.lock_run(tx, run.project_id, run.id)
        pause = timedelta(seconds=pause_seconds)
        since = now - max(pause, timedelta(seconds=FIRST_LOOK_SECONDS + OVERLAP_SECONDS))
        is_known = any(
            data["rule"]["rule"] == breach.rule
            and (at > now - pause or (breach.step is not None and data["rule"]["step"] == breach.step))
            for at, data in outbox.list_data(tx, run.id, [EventType.RULE_MET], since=since, limit=10_000)
        )
        if run.status is RunStatus.RUNNING and not is_known:
            project = projects.get_project(tx, run.project_id)
            events.announce_run_event(tx, EventType.RULE_MET, project, run, now, rule=breach)
