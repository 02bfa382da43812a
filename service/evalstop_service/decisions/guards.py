"""What speaks against stopping a run now, whatever its detectors say.

| kind | what holds the stop back | what lifts it |
|---|---|---|
| `paused` | somebody has paused the project | resuming it, nothing else |
| `stops_per_hour` | as many stops of the project were handed out within an hour as may be | time, or another bound |
| `stops_share` | so large a share of its runs was stopped within an hour | time, or another bound |
| `stale` | nothing was heard of the run for long, or it is lost | a post, a heartbeat |
| `dead_detector` | a metric that its policy stops it by tells nothing | the metric, when it is well again |
| `no_checkpoint` | there is no best checkpoint that would be left of the run | a checkpoint with an eval |

The last three are reservations that a policy may do without (`stops_despite`). Nothing is counted beforehand: the rows
of decisions tell how many there were, and whoever decides holds the project's row until its commit, so that of two at
one time the second sees the first. That lock comes after the run's, everywhere (see `projects.lock`). A transaction
that decides on runs of several projects takes them in the order in which news came; two such may wait in a ring, which
the database breaks and ingestion tries again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timedelta

from evalstop_detectors import GuardKind, Policy

from evalstop_service.clock import rfc3339
from evalstop_service.projects import policies
from evalstop_service.rules import dead_metrics
from evalstop_service.rules.decision_lifecycle import PAUSED, Guard
from evalstop_service.rules.liveness import Liveness
from evalstop_service.runs import health
from evalstop_service.store import decisions, run_health, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run

WINDOW = timedelta(hours=1)
"""Within which stops are counted."""

KINDS = (PAUSED, "stops_per_hour", "stops_share", *GuardKind)


def find_guards(tx: Transaction, project: Project, run: Run, now: datetime) -> tuple[Guard, ...]:
    """What holds a stop of this run back; nothing when it may be stopped.

    The run and then its project are locked in this transaction, and all that was observed of the run is written.
    """
    policy = policies.read(tx, run.policy_id)
    despite = () if policy is None else policy.stops_despite
    reservations = (guard for guard in _reservations(tx, project, run, policy, now))
    return (
        *find_pause(project),
        *_bounds(tx, project, run, now),
        *(guard for guard in reservations if guard.kind not in despite),
    )


def find_pause(project: Project) -> tuple[Guard, ...]:
    """The guard of a paused project, none of any other."""
    if project.paused_at is None:
        return ()
    why = f": {project.paused_reason}" if project.paused_reason else ""
    details = {"paused_at": rfc3339(project.paused_at), "paused_by": project.paused_by}
    return (Guard(PAUSED, f"the project was paused by {project.paused_by}{why}", details),)


def _bounds(tx: Transaction, project: Project, run: Run, now: datetime) -> Iterator[Guard]:
    most, share = project.stops_per_hour, project.stops_share
    if most is None and share is None:
        return
    stops, ended = decisions.count_issued_stops(tx, project.id, now - WINDOW, but_for=(run.id, run.attempt))
    if most is not None and stops >= most:
        reason = f"{stops} runs were stopped within an hour, and the project allows {most}"
        yield Guard("stops_per_hour", reason, {"stops": stops, "stops_per_hour": most})
    if share is not None and stops > 0:  # one is always allowed: a project may have a single run
        # Of the runs that would be there if none had been stopped; counted no further than it takes to allow one more.
        enough = math.ceil((stops + 1) / share - 1e-9)
        there = ended + runs.count_running_runs(tx, project.id, max(0, enough - ended))
        if there < enough:
            reason = f"{stops} of {there} runs were stopped within an hour, and the project allows {share:.0%} of them"
            yield Guard("stops_share", reason, {"stops": stops, "runs": there, "stops_share": share})


def _reservations(tx: Transaction, project: Project, run: Run, policy: Policy | None, now: datetime) -> Iterator[Guard]:
    pulse = run_health.load_health(tx, [run.id]).get(run.id)
    heard_at = health.last_report_at(run, pulse)
    if health.find_liveness(run, pulse, project.stale_seconds, now) is not Liveness.ALIVE:
        reason = f"nothing was heard of the run since {rfc3339(heard_at)}: its metrics may not be what they were"
        yield Guard(GuardKind.STALE, reason, {"heard_at": rfc3339(heard_at)})
    if policy is not None and (dead := health.load_metric_faults(tx, [(run, policy)])[run.id]):
        words = "; ".join(f"{one.metric}: {one.reason}" for one in dead)
        yield Guard(GuardKind.DEAD_DETECTOR, f"its detectors are blind: {words}", {"dead": dead_metrics.as_json(dead)})
    if run.best_checkpoint is None:
        reason = "no checkpoint with an eval is registered, so nothing would be left of the run"
        yield Guard(GuardKind.NO_CHECKPOINT, reason)
