"""Labeling mode: what it shows before and after a label, what a label says of a decision, and who agrees."""

from __future__ import annotations

import re
from datetime import datetime
from html import unescape

import httpx
import pytest
from evalstop_service.decisions import commands
from evalstop_service.errors import Invalid
from evalstop_service.evaluation import blind_labels
from evalstop_service.projects import api_keys
from evalstop_service.rules.statuses import RunOutcome
from evalstop_service.store import decisions, outcomes
from evalstop_service.store.database import Database
from evalstop_service.web.dashboard import sign_in_token
from playwright.sync_api import expect

from tests.service.web.dashboard.conftest import Window
from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant, open_run, recorded, report
from tests.service.web.dashboard.serving import EMBEDDED, SECRET, token_of
from tests.service.web.dashboard.test_all_pages_in_browser import faults

HACKING = recorded("np-0044")


def add_cases(database: Database, tenant: Tenant, now: datetime) -> None:
    """Two runs that were flagged in the shadow, and two that ended before anything was seen."""
    for name, number in (("flagged-1", 60), ("calm-1", 8), ("flagged-2", 60), ("calm-2", 8)):
        run = open_run(database, tenant, now, name)
        report(database, tenant, run.id, HACKING[:number], now)
        commands.finish_run(database, tenant.project.id, run.id, "completed", now)


def label_all(visitor: httpx.Client, start: str, words: dict[str, str]) -> str:
    """Label each case of a set by the name that is shown once it is labeled; gives the page at the end."""
    token, path = token_of(visitor), start
    while 'name="said"' in (html := visitor.get(path).text):
        assert not re.search("flagged-|calm-|called for a stop|never flagged", html)
        action = unescape(html.split('method="post" action="/precision')[1].split('"')[0])
        labeled = visitor.post("/precision" + action, data={"csrf": token, "said": "undecided"})
        shown = visitor.get(labeled.headers["location"]).text
        name = re.findall(r"<bdi>((?:flagged|calm)-\d)</bdi>", shown)[0]
        assert ("called for a stop at step" in shown) == name.startswith("flagged")
        assert ("It was never flagged" in shown) == name.startswith("calm")
        visitor.post("/precision" + action, data={"csrf": token, "said": words[name]})
        path = unescape(re.findall(r'href="([^"]+)" data-press="n"', shown)[0])
    return visitor.get(start).text


@EMBEDDED
def test_two_people_label_the_same(
    visitor: httpx.Client, address: str, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Both get the same cases without their verdicts; what they say counts, and how far they agree is shown."""
    assert "Nothing to label" in visitor.get("/precision/label").text
    add_cases(database, tenant, now)
    assert "/precision/label" in visitor.get("/precision").text
    start = visitor.get("/precision/label").headers["location"]
    first = {"flagged-1": "turned", "flagged-2": "healthy", "calm-1": "healthy", "calm-2": "turned"}
    assert "All 4 labeled" in label_all(visitor, start, first)
    key, _ = api_keys.create_named_key(database, tenant.project.name, "ben", ("read", "operate"), now)
    with httpx.Client(base_url=address, timeout=30) as second:
        second.get("/login", params={"token": sign_in_token(SECRET, key.id)}).raise_for_status()
        done = label_all(second, start, first | {"calm-2": "healthy"})
    assert "labeled 4 of these cases both, 3 alike" in done
    assert '<span class="figure">0.50</span>' in done
    with database.reading() as tx:
        recent = decisions.list_decisions(tx, tenant.project.id)
        said = {one.run_name: outcomes.find_outcome(tx, one.run_id, 1) for one in recent}
    assert {name: (one.outcome, one.actor) for name, one in said.items() if one} == {
        "flagged-1": ("right", "key ben"),
        "flagged-2": ("wrong", "key ben"),
    }


@EMBEDDED
def test_what_a_label_says_of_a_decision(database: Database, tenant: Tenant, now: datetime) -> None:
    """A stop before the turn was wrong, one at or after it right; a run that was let go on is right if healthy."""
    run = open_run(database, tenant, now, "hacking")
    decision = report(database, tenant, run.id, HACKING, now).decision
    assert decision is not None
    turned, healthy = RunOutcome.TURNED, RunOutcome.HEALTHY
    for said, step, flagged, unflagged in (
        (turned, None, "right", "wrong"),
        (turned, decision.step, "right", "wrong"),
        (turned, decision.step + 1, "wrong", "wrong"),
        (healthy, None, "wrong", "right"),
        (RunOutcome.UNDECIDED, None, "unknown", "unknown"),
    ):
        assert blind_labels.judge_outcome(said, step, decision) == flagged
        assert blind_labels.judge_outcome(said, step, None) == unflagged
    with pytest.raises(Invalid, match="only a run that turned"):
        blind_labels.judge_outcome(healthy, 10, decision)


@pytest.mark.real
def test_labeling_by_single_keys(window: Window, embedded_database: Database, now: datetime) -> None:
    """From Precision, by r, w, u and n alone, in light and dark and on a phone; a click says where it turned."""
    tenant, page = add_tenant(embedded_database, now), window.page
    window.sign_in(tenant)
    page.goto(f"{window.address}/precision/label")
    expect(page.get_by_text("Nothing to label")).to_be_visible()
    assert faults(page) == []
    for path in ("/policies", "/policies/level", "/policies/level/edit"):
        page.goto(window.address + path)
        assert faults(page) == []
    page.goto(f"{window.address}/precision/label")
    add_cases(embedded_database, tenant, now)
    page.goto(f"{window.address}/precision")
    page.get_by_role("link", name="Label 40 cases").click()
    expect(page.get_by_text("0 of 4 labeled")).to_be_visible()
    assert faults(page) == []
    page.keyboard.press("n")
    expect(page.locator("h1")).to_have_text("Case 2 of 4")
    page.locator(".curve-eval svg").click()
    expect(page.locator("#turn-step")).not_to_have_value("")
    page.keyboard.press("r")
    expect(page.get_by_text("You said turned")).to_be_visible()
    expect(page.locator("[data-press=n]")).to_be_focused()
    page.emulate_media(color_scheme="dark")
    assert faults(page) == []
    page.set_viewport_size({"width": 375, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    for key, said in (("w", "healthy"), ("u", "can’t tell"), ("w", "healthy")):
        page.keyboard.press("Enter")
        expect(page.get_by_text("You said")).to_be_hidden()
        page.keyboard.press(key)
        expect(page.get_by_text(f"You said {said}")).to_be_visible()
    page.keyboard.press("n")
    expect(page.locator("h1")).to_have_text("All 4 labeled")
    assert faults(page) == []
    assert window.is_clean()
