"""What the service counts and measures about itself, in one object that is handed down; /metrics shows it.

Names begin with `evalstop_` and carry their unit. No label ever holds a name that a tenant chose: the number of series
is bounded by this file, and a scrape tells nothing about anybody's runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000)
SHORT_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LONG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 1800.0)

disable_created_metrics()  # type: ignore[no-untyped-call]  # else a series beside each tells the time of its birth


class ServiceMetrics:
    """Counters, gauges and histograms of one process, in a registry of their own.

    `observations`: by result (accepted, duplicate, conflict). `refused`: requests turned away, by reason.
    `commit_observations`, `commit_requests`, `commit_seconds`: of each group commit. `waiting_observations`: queued for
    one. `loaded_runs`: what a run's monitor needed before a batch (hit, moved_on, restored,
    rebuilt), and how often memory was mistaken, so that a batch was worked in twice.
    `detector_seconds`: of each group. `costly_steps`: of one run, past the budget.
    `deliveries`: attempts by result (delivered, retry, dead, cancelled).
    `delivery_seconds`: of an attempt. `delivery_lag_seconds`: from being due to being sent. `request_seconds`: HTTP
    answers by method, route template and class of status. `mlflow_left_out`: metrics, labels, params, checkpoints and
    artifacts of MLflow clients that were passed over. `mlflow_forwarded`: what was forwarded to an MLflow
    server, or could not be. `pruned_runs`, `pruned_rows`: what retention removed.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        Info("evalstop_build", "What runs.", registry=self.registry).info({"version": version("evalstop-service")})
        self.observations = self._counter(
            "evalstop_observations",
            "Observations that were taken in, and what became of them.",
            ("result", "accepted", "duplicate", "conflict"),
        )
        self.refused = self._counter(
            "evalstop_refused_requests", "Requests that were turned away unread or undone.", ("reason",)
        )
        self.commit_observations = self._histogram("evalstop_commit_observations", "Observations in one commit.", SIZES)
        self.commit_requests = self._histogram("evalstop_commit_requests", "Requests in one commit.", SIZES)
        self.commit_seconds = self._histogram(
            "evalstop_commit_seconds", "One commit, from taking the group to its being durable.", SHORT_SECONDS
        )
        self.waiting_observations = Gauge(
            "evalstop_waiting_observations", "Observations that wait for a commit.", registry=self.registry
        )
        self.loaded_runs = self._counter(
            "evalstop_loaded_runs",
            "What a run's monitor needed before it could be stepped.",
            ("result", "hit", "mistaken", "moved_on", "restored", "rebuilt"),
        )
        self.detector_seconds = self._histogram(
            "evalstop_detector_seconds", "Stepping the detectors of one group.", SHORT_SECONDS
        )
        self.costly_steps = self._counter(
            "evalstop_costly_steps", "Steps of one run's detectors that took longer than their budget."
        )
        self.deliveries = self._counter(
            "evalstop_deliveries",
            "Attempts to deliver a webhook, by what came of them.",
            ("result", "delivered", "retry", "dead", "cancelled"),
        )
        self.delivery_seconds = self._histogram(
            "evalstop_delivery_seconds", "One attempt to deliver, from connecting to the answer.", LONG_SECONDS
        )
        self.delivery_lag_seconds = self._histogram(
            "evalstop_delivery_lag_seconds", "From the moment a delivery was due to its being sent.", LONG_SECONDS
        )
        self.request_seconds = Histogram(
            "evalstop_request_seconds",
            "HTTP requests, from their headers to the end of the answer.",
            ("method", "route", "status"),
            buckets=SHORT_SECONDS,
            registry=self.registry,
        )
        self.mlflow_left_out = self._counter(
            "evalstop_mlflow_left_out_items",
            "What clients of MLflow logged and has no place here, by what it was.",
            ("what", "step", "label", "param", "checkpoint", "artifact"),
        )
        self.mlflow_forwarded = self._counter(
            "evalstop_mlflow_forwarded_requests",
            "Requests that were to be passed on to an MLflow server, by what came of them.",
            ("result", "sent", "refused", "dropped"),
        )
        self.pruned_runs = self._counter("evalstop_pruned_runs", "Runs whose details retention removed.")
        self.pruned_rows = self._counter("evalstop_pruned_rows", "Rows that retention removed.")

    def _counter(self, name: str, documentation: str, label: Sequence[str] = ()) -> Counter:
        """A counter with at most one label, whose known values are there from the start, at 0."""
        counter = Counter(name, documentation, label[:1], registry=self.registry)
        for value in label[1:]:
            counter.labels(value)
        return counter

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self.registry)
