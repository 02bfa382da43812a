"""The health of a run: its liveness and its metrics without data, loaded from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

from evalstop_detectors import MetricRole, Policy

from evalstop_service.domain.health import (
    Liveness,
    MetricFault,
    RunProgress,
    check_liveness,
    find_fault,
)
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.runs.watched_metrics import DEFAULT_METRICS
from evalstop_service.store import run_details, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.run_details import RunHealth
from evalstop_service.store.runs import Run


def last_report_at(run: Run, record: RunHealth | None) -> datetime:
    """When the run last reported, or its trainer's client last sent a heartbeat."""
    heartbeat_at = record.heartbeat_at if record is not None else None
    return run.updated_at if heartbeat_at is None else max(run.updated_at, heartbeat_at)


def find_liveness(run: Run, record: RunHealth | None, stale_seconds: float, now: datetime) -> Liveness:
    """The current liveness of a run: as the monitor, which knows when the service was away, has declared it.

    A run that has reported since it was declared stale is alive.
    """
    if run.status != RunStatus.RUNNING or record is None or record.state != Liveness.STALE:
        return Liveness.LOST if run.status == RunStatus.LOST else Liveness.ALIVE
    silence = (now - last_report_at(run, record)).total_seconds()
    return check_liveness(silence, None, stale_seconds, record.cadence_seconds)[0]


def load_metric_faults(tx: Transaction, judged: Sequence[tuple[Run, Policy]]) -> Mapping[UUID, tuple[MetricFault, ...]]:
    """The faults of the metrics that the policy of each run may stop it on."""
    needed = {run.id: _find_needed_metrics(run, policy) for run, policy in judged}
    readings = run_details.load_readings(tx, [(run, metric) for run, _ in judged for metric in needed[run.id]])
    begun_at = runs.load_attempt_starts(tx, [run.id for run, _ in judged])
    faults: dict[UUID, tuple[MetricFault, ...]] = {}
    for run, _ in judged:
        progress = RunProgress(begun_at.get(run.id, run.created_at), run.updated_at, run.last_step, run.total_steps)
        found = (
            find_fault(metric, readings[run.id, metric], progress, required=required)
            for metric, required in needed[run.id].items()
        )
        faults[run.id] = tuple(fault for fault in found if fault is not None)
    return faults


def _find_needed_metrics(run: Run, policy: Policy) -> dict[str, bool]:
    """The metrics that the run may be stopped on, and whether each is required: the eval always, others if the trainer
    named them."""
    is_declared = run.metrics != DEFAULT_METRICS
    return {
        metric: is_declared or role["role"] == MetricRole.EVAL
        for metric, role in run.metrics.items()
        if role["role"] in policy.stopping_roles
    }
