"""A run's vital signs as its rows tell them, read by whoever stops a run, looks after it or shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

from evalstop_detectors import MetricRole, Policy

from evalstop_service.rules import dead_metrics, liveness
from evalstop_service.rules.dead_metrics import Dead, Progress, Watched
from evalstop_service.rules.liveness import Liveness
from evalstop_service.runs.watched_metrics import DEFAULT_METRICS
from evalstop_service.store import run_health, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.run_health import RunHealth
from evalstop_service.store.runs import Run


def last_report_at(run: Run, pulse: RunHealth | None) -> datetime:
    """When the run last posted or its trainer's client said that it is there."""
    beat = pulse.heartbeat_at if pulse is not None else None
    return run.updated_at if beat is None else max(run.updated_at, beat)


def find_liveness(run: Run, pulse: RunHealth | None, stale_seconds: float, now: datetime) -> Liveness:
    """How a run is at this moment, by what is known of its cadence: one that has ended is as its status says, and one
    that runs is lost only on record."""
    if run.status != "running":
        return Liveness.LOST if run.status == Liveness.LOST else Liveness.ALIVE
    silence = (now - last_report_at(run, pulse)).total_seconds()
    return liveness.assess_liveness(silence, None, stale_seconds, pulse.cadence_seconds if pulse is not None else None)


def load_cadence(tx: Transaction, run: Run) -> float | None:
    """The cadence of a run's posts; see `liveness.cadence`."""
    return liveness.measure_cadence(run_health.list_post_times(tx, run), run_health.POSTS_LOOKED_AT)


def load_metric_faults(tx: Transaction, judged: Sequence[tuple[Run, Policy]]) -> Mapping[UUID, tuple[Dead, ...]]:
    """The dead metrics among those on whose evidence the policy of each run may stop it."""
    needed = {run.id: _needed(run, policy) for run, policy in judged}
    found = run_health.load_readings(tx, [(run, metric) for run, _ in judged for metric in needed[run.id]])
    began = runs.load_attempt_starts(tx, [run.id for run, _ in judged])
    return {
        run.id: dead_metrics.dead(
            [Watched(metric, found[run.id, metric], promised) for metric, promised in needed[run.id].items()],
            Progress(began.get(run.id, run.created_at), run.updated_at, run.last_step, run.total_steps),
        )
        for run, _ in judged
    }


def _needed(run: Run, policy: Policy) -> dict[str, bool]:
    """The metrics on whose evidence the run may be stopped, and whether each was promised: gold always, another when
    the trainer named it."""
    named = run.metrics != DEFAULT_METRICS
    return {
        metric: named or role["role"] == MetricRole.EVAL
        for metric, role in run.metrics.items()
        if role["role"] in policy.stopping_roles
    }
