"""A run's vital signs as its rows tell them, read by whoever stops a run, looks after it or shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

from evalstop_detectors import MetricRole, Policy

from evalstop_service.rules import dead_metrics, liveness
from evalstop_service.rules.dead_metrics import Dead, Progress, Watched
from evalstop_service.rules.liveness import Pulse
from evalstop_service.runs.watched_metrics import DEFAULT_METRICS
from evalstop_service.store import run_health, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.run_health import StoredPulse
from evalstop_service.store.runs import Run


def heard_at(run: Run, pulse: StoredPulse | None) -> datetime:
    """When the run last posted or its trainer's client said that it is there."""
    beat = pulse.heartbeat_at if pulse is not None else None
    return run.updated_at if beat is None else max(run.updated_at, beat)


def pulse_of(run: Run, pulse: StoredPulse | None, stale_seconds: float, now: datetime) -> Pulse:
    """How a run is at this moment, by what is known of its cadence: one that has ended is as its status says, and one
    that runs is lost only on record."""
    if run.status != "running":
        return Pulse.LOST if run.status == Pulse.LOST else Pulse.ALIVE
    silence = (now - heard_at(run, pulse)).total_seconds()
    return liveness.judge(silence, None, stale_seconds, pulse.cadence_seconds if pulse is not None else None)


def cadence(tx: Transaction, run: Run) -> float | None:
    """The cadence of a run's posts; see `liveness.cadence`."""
    return liveness.cadence(run_health.posts(tx, run), run_health.POSTS_LOOKED_AT)


def dead_of(tx: Transaction, judged: Sequence[tuple[Run, Policy]]) -> Mapping[UUID, tuple[Dead, ...]]:
    """The dead metrics among those on whose evidence the policy of each run may stop it."""
    needed = {run.id: _needed(run, policy) for run, policy in judged}
    found = run_health.readings(tx, [(run, metric) for run, _ in judged for metric in needed[run.id]])
    began = runs.attempts_began(tx, [run.id for run, _ in judged])
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
        if role["role"] in policy.stopping_signals
    }
