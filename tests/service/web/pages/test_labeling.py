"""Labeling mode: cases without their verdicts, labels by several people, and the outcomes that follow."""

from __future__ import annotations

import re
from datetime import datetime
from html import unescape

import httpx
import pytest
from evalstop_service.domain.statuses import RunOutcome
from evalstop_service.errors import Invalid
from evalstop_service.projects import api_keys
from evalstop_service.store import cases, decisions
from evalstop_service.store.database import Database
from evalstop_service.web.pages import labeling
from playwright.sync_api import expect

from tests.service.web.pages.accessibility import find_accessibility_faults
from tests.service.web.pages.conftest import Window
from tests.service.web.pages.recorded_runs import Tenant, add_tenant, load_recorded_evals
from tests.service.web.pages.serving import (
    SQLITE_ONLY,
    open_client,
    read_csrf_token,
    sign_in_by_link,
)

HACKING = load_recorded_evals("np-0044")


def add_flagged_and_unflagged_runs(tenant: Tenant) -> None:
    """Add two shadow runs that were flagged, and two that ended before any verdict."""
    for name, number in (("flagged-1", 60), ("calm-1", 8), ("flagged-2", 60), ("calm-2", 8)):
        run = tenant.open_run(name)
        tenant.post_evals(run, HACKING[:number])
        tenant.finish_run(run)


def label_all(visitor: httpx.Client, start: str, labels: dict[str, str]) -> str:
    """Label each case of a set, by the run name shown after its first label; returns the last page."""
    token, path = read_csrf_token(visitor), start
    while 'name="run_outcome"' in (html := visitor.get(path).text):
        assert not re.search("flagged-|calm-|called for a stop|never flagged", html)
        action = unescape(html.split('method="post" action="/precision')[1].split('"')[0])
        labeled = visitor.post("/precision" + action, data={"csrf": token, "run_outcome": "undecided"})
        result = visitor.get(labeled.headers["location"]).text
        name = re.findall(r"<bdi>((?:flagged|calm)-\d)</bdi>", result)[0]
        assert ("called for a stop at step" in result) == name.startswith("flagged")
        assert ("It was never flagged" in result) == name.startswith("calm")
        visitor.post("/precision" + action, data={"csrf": token, "run_outcome": labels[name]})
        path = unescape(re.findall(r'href="([^"]+)" data-press="n"', result)[0])
    return visitor.get(start).text


@pytest.mark.slow
@SQLITE_ONLY
def test_two_people_label_the_same_cases(
    visitor: httpx.Client, address: str, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Both get the same cases without verdicts; the last label is the outcome."""
    assert "Nothing to label" in visitor.get("/precision/label").text
    add_flagged_and_unflagged_runs(tenant)
    assert "/precision/label" in visitor.get("/precision").text
    start = visitor.get("/precision/label").headers["location"]
    first = {"flagged-1": "turned", "flagged-2": "healthy", "calm-1": "healthy", "calm-2": "turned"}
    assert "All 4 labeled" in label_all(visitor, start, first)
    key, _ = api_keys.create_named_key(database, tenant.project.name, "ben", ("read", "operate"), now)
    with open_client(address) as second:
        sign_in_by_link(second, key)
        final_page = label_all(second, start, first | {"calm-2": "healthy"})
    assert "All 4 labeled" in final_page
    with database.reading() as tx:
        recent = decisions.list_decisions(tx, tenant.id)
        stored = {decision.run_name: cases.find_outcome(tx, decision.run_id, 1) for decision in recent}
    assert {name: (outcome.outcome, outcome.actor) for name, outcome in stored.items() if outcome} == {
        "flagged-1": ("right", "key ben"),
        "flagged-2": ("wrong", "key ben"),
    }


@SQLITE_ONLY
def test_outcome_of_a_decision_follows_from_the_label(tenant: Tenant) -> None:
    """A stop before the turn is wrong, at or after it right; an unflagged run is right when healthy."""
    run = tenant.open_run("hacking")
    decision = tenant.post_evals(run, HACKING).decision
    assert decision is not None
    turned, healthy = RunOutcome.TURNED, RunOutcome.HEALTHY
    for label, step, flagged, unflagged in (
        (turned, None, "right", "wrong"),
        (turned, decision.step, "right", "wrong"),
        (turned, decision.step + 1, "wrong", "wrong"),
        (healthy, None, "wrong", "right"),
        (RunOutcome.UNDECIDED, None, "unknown", "unknown"),
    ):
        assert labeling.judge_outcome(label, step, decision) == flagged
        assert labeling.judge_outcome(label, step, None) == unflagged
    with pytest.raises(Invalid, match="only a run that turned"):
        labeling.judge_outcome(healthy, 10, decision)


@pytest.mark.nightly
@pytest.mark.real
def test_labeling_by_single_keys(window: Window, embedded_database: Database, now: datetime) -> None:
    """Labels are set by r, w, u and n, in both color schemes and on a phone; a click sets the step of the turn."""
    tenant, page = add_tenant(embedded_database, now), window.page
    window.sign_in(tenant)
    page.goto(f"{window.address}/precision/label")
    expect(page.get_by_text("Nothing to label")).to_be_visible()
    assert find_accessibility_faults(page) == []
    for path in ("/policies", "/policies/level", "/policies/level/edit"):
        page.goto(window.address + path)
        assert find_accessibility_faults(page) == []
    page.goto(f"{window.address}/precision/label")
    add_flagged_and_unflagged_runs(tenant)
    page.goto(f"{window.address}/precision")
    page.get_by_role("link", name="Label 40 cases").click()
    expect(page.get_by_text("0 of 4 labeled")).to_be_visible()
    assert find_accessibility_faults(page) == []
    page.keyboard.press("n")
    expect(page.locator("h1")).to_have_text("Case 2 of 4")
    page.locator(".curve-eval svg").click()
    expect(page.locator("#turn-step")).not_to_have_value("")
    page.keyboard.press("r")
    expect(page.get_by_text("You said turned")).to_be_visible()
    expect(page.locator("[data-press=n]")).to_be_focused()
    page.emulate_media(color_scheme="dark")
    assert find_accessibility_faults(page) == []
    page.set_viewport_size({"width": 375, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    for key, label in (("w", "healthy"), ("u", "can’t tell"), ("w", "healthy")):
        expect(page.locator("[data-press=n]")).to_be_focused()  # autofocus waits for the next frame
        page.keyboard.press("Enter")
        expect(page.get_by_text("You said")).to_be_hidden()
        page.keyboard.press(key)
        expect(page.get_by_text(f"You said {label}")).to_be_visible()
    page.keyboard.press("n")
    expect(page.locator("h1")).to_have_text("All 4 labeled")
    assert find_accessibility_faults(page) == []
    window.assert_no_errors()
