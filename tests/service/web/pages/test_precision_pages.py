"""The precision page and its cases: figures, links behind them, and labels set with one click."""

from __future__ import annotations

import json
import re
from datetime import datetime
from html import unescape

import httpx
import pytest
from evalstop_service.store import cases
from evalstop_service.store.database import Database
from playwright.sync_api import expect

from tests.fixtures.projects import create_named_key
from tests.fixtures.statements import record_statements
from tests.service.case_rows import insert_cases, judge_call
from tests.service.web.pages.conftest import Window
from tests.service.web.pages.recorded_runs import (
    Tenant,
    add_tenant,
    load_recorded_evals,
)
from tests.service.web.pages.serving import SQLITE_ONLY, get_html, read_csrf_token, sign_in_by_link

HACKING = load_recorded_evals("np-0044")


def get_text(visitor: httpx.Client, path: str) -> str:
    """The HTML of a page, with its character references resolved."""
    return unescape(get_html(visitor, path))


def test_empty_pages_say_what_to_do(visitor: httpx.Client, tenant: Tenant) -> None:
    """Pages of a project without data say what to do next."""
    assert "Connect a trainer" in get_text(visitor, "/")
    assert "held_out_share" in get_text(visitor, "/precision")
    assert "No case matches" in get_text(visitor, "/cases")
    tenant.open_run("first")
    html = get_text(visitor, "/")
    assert "No decisions yet" in html
    assert "Nothing. No stop can be vetoed" in html
    assert "No policy stops runs" in html


