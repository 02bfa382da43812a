"""The overview and the page of precision: what they say, where their figures lead, and one click that judges."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from html import unescape

import httpx
import pytest
from evalstop_service.decisions import commands
from evalstop_service.projects import api_keys
from evalstop_service.store import outcomes, projects
from evalstop_service.store.database import Database
from evalstop_service.web.dashboard import sign_in_token
from playwright.sync_api import expect

from tests.service.case_rows import insert_cases
from tests.service.web.dashboard.conftest import Window
from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant, confirm, open_run, recorded, report
from tests.service.web.dashboard.serving import EMBEDDED, SECRET, token_of

HACKING = recorded("np-0044")


def seen(visitor: httpx.Client, path: str) -> str:
    """A page with its characters as they are read."""
    answer = visitor.get(path)
    assert answer.status_code == 200, (path, answer.text[:500])
    return unescape(answer.text)


def test_while_there_is_nothing(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """Empty pages say what to do next."""
    assert "Connect a trainer" in seen(visitor, "/")
    assert "held_out_share" in seen(visitor, "/precision")
    assert "No case matches" in seen(visitor, "/cases")
    open_run(database, tenant, now, "first")
    html = seen(visitor, "/")
    assert "No decisions yet" in html
    assert "Nothing. No stop can be vetoed" in html
    assert "No policy stops runs" in html


def test_every_figure_leads_to_its_cases(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """The number in a cell of the matrix is that of the cases behind its link."""
    hostile = open_run(database, tenant, now, "<script>alert(1)</script>", labels={"job_kind": "__proto__"})
    known = {"gpus": 8.0, "gpu_hours": 80.0, "detectors": ["k_decline"], "stated_risk": 0.05, "job_kind": "__proto__"}
    insert_cases(database, hostile, 6, now, delay_steps=40, gpu_hours_saved=10.0, **known)
    insert_cases(database, hostile, 2, now, outcome="wrong", run_outcome="healthy", **known)
    insert_cases(database, hostile, 3, now, treatment="stopped", gpu_hours_saved=20.0, **known)
    insert_cases(database, hostile, 9, now, treatment=None, run_outcome="healthy")
    with database.transaction() as tx:
        projects.update_project(tx, replace(tenant.project, price_per_gpu_hour=2.0, currency="EUR"))
    html = visitor.get("/precision").text
    assert "<script>alert" not in html
    assert "75.0 %" in html
    cells = re.findall(r'<a class="cell [^"]*" href="([^"]*)">(\d+)</a>', html)
    assert [int(count) for _, count in cells] == [6, 2, 3, 9]
    for link, count in cells:
        assert seen(visitor, unescape(link)).count('class="row-link"') == int(count)
    for link in re.findall(r'<a class="figure" href="(/cases[^"]*)"', html):
        assert 'class="row-link"' in seen(visitor, unescape(link))
    assert "120 EUR" in seen(visitor, "/")
    figures = visitor.get("/precision/figures.json?job_kind=__proto__&days=30").json()
    assert figures["so_far"][0]["precision"]["value"] == 0.75
    assert [(one["label"], one["stated"]) for one in figures["calibration"]] == [("level v1", 0.05)]
    assert sum(figures["delays"]["share"]) == 1
    assert "No outcomes yet" in seen(visitor, "/precision?policy=%00nosuch")


@EMBEDDED
def test_past_a_page_of_cases(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """The list goes on where its first page ends; a cursor of somebody's own make is not found."""
    insert_cases(database, open_run(database, tenant, now, "many"), 53, now)
    older = seen(visitor, "/cases?treatment=observed").split('rel="next" href="')[1].split('"')[0]
    rest = seen(visitor, older)
    assert rest.count('class="row-link"') == 3
    assert 'rel="next"' not in rest
    assert visitor.get("/cases?cursor=x").status_code == visitor.get("/cases?treatment=odd").status_code == 404


@EMBEDDED
def test_one_click_judges(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """A decision is judged from the overview, by whoever may operate, and counts from then on."""
    run = open_run(database, tenant, now, "ppo", mode="enforce")
    decision = report(database, tenant, run.id, HACKING, now).decision
    assert decision is not None
    assert "1 stop waits for the scheduler" in seen(visitor, "/")
    confirm(database, tenant, decision.id, now)
    path, token = f"/decisions/{decision.id}/outcome", token_of(visitor)
    assert visitor.post(path, data={"outcome": "wrong"}).status_code == 403
    assert visitor.post(path, data={"outcome": "perhaps", "csrf": token}).status_code == 422
    answer = visitor.post(path, data={"outcome": "wrong", "next": "/", "csrf": token})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "labeled by <bdi>key" in seen(visitor, "/")
    with database.reading() as tx:
        said = outcomes.find_outcome(tx, run.id, 1)
    assert said is not None
    assert (said.outcome, said.derived) == ("wrong", False)
    assert "treatment=stopped&outcome=wrong" in seen(visitor, "/precision")
    reader, _ = api_keys.create_named_key(database, tenant.project.name, "reader", ("read",), now)
    visitor.get("/login", params={"token": sign_in_token(SECRET, reader.id)})
    assert 'name="outcome"' not in seen(visitor, "/")
    assert visitor.post(path, data={"outcome": "right", "csrf": token_of(visitor)}).status_code == 403


@EMBEDDED
def test_news_of_what_is_shown(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """A page is another revision as soon as a case has ended or turned out otherwise, and not before."""

    def revisions() -> list[str]:
        return [seen(visitor, path).split('data-revision="')[1].split('"')[0] for path in ("/", "/precision")]

    run = open_run(database, tenant, now, "ppo")
    before = revisions()
    assert revisions() == before
    insert_cases(database, run, 1, now)
    after = revisions()
    assert all(one != other for one, other in zip(before, after, strict=True))


@pytest.mark.real
def test_precision_changes_before_ones_eyes(window: Window, embedded_database: Database, now: datetime) -> None:
    """In a browser the charts stand, a click in the overview judges, and new cases move what is shown, without a
    complaint and without another host."""
    tenant, page = add_tenant(embedded_database, now), window.page
    run = open_run(embedded_database, tenant, now, "ppo")
    report(embedded_database, tenant, run.id, HACKING, now)
    commands.finish_run(embedded_database, tenant.project.id, run.id, "completed", now)
    insert_cases(embedded_database, run, 8, now, delay_steps=30, stated_risk=0.05)
    insert_cases(embedded_database, run, 20, now, treatment=None, run_outcome="healthy")
    window.sign_in(tenant)
    page.goto(f"{window.address}/")
    page.get_by_role("button", name="Wrong").click()
    page.get_by_text("labeled by key").wait_for()
    page.goto(f"{window.address}/precision")
    for chart in ("over-time", "delay", "calibration"):
        page.wait_for_selector(f"#{chart}-chart .scatterlayer, #{chart}-chart .barlayer")
        expect(page.locator(f"#{chart}-chart").get_by_text(re.compile(r"^\d+(\.\d)? %$")).nth(2)).to_be_visible()
    page.wait_for_selector('.live[data-live="on"]')
    insert_cases(embedded_database, run, 1, now, outcome="wrong", run_outcome="healthy")
    page.get_by_text("80.0 %").first.wait_for()
    page.set_viewport_size({"width": 375, "height": 800})
    page.reload()
    page.wait_for_selector("#delay-chart .barlayer")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert window.is_clean()
