"""The service's own Prometheus metrics, in one object that is passed as an argument; served at /metrics.

Names begin with `evalstop_` and include their unit. No label holds a name that a tenant chose: this file bounds the
number of series, and a scrape reveals nothing about anyone's runs.
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
    """Counters, gauges and histograms of one process, in a separate registry; each with its own description.

    `loaded_runs` is `mistaken` where the cache was stale, so that a batch was applied twice.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        Info("evalstop_build", "What runs.", registry=self.registry).info({"version": version("evalstop-service")})
        self.observations = self._counter(
            "evalstop_observations",
            "Observations received, by result.",
            ("result", "accepted", "duplicate", "conflict"),
        )
        self.refused = self._counter("evalstop_refused_requests", "Requests that were refused.", ("reason",))
        self.delayed = self._counter(
            "evalstop_delayed_requests", "Requests that waited because their sender uses much of the processor's time."
        )
        self.commit_observations = self._histogram("evalstop_commit_observations", "Observations in one commit.", SIZES)
        self.commit_requests = self._histogram("evalstop_commit_requests", "Requests in one commit.", SIZES)
        self.commit_seconds = self._histogram(
            "evalstop_commit_seconds", "Time of one commit, from forming the group to durability.", SHORT_SECONDS
        )
        self.waiting_observations = Gauge(
            "evalstop_waiting_observations", "Observations waiting for a commit.", registry=self.registry
        )
        self.cached_bytes = Gauge(
            "evalstop_cached_bytes", "Memory of the runs in the cache, about.", registry=self.registry
        )
        self.loaded_runs = self._counter(
            "evalstop_loaded_runs",
            "How a run's monitor was loaded before it was stepped.",
            ("result", "hit", "mistaken", "moved_on", "restored", "rebuilt"),
        )
        self.detector_seconds = self._histogram(
            "evalstop_detector_seconds", "Time to step the detectors of one group.", SHORT_SECONDS
        )
        self.costly_steps = self._counter(
            "evalstop_costly_steps", "Steps of one run's detectors that exceeded their time budget."
        )
        self.unjudged_runs = self._counter("evalstop_unjudged_runs", "Runs that are no longer judged after an error.")
        self.deliveries = self._counter(
            "evalstop_deliveries",
            "Attempts to deliver a webhook, by result.",
            ("result", "delivered", "retry", "dead", "cancelled"),
        )
        self.delivery_seconds = self._histogram(
            "evalstop_delivery_seconds", "Time of one delivery attempt, from connecting to the answer.", LONG_SECONDS
        )
        self.delivery_lag_seconds = self._histogram(
            "evalstop_delivery_lag_seconds", "Time from when a delivery was due until it was sent.", LONG_SECONDS
        )
        self.request_seconds = Histogram(
            "evalstop_request_seconds",
            "Time of HTTP requests, from their headers to the start of the answer.",
            ("method", "route", "status"),
            buckets=SHORT_SECONDS,
            registry=self.registry,
        )
        self.mlflow_left_out = self._counter(
            "evalstop_mlflow_left_out_items",
            "Data logged by MLflow clients that was not stored, by kind.",
            ("what", "step", "label", "param", "checkpoint", "total_steps"),
        )
        self.pruned_runs = self._counter("evalstop_pruned_runs", "Runs whose details retention removed.")
        self.pruned_rows = self._counter("evalstop_pruned_rows", "Rows that retention removed.")

    def _counter(self, name: str, documentation: str, label: Sequence[str] = ()) -> Counter:
        """A counter with at most one label, whose known values start at 0."""
        counter = Counter(name, documentation, label[:1], registry=self.registry)
        for value in label[1:]:
            counter.labels(value)
        return counter

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self.registry)
