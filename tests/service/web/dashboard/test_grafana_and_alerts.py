"""The dashboard and the alerts ask for what /metrics shows, and every alert is explained."""

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
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.rules.decision_lifecycle import AWAITING_CONFIRMATION, GuardKind
from evalstop_service.store.database import Database
from evalstop_service.store.quota_use import COUNTED
from evalstop_service.web.api.prometheus import Installation
from promql_parser import VectorSelector

FOLDER = Path(__file__).parents[4] / "docs/operations"
OF_PROMETHEUS = {"job", "instance", "le"}
"""Labels that are there without being in the documents of a metric's values."""


@cache
def shown() -> dict[str, dict[str, set[str]]]:
    """Every name that /metrics shows, with the values of its labels that are known beforehand."""
    service_metrics = ServiceMetrics()
    service_metrics.registry.register(Installation(cast(Database, None), utc_now))
    service_metrics.refused.labels("overloaded")
    service_metrics.request_seconds.labels("GET", "/", "5xx")
    found: dict[str, dict[str, set[str]]] = {}
    for family in service_metrics.registry.collect():
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
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
        found[f"evalstop_{name}"] = {}
    found["evalstop_on_hold_stops"] = {"guard": set(GuardKind)}
    found["evalstop_awaited_stops"] = {"state": set(AWAITING_CONFIRMATION)}
    found["evalstop_quota_use_ratio"] = {"quota": set(COUNTED)}
    found["evalstop_outbox_deliveries"] = {"waiting": {"due", "later", "held"}}
    return found


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    return document


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[Any]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for rule in alerts():
        yield pytest.param(rule["expr"], id=rule["alert"])


def selectors(expression: str) -> list[VectorSelector]:
    """What a query asks for; Grafana's own variables are filled in."""
    for variable, value in (("$__rate_interval", "5m"), ("$job", ".+"), ("$instance", ".+")):
        expression = expression.replace(variable, value)
    found: list[VectorSelector] = []

    def visit(node: object) -> bool:
        if isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        elif isinstance(node, VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


@pytest.mark.parametrize("expression", list(expressions()))
def test_every_query_asks_for_what_there_is(expression: str) -> None:
    """A query can be parsed, and each name, label and value in it is one that /metrics shows."""
    asked = selectors(expression)
    assert asked
    for selector in asked:
        assert selector.name in shown(), selector.name
        labels = shown()[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels or matcher.name in OF_PROMETHEUS, matcher.name
            if matcher.name not in OF_PROMETHEUS:
                assert matcher.value in labels[matcher.name], matcher.value
    for label in re.findall(r"by \(([^)]+)\)", expression):
        named = set(re.split(r",\s*", label))
        assert named <= OF_PROMETHEUS | {name for selector in asked for name in shown()[str(selector.name)]}


def test_everything_of_ours_is_on_the_dashboard() -> None:
    """What is counted is looked at: no metric of ours is missing, but for the one that names the release."""
    asked = {
        re.sub(r"_(total|bucket|sum|count)$", "", str(selector.name))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
        for selector in selectors(target["expr"])
    }
    ours = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown() if name.startswith("evalstop_")}
    assert ours - asked == {"evalstop_build_info"}


def test_panels_have_places_and_words() -> None:
    """No panel lies on another, each has an id of its own, a title, a unit, and says what it shows."""
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells, panel["title"]
        cells |= mine
        assert max(x for x, _ in mine) < 24
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"]


def test_every_alert_is_explained() -> None:
    """Each alert has a summary, a severity, and a heading in watching.md that says what to do; no heading is stale."""
    text = (FOLDER / "watching.md").read_text()
    for rule in alerts():
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(re.findall(r"^### (EvalStop\w+)$", text, re.MULTILINE)) == {rule["alert"] for rule in alerts()}


def test_the_page_names_every_metric() -> None:
    """The table of watching.md holds each metric of ours, and none that is not there."""
    service_metrics = ServiceMetrics()
    service_metrics.registry.register(Installation(cast(Database, None), utc_now))
    ours = {family.name for family in service_metrics.registry.collect() if family.name.startswith("evalstop_")}
    counters = {family.name for family in service_metrics.registry.collect() if family.type == "counter"}
    named = re.findall(r"^\| `(evalstop_\w+)", (FOLDER / "watching.md").read_text(), re.MULTILINE)
    assert {name.removesuffix("_total") if name.removesuffix("_total") in counters else name for name in named} == {
        "evalstop_build_info" if name == "evalstop_build" else name for name in ours
    }
