"""Figures that stand on two pages are the same there and in the API."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import httpx
import pytest
from evalstop_service.cli import demo_data
from evalstop_service.store import keys, projects
from evalstop_service.store.database import Database
from evalstop_service.web.pages.formatting import format_percent, format_step

from tests.service.web.pages.serving import SQLITE_ONLY, get_html, sign_in_by_link

RUNS = 16


@pytest.fixture
def read_api(visitor: httpx.Client, database: Database, now: datetime) -> Any:
    """Answers of the API about a project with the example runs, which the visitor has signed in to."""
    demo_data.fill(database, "demo", now, RUNS)
    with database.transaction() as tx:
        project = projects.find_project_by_name(tx, "demo")
        assert project is not None
        key, secret = keys.create_key(tx, project_id=project.id, name="dana", scopes=keys.SCOPES, now=now)
    sign_in_by_link(visitor, key)

    def read(path: str) -> Any:
        return visitor.get(f"/api/v1{path}", headers={"Authorization": f"Bearer {secret}"}).raise_for_status().json()

    return read


def find_row(html: str, name: str) -> str:
    """The text of the table row about a policy."""
    (row,) = (row for row in re.findall(r"<tr>.*?</tr>", html, re.DOTALL) if re.search(rf">{name}</(a|bdi)>", row))
    return read_text(row)


def read_text(html: str) -> str:
    """The words of a part of a page."""
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def describe_estimate(estimate: dict[str, Any]) -> str:
    """An estimate of the API, as pages show its interval and number of cases."""
    low, high = format_percent(estimate["low"]), format_percent(estimate["high"])
    return f"{low} to {high}, {estimate['decided']}"


@pytest.mark.slow
@SQLITE_ONLY
def test_figures_agree_between_pages(visitor: httpx.Client, read_api: Any) -> None:
    """Running runs, those that may have turned, precision, recall and false stops do not depend on the page."""
    overview = get_html(visitor, "/")
    running = read_api("/runs?status=running&limit=200")["items"]
    turned = [run for run in running if run["verdict"]["verdict"] != "continue"]
    assert len(running) > len(turned) > 0
    assert f"{len(running)} running" in read_text(overview)
    assert f"{len(turned)} may have turned" in read_text(overview)
    fleet, listed = get_html(visitor, "/runs/fleet"), get_html(visitor, "/runs?status=running")
    for html in (fleet, listed):
        assert html.count('class="row-link"') == len(running)
        assert len(re.findall(r'class="badge verdict-(?:suspect|stop)"', html)) == len(turned)

    side_by_side = get_html(visitor, "/precision").split('data-part="policies"')[1]
    policies = get_html(visitor, "/policies")
    groups = read_api("/precision?group_by=policy")["groups"]
    assert len(groups) > 1
    for group in groups:
        name, version = group["policy"]["name"], group["policy"]["version"]
        figures = [group[figure] for figure in ("precision", "recall", "false_stops_per_healthy_run")]
        alone = read_text(get_html(visitor, f"/precision?policy={name}%40{version}").split('data-part="figures"')[1])
        for estimate in figures:
            assert format_percent(estimate["value"]) in find_row(side_by_side, name)
            assert describe_estimate(estimate) in find_row(side_by_side, name)
            if estimate["value"] is not None:
                assert f"{format_percent(estimate['value'])} {describe_estimate(estimate)}" in alone
        if group["false_stops_per_healthy_run"]["value"] is not None:
            assert describe_estimate(group["false_stops_per_healthy_run"]) in find_row(policies, name)
        counted = sum(sum(group["counts"][row].values()) for row in ("observed", "stopped", "prevented"))
        listed_cases = read_api(f"/cases?policy={name}&version={version}&flagged=true&limit=200")["items"]
        assert len(listed_cases) == counted, format_step(counted)
