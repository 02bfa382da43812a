"""Labeling mode: cases without their verdicts, and the outcomes that follow."""

from __future__ import annotations

import re
from datetime import datetime
from html import unescape
from uuid import UUID

import httpx
import pytest
from evalstop_service.domain.statuses import RunOutcome
from evalstop_service.errors import Invalid
from evalstop_service.store import cases
from evalstop_service.store.cases import CaseFilter
from evalstop_service.store.database import Database
from evalstop_service.web.pages import labeling
from playwright.sync_api import expect

from tests.service.case_rows import insert_cases
from tests.service.web.pages.conftest import Window
from tests.service.web.pages.recorded_runs import Tenant, add_tenant, load_recorded_evals
from tests.service.web.pages.serving import (
    SQLITE_ONLY,
    find_accessibility_faults,
    read_csrf_token,
)

HACKING = load_recorded_evals("np-0044")


def add_flagged_and_unflagged_runs(tenant: Tenant) -> dict[str, str]:
    """Add two shadow runs that were flagged, and two that ended before any verdict; returns their names by id."""
    names = {}
    for name, number in (("flagged-1", 60), ("calm-1", 8), ("flagged-2", 60), ("calm-2", 8)):
        run = tenant.open_run(name)
        tenant.post_evals(run, HACKING[:number])
        tenant.finish_run(run)
        names[str(run.id)] = name
    return names


@SQLITE_ONLY
def test_cases_are_labeled_without_seeing_what_was_decided(
    visitor: httpx.Client, database: Database, tenant: Tenant
) -> None:
    """Each case is shown once and without its verdict; a label is the outcome, and leads to the next case."""
    assert "Nothing to label" in visitor.get("/precision/label").text
    names = add_flagged_and_unflagged_runs(tenant)
    assert "/precision/label" in visitor.get("/precision").text
    token, page = read_csrf_token(visitor), visitor.get("/precision/label?skip=4").text
    assert "4 skipped" in page
    page = visitor.get("/precision/label?skip=1").text
    labeled = set()
    for left in (4, 3, 2):
        assert f"{left} left" in page
        assert not re.search("flagged-|calm-|called for a stop|never flagged", page)
        action = unescape(page.split('method="post" action="/precision')[1].split('"')[0])
        answer = visitor.post("/precision" + action, data={"csrf": token, "run_outcome": "healthy"})
        page = visitor.get(answer.headers["location"]).text
        run_id = action.split("/")[2].split("?")[0]
        assert f'href="/runs/{run_id}"' in page
        labeled.add(names[run_id])
    assert "1 skipped" in page
    with database.reading() as tx:
        found = {name: cases.find_outcome(tx, UUID(run_id), 1) for run_id, name in names.items()}
    by_people = {name: outcome.outcome for name, outcome in found.items() if outcome and not outcome.derived}
    assert by_people == {name: "wrong" if name.startswith("flagged") else "right" for name in labeled}


@SQLITE_ONLY
def test_labeled_cases_leave_room_for_others(tenant: Tenant, database: Database) -> None:
    """However many cases were labeled last, those that nobody has labeled are offered."""
    names = add_flagged_and_unflagged_runs(tenant)
    insert_cases(database, tenant.open_run("labeled"), 200, derived=False, treatment=None, run_outcome="healthy")
    with database.reading() as tx:
        offered = labeling.choose_runs(tx, tenant.id, CaseFilter())
    assert {run.name for run in offered} == set(names.values())


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
    expect(page.get_by_text("4 left")).to_be_visible()
    assert find_accessibility_faults(page) == []
    page.keyboard.press("n")
    page.wait_for_url("**skip=1")
    page.locator(".curve-eval svg").click()
    expect(page.locator("#turn-step")).not_to_have_value("")
    page.keyboard.press("r")
    expect(page.get_by_text("3 left")).to_be_visible()
    expect(page.get_by_role("status").get_by_text("Saved.")).to_be_visible()
    page.emulate_media(color_scheme="dark")
    assert find_accessibility_faults(page) == []
    page.set_viewport_size({"width": 375, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    for key, left in (("w", 2), ("u", 1)):
        page.keyboard.press(key)
        expect(page.get_by_text("1 skipped" if left == 1 else f"{left} left")).to_be_visible()
    page.get_by_role("link", name="Show them again").click()
    expect(page.get_by_text("1 left")).to_be_visible()
    page.keyboard.press("w")
    expect(page.get_by_text("Nothing to label")).to_be_visible()
    assert find_accessibility_faults(page) == []
    window.assert_no_errors()
