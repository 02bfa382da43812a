"""A receiver's metrics in Prometheus's text format; written without a library, so that the client stays small.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import threading
from collections import Counter

HELP = {
    "webhooks_total": ("counter", "received events, by response"),
    "polls_total": ("counter", "polls for events with --pull, by whether the service answered"),
    "stops_total": ("counter", "finished stops, by result"),
    "stop_seconds_total": ("counter", "total seconds from the request to the confirmed end"),
    "stops_under_way": ("gauge", "stops being carried out or reported"),
    "scheduler_unavailable_total": ("counter", "failed requests to the scheduler"),
    "reports_total": ("counter", "attempts to report, by the service's response"),
}


class Metrics:
    """Counters and gauges by name and by one label."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._values: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, label: str = "", amount: float = 1) -> None:
        """Add to a metric of `HELP`; `label` is written `name="value"`."""
        assert name in HELP
        with self._changing:
            self._values[(name, label)] += amount  # type: ignore[assignment]  # a Counter adds floats as well

    def text(self) -> str:
        lines = []
        with self._changing:
            values = dict(self._values)
        for name, (kind, description) in HELP.items():
            lines += [f"# HELP evalstop_receiver_{name} {description}", f"# TYPE evalstop_receiver_{name} {kind}"]
            of_name = sorted((label, value) for (metric_name, label), value in values.items() if metric_name == name)
            for label, value in of_name or [("", 0)]:
                labels = f"{{{label}}}" if label else ""
                lines.append(f"evalstop_receiver_{name}{labels} {value:g}")
        return "\n".join(lines) + "\n"