def test_figures_link_to_their_cases(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """A link behind a cell of the matrix lists as many cases as the cell says."""
    hostile = tenant.open_run("<script>alert(1)</script>", labels={"job_kind": "__proto__"})
    case_fields = {
        "gpus": 8.0,
        "gpu_hours": 80.0,
        "detectors": ["k_decline"],
        "calls": {name: judge_call("right") for name in ("k_decline", "eval", "proxy", "kl")},
        "stated_risk": 0.05,
        "job_kind": "__proto__",
    }
    insert_cases(database, hostile, 6, now, delay_steps=40, gpu_hours_saved=10.0, **case_fields)
    insert_cases(database, hostile, 2, now, outcome="wrong", run_outcome="healthy", **case_fields)
    insert_cases(database, hostile, 3, now, treatment="stopped", gpu_hours_saved=20.0, **case_fields)
    insert_cases(database, hostile, 9, now, treatment=None, run_outcome="healthy")
    html = visitor.get("/precision").text
    assert "<script>alert" not in html
    assert "75.0 %" in html
    cells = re.findall(r'<a class="cell [^"]*" href="([^"]*)">(\d+)</a>', html)
    assert [int(count) for _, count in cells] == [6, 2, 3, 9]
    for link, count in cells:
        assert get_text(visitor, unescape(link)).count('class="row-link"') == int(count)
    for link in re.findall(r'<a class="figure" href="(/cases[^"]*)"', html):
        assert 'class="row-link"' in get_text(visitor, unescape(link))
    figures = visitor.get("/precision/figures.json?job_kind=__proto__&days=30").json()
    assert figures["running"][0]["precision"]["value"] == 0.75
    by_detector = {row["name"]: row["running"][-1]["precision"]["value"] for row in figures["detectors"]}
    assert by_detector == {"k_decline": 1.0}, "the others never call"
    assert "There is no policy “levle”: did you mean “level”?" in get_text(visitor, "/precision?policy=%00levle")


@SQLITE_ONLY
@pytest.mark.parametrize("path", ["/", "/precision", "/precision/figures.json"])
def test_page_counts_the_cases_once(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime, path: str
) -> None:
    """Counting all cases takes most of the time of these pages, so all their figures are from one count."""
    run = tenant.open_run("ppo", policy="default")
    insert_cases(database, run, 2, now, calls={"posterior": judge_call("right")})
    insert_cases(database, run, 3, now, treatment=None, run_outcome="healthy")
    with record_statements(database) as statements:
        visitor.get(path).raise_for_status()
    counts = [text for text in statements if "count(*)" in text and "FROM cases" in text]
    assert len([text for text in counts if "decision_id IS NULL" in text]) == 1
    assert len([text for text in counts if "decision_id IS NOT NULL" in text]) == 1


@SQLITE_ONLY
def test_panel_compares_detectors_on_the_same_runs(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Each detector that can call has a row, the one that decides first; a link lists the cases where two disagree,
    and another detector can be tried."""
    run = tenant.open_run("ppo", policy="default")
    both = {"posterior": judge_call("right", 30), "k_decline": judge_call("right", 10)}
    insert_cases(database, run, 4, now, calls=both)
    insert_cases(database, run, 3, now, treatment=None, run_outcome="healthy", calls={"k_decline": judge_call("wrong")})
    insert_cases(database, run, 6, now, treatment=None, run_outcome="healthy")
    insert_cases(
        database, tenant.open_run("published", policy="paper"), 2, now, calls={"k_decline": judge_call("right")}
    )
    panel = (
        get_text(visitor, "/precision").partition('aria-label="Detectors of default v1"')[2].partition("</table>")[0]
    )
    rows = re.findall(r'<th scope="row"><a class="figure" href="[^"]*">([^<]*)</a>', panel)
    deciding = rows.index("k_decline")
    assert rows[0] == "posterior"
    assert rows[deciding:] == ["k_decline", "focus", "river_drift", "divergence", "gao_fit"]
    assert panel.count("decides</span>") == deciding
    of_k_decline = panel[panel.index(">k_decline</a>") :]
    assert re.findall(r'title="(?:right|wrong)">(\d+)<', of_k_decline)[:2] == ["4", "3"]
    assert "33.3 %" in of_k_decline  # of the nine healthy runs
    (alone,) = re.findall(r'href="([^"]*)">only it called', of_k_decline.partition("</tr>")[0])
    disagreed = get_text(visitor, alone)
    assert disagreed.count('class="row-link"') == 3
    assert "called, <bdi>posterior</bdi> did not: 3 runs, 3 of them healthy, 0 turned" in disagreed
    tried = {"detector": "k_decline", "version": "1", "csrf": read_csrf_token(visitor)}
    answer = visitor.post("/policies/default/edit/try", data=tried)
    assert answer.status_code == 303
    (text,) = re.findall(r"<textarea[^>]*>([^<]*)</textarea>", get_text(visitor, answer.headers["location"]))
    members = [item for item in json.loads(text)["members"] if item["stop_at"] is not None]
    assert [item["detector"] for item in members if not item.get("observe")] == ["k_decline"]
    assert visitor.post("/policies/default/edit/try", data=tried | {"detector": "oracle"}).status_code == 404


@SQLITE_ONLY
def test_cases_are_paged(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """A full page of cases links to the next; an invalid cursor or filter is not found."""
    insert_cases(database, tenant.open_run("many"), 53, now)
    older = get_text(visitor, "/cases?treatment=observed").split('rel="next" href="')[1].split('"')[0]
    second_page = get_text(visitor, older)
    assert second_page.count('class="row-link"') == 3
    assert 'rel="next"' not in second_page
    assert visitor.get("/cases?cursor=x").status_code == visitor.get("/cases?treatment=odd").status_code == 422


@pytest.mark.slow
@SQLITE_ONLY
def test_decision_is_labeled_from_the_overview(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """A label from the overview needs the scope operate and a form token, and counts from then on."""
    run, decision = tenant.open_stopped_run("ppo", HACKING)
    tenant.confirm_stop(decision)
    path, token = f"/decisions/{decision.id}/outcome", read_csrf_token(visitor)
    assert visitor.post(path, data={"outcome": "wrong"}).status_code == 403
    assert visitor.post(path, data={"outcome": "perhaps", "csrf": token}).status_code == 422
    answer = visitor.post(path, data={"outcome": "wrong", "next": "/", "csrf": token})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "labeled by <bdi>key" in get_text(visitor, "/")
    with database.reading() as tx:
        stored = cases.find_outcome(tx, run.id, 1)
    assert stored is not None
    assert (stored.outcome, stored.derived) == ("wrong", False)
    assert "treatment=stopped&outcome=wrong" in get_text(visitor, "/precision")
    reader, _ = create_named_key(database, tenant.project.name, "reader", ("read",), now)
    sign_in_by_link(visitor, reader)
    assert 'name="outcome"' not in get_text(visitor, "/")
    assert visitor.post(path, data={"outcome": "right", "csrf": read_csrf_token(visitor)}).status_code == 403


@SQLITE_ONLY
def test_revision_changes_with_the_cases(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Overview and precision get a new revision when a case ends, and not before."""

    def read_revisions() -> list[str]:
        return [get_text(visitor, path).split('data-revision="')[1].split('"')[0] for path in ("/", "/precision")]

    run = tenant.open_run("ppo")
    before = read_revisions()
    assert read_revisions() == before
    insert_cases(database, run, 1, now)
    after = read_revisions()
    assert all(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.nightly
@pytest.mark.real
def test_open_precision_page_updates_in_browser(window: Window, embedded_database: Database, now: datetime) -> None:
    """In a browser the charts are drawn, one click labels a stop, and new cases change the figures shown."""
    tenant, page = add_tenant(embedded_database, now), window.page
    run = tenant.open_run("ppo")
    tenant.post_evals(run, HACKING)
    tenant.finish_run(run)
    insert_cases(embedded_database, run, 8, now, delay_steps=30, stated_risk=0.05)
    insert_cases(embedded_database, run, 20, now, treatment=None, run_outcome="healthy")
    window.sign_in(tenant)
    page.goto(f"{window.address}/")
    page.get_by_role("button", name="Wrong").click()
    page.get_by_text("labeled by key").wait_for()
    page.goto(f"{window.address}/precision")
    for chart in ("over-time", "detectors"):
        page.wait_for_selector(f"#{chart}-chart .scatterlayer")
        expect(page.locator(f"#{chart}-chart").get_by_text(re.compile(r"^\d+(\.\d)? %$")).nth(2)).to_be_visible()
    page.wait_for_selector('.live[data-live="on"]')
    insert_cases(embedded_database, run, 1, now, outcome="wrong", run_outcome="healthy")
    page.get_by_text("80.0 %").first.wait_for()
    page.set_viewport_size({"width": 375, "height": 800})
    page.reload()
    page.wait_for_selector("#detectors-chart .scatterlayer")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    window.assert_no_errors()
