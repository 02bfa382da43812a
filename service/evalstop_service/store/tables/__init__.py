"""The tables. Every table that grows carries the run's id first in its key, so that it can be spread by run."""

from evalstop_service.store.tables.columns import UtcTime, metadata, moment_text
from evalstop_service.store.tables.decisions import (
    backtests,
    cases,
    decision_changes,
    decisions,
    outcomes,
)
from evalstop_service.store.tables.projects import audit_log, keys, policies, projects, rollout_stages, sessions
from evalstop_service.store.tables.runs import (
    LIVE,
    attempts,
    checkpoints,
    eval_requests,
    experiments,
    logged_models,
    mlflow_runs,
    monitor_states,
    observations,
    run_deletions,
    run_health,
    runs,
    series_buckets,
    verdicts,
)
from evalstop_service.store.tables.webhooks import deliveries, delivery_attempts, endpoints, events

__all__ = [
    "LIVE",
    "UtcTime",
    "attempts",
    "audit_log",
    "backtests",
    "cases",
    "checkpoints",
    "decision_changes",
    "decisions",
    "deliveries",
    "delivery_attempts",
    "endpoints",
    "eval_requests",
    "events",
    "experiments",
    "keys",
    "logged_models",
    "metadata",
    "mlflow_runs",
    "moment_text",
    "monitor_states",
    "observations",
    "outcomes",
    "policies",
    "projects",
    "rollout_stages",
    "run_deletions",
    "run_health",
    "runs",
    "series_buckets",
    "sessions",
    "verdicts",
]
