"""Guards: rules that put a stop on hold, whatever the detectors say.

| kind | the stop is on hold because | until |
|---|---|---|
| `paused` | the project is paused | the project is resumed |
| `stops_per_hour` | the project has reached its limit of stops within an hour | time passes, or the limit is raised |
| `stops_share` | too large a share of its runs would be stopped within an hour | time passes, or the limit is raised |
| `stale` | the run is late with its reports, or is lost | it reports again |
| `metric_fault` | a metric by which the policy stops the run has no data | the metric has data again |
| `no_checkpoint` | the run has no best checkpoint, so stopping it would leave nothing | a checkpoint with an eval |
| `cannot_park` | no endpoint subscribes to `run.park_requested`, so the job cannot be parked | an endpoint does |
| `shared_job` | other live runs of the job, which are not to be stopped, would end with it | they end or stop too |
| `group_last` | the rule of a group would stop its last run, and none completed | others begin or complete |
| `group_share` | the rule would stop too large a share of the live runs at once; one may be | the others have ended |

A copy of another run ends nothing: it waits for a pause and for a stale run alone. A policy may override `stale`,
`metric_fault` and `no_checkpoint` (`stops_despite`). Stops are counted from the rows of decisions. A transaction that
decides locks the project until its commit, so of two concurrent stops the second counts the first. This lock is always
taken after the lock of the run (see `projects.lock_project`). A transaction that decides on runs of several projects
locks them in the order of the messages; the database resolves a deadlock of two such transactions, and ingestion
retries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import msgspec
from evalstop_detectors import GroupRule, Policy
from evalstop_detectors.wording import format_count, format_percent

from evalstop_service.clock import rfc3339
from evalstop_service.decisions import group_rules
from evalstop_service.domain.decision_lifecycle import Action, Guard, GuardKind
from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.health import Liveness
from evalstop_service.projects import policies
from evalstop_service.runs import health
from evalstop_service.store import decisions, endpoints, groups, run_details, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import JobRun, Run

WINDOW = timedelta(hours=1)
"""The window in which stops are counted."""

FEWEST_STOPS, FEWEST_RUNS = 10, 20
"""The share is checked from this many stops or runs on: two of three runs may well turn within the same hour."""

SHOWN_RUNS = 20
"""How many of the other runs of a job a guard names."""

MOST_COUNTED = 1e9
"""No project has as many runs: a share so small that it would take more is never enough for a second stop."""


def find_guards(tx: Transaction, project: Project, run: Run, now: datetime, decision: Decision) -> tuple[Guard, ...]:
    """The guards against a decision on a run; none when it may be carried out.

    The run and then its project are locked in this transaction, and all observations of the run are written.
    """
    policy = policies.read_policy(tx, run.policy_id)
    overridden = tuple(map(GuardKind, policy.stops_despite))
    of_run = _find_run_guards(tx, project, run, policy, now, decision.action)
    found = (
        *find_pause(project),
        *_find_reached_limits(tx, project, run, now),
        *_find_group_guards(tx, run, decision),
        *(guard for guard in of_run if guard.kind not in overridden),
    )
    copies = decision.action is Action.EXPLOIT
    return tuple(guard for guard in found if not copies or guard.kind in (GuardKind.PAUSED, GuardKind.STALE))


def find_pause(project: Project) -> tuple[Guard, ...]:
    """The guard of a paused project; none if it is not paused."""
    if project.paused_at is None:
        return ()
    reason = f": {project.paused_reason}" if project.paused_reason else ""
    details = {"paused_at": rfc3339(project.paused_at), "paused_by": project.paused_by}
    end = ""
    if project.paused_until is not None:
        details["paused_until"] = rfc3339(project.paused_until)
        end = f" until {details['paused_until']}"
    return (Guard(GuardKind.PAUSED, f"the project was paused by {project.paused_by}{end}{reason}", details),)


def _find_reached_limits(tx: Transaction, project: Project, run: Run, now: datetime) -> Iterator[Guard]:
    most, share = project.stops_per_hour, project.stops_share
    if most is None and share is None:
        return
    stops, ended = decisions.count_issued_stops(tx, project.id, now - WINDOW, but_for=(run.id, run.attempt))
    if most is not None and stops >= most:
        reason = f"{format_count(stops, 'stop')} within an hour; the limit of the project is {most}"
        yield Guard(GuardKind.STOPS_PER_HOUR, reason, {"stops": stops, "stops_per_hour": most})
    if share is not None and stops > 0:  # one stop is always allowed
        # Count the stopped runs too, or each stop would shrink the denominator. Running runs are counted only up to
        # the number that allows one more stop, or from which the share is checked.
        enough = math.ceil(min((stops + 1) / share, MOST_COUNTED) - 1e-9)
        total = ended + runs.count_running_runs(tx, project.id, max(0, max(enough, FEWEST_RUNS) - ended))
        if total < enough and (stops >= FEWEST_STOPS or total >= FEWEST_RUNS):
            stopped = f"{stops + 1} of {total} runs ({format_percent((stops + 1) / total)}) in the last hour"
            reason = f"this stop would be {stopped}; the limit is {format_percent(share)}"
            yield Guard(GuardKind.STOPS_SHARE, reason, {"stops": stops, "runs": total, "stops_share": share})


def _find_group_guards(tx: Transaction, run: Run, decision: Decision) -> Iterator[Guard]:
    """The guards of the group whose rule decided. One run at a time may be stopped, as of a search with one worker."""
    if decision.group is None:
        return
    live, ending, completed = groups.count_siblings(tx, run.project_id, decision.group, but_for=run.id)
    if live == ending and not completed:
        reason = f"it is the last run of the group {decision.group} that is not being stopped"
        yield Guard(GuardKind.GROUP_LAST, reason, {"group": decision.group})
    group = groups.find_group(tx, run.project_id, decision.group)
    most = GroupRule("median").most_share if group is None else group_rules.read_rule(group).most_share
    if ending and ending + 1 > most * (live + 1):
        reason = f"{ending + 1} of {live + 1} live runs of the group would be stopped at once"
        details = {"stops": ending, "runs": live + 1, "most_share": most}
        yield Guard(GuardKind.GROUP_SHARE, f"{reason}; the limit is {format_percent(most)}", details)


def _find_run_guards(
    tx: Transaction, project: Project, run: Run, policy: Policy, now: datetime, action: Action
) -> Iterator[Guard]:
    record = run_details.load_health(tx, [run.id]).get(run.id)
    if health.find_liveness(run, record, project.stale_seconds, now) is not Liveness.ALIVE:
        since = rfc3339(health.last_report_at(run, record))
        yield Guard(GuardKind.STALE, f"the run has not reported since {since}", {"heard_at": since})
    if faults := health.load_metric_faults(tx, [(run, policy)])[run.id]:
        reasons = "; ".join(f"{fault.metric}: {fault.reason}" for fault in faults)
        details = {"metric_faults": msgspec.to_builtins(faults)}
        yield Guard(GuardKind.METRIC_FAULT, f"metrics that the policy needs have no data: {reasons}", details)
    if run.best_checkpoint is None:
        yield Guard(GuardKind.NO_CHECKPOINT, "no checkpoint with an eval is registered")
    if action is Action.PARK and not _can_park(tx, project):
        reason = "no endpoint subscribes to run.park_requested, so the job cannot be parked"
        yield Guard(GuardKind.CANNOT_PARK, reason)
    yield from raise_shared_job(runs.list_endangered_runs(tx, run, action))


def raise_shared_job(others: Sequence[JobRun]) -> tuple[Guard, ...]:
    """The guard of these other runs of a job; none if there are none."""
    if not others:
        return ()
    names = [other.name for other in others[:SHOWN_RUNS]]
    listed = ", ".join(names) + (", ..." if len(others) > len(names) else "")
    details = {"runs": names, "count": len(others), "waiting": all(other.waits for other in others)}
    reason = f"{format_count(len(others), 'other live run')} in this job: {listed}"
    return (Guard(GuardKind.SHARED_JOB, reason, details),)


def _can_park(tx: Transaction, project: Project) -> bool:
    return any(
        endpoint.enabled and endpoint.format == "standard" and endpoint.wants(EventType.PARK_REQUESTED)
        for endpoint in endpoints.list_endpoints(tx, project.id)
    )
