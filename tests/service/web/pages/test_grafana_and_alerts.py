"""The Grafana dashboard and the alerts use metrics that /metrics has, and watching.md explains every alert."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import promql_parser
import pytest
import yaml
from evalstop_service.clock import utc_now
from evalstop_service.domain.decision_lifecycle import AWAITING_CONFIRMATION, GuardKind
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store.database import Database
from evalstop_service.web.api.health import Installation
from promql_parser import VectorSelector

FOLDER = Path(__file__).parents[4] / "docs/operations"
PROMETHEUS_LABELS = {"job", "instance", "le"}
"""Labels that Prometheus adds itself."""


@cache
def exported_metrics() -> dict[str, dict[str, set[str]]]:
    """The names that /metrics exports, with the label values known beforehand."""
    service_metrics = ServiceMetrics()
    service_metrics.registry.register(Installation(cast(Database, None), utc_now))
    service_metrics.refused.labels("overloaded")
    service_metrics.request_seconds.labels("GET", "/", "5xx")
    metrics: dict[str, dict[str, set[str]]] = {}
    for family in service_metrics.registry.collect():
        for sample in family.samples:
            labels = metrics.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    for name in (
        "running_runs",
        "open_endpoints",
        "stale_runs",
        "no_data_runs",
        "paused_projects",
        "outbox_oldest_due_seconds",
        "outbox_oldest_waiting_seconds",
    ):
        metrics[f"evalstop_{name}"] = {}
    metrics["evalstop_on_hold_stops"] = {"guard": set(GuardKind)}
    metrics["evalstop_awaited_stops"] = {"state": set(AWAITING_CONFIRMATION)}
    metrics["evalstop_outbox_deliveries"] = {"waiting": {"due", "later", "held"}}
    return metrics


def load_dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    return document


def load_alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def list_queries() -> Iterator[Any]:
    for panel in load_dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for rule in load_alerts():
        yield pytest.param(rule["expr"], id=rule["alert"])


def parse_selectors(expression: str) -> list[VectorSelector]:
    """The vector selectors of a query, with Grafana's own variables filled in."""
    for variable, value in (("$__rate_interval", "5m"), ("$job", ".+"), ("$instance", ".+")):
        expression = expression.replace(variable, value)
    selectors: list[VectorSelector] = []

    def visit(node: object) -> bool:
        if isinstance(node, promql_parser.MatrixSelector):
            selectors.append(node.vector_selector)
        elif isinstance(node, VectorSelector):
            selectors.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return selectors


@pytest.mark.parametrize("expression", list(list_queries()))
def test_every_query_uses_exported_metrics(expression: str) -> None:
    """Each query parses, and every name, label and label value in it is exported."""
    selectors = parse_selectors(expression)
    assert selectors
    for selector in selectors:
        assert selector.name in exported_metrics(), selector.name
        labels = exported_metrics()[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels or matcher.name in PROMETHEUS_LABELS, matcher.name
            if matcher.name not in PROMETHEUS_LABELS:
                assert matcher.value in labels[matcher.name], matcher.value
    for label in re.findall(r"by \(([^)]+)\)", expression):
        grouped_by = set(re.split(r",\s*", label))
        assert grouped_by <= PROMETHEUS_LABELS | {
            name for selector in selectors for name in exported_metrics()[str(selector.name)]
        }


def test_dashboard_shows_every_metric() -> None:
    """Every metric but the build info is on the dashboard."""
    on_dashboard = {
        re.sub(r"_(total|bucket|sum|count)$", "", str(selector.name))
        for panel in load_dashboard()["panels"]
        for target in panel.get("targets", ())
        for selector in parse_selectors(target["expr"])
    }
    exported = {
        re.sub(r"_(total|bucket|sum|count)$", "", name) for name in exported_metrics() if name.startswith("evalstop_")
    }
    assert exported - on_dashboard == {"evalstop_build_info"}


def test_panels_are_complete_and_do_not_overlap() -> None:
    """Each panel has its own id and place, a unit and a description."""
    panels = load_dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        panel_cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not panel_cells & cells, panel["title"]
        cells |= panel_cells
        assert max(x for x, _ in panel_cells) < 24
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"]


def test_every_alert_is_documented() -> None:
    """Each alert has a summary, a severity and a heading in watching.md; no heading is left over."""
    text = (FOLDER / "watching.md").read_text()
    for rule in load_alerts():
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(re.findall(r"^### (EvalStop\w+)$", text, re.MULTILINE)) == {rule["alert"] for rule in load_alerts()}


def test_watching_page_lists_every_metric() -> None:
    """The table of watching.md lists exactly the exported metrics."""
    service_metrics = ServiceMetrics()
    service_metrics.registry.register(Installation(cast(Database, None), utc_now))
    exported = {family.name for family in service_metrics.registry.collect() if family.name.startswith("evalstop_")}
    counters = {family.name for family in service_metrics.registry.collect() if family.type == "counter"}
    documented = re.findall(r"^\| `(evalstop_\w+)", (FOLDER / "watching.md").read_text(), re.MULTILINE)
    assert {
        name.removesuffix("_total") if name.removesuffix("_total") in counters else name for name in documented
    } == {"evalstop_build_info" if name == "evalstop_build" else name for name in exported}
