"""The run page, and that of a link in a message, in a real Chromium: live updates, keyboard, unusual data."""

from __future__ import annotations

import math
import re
from datetime import datetime
from pathlib import Path

import pytest
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.run import MetricFields
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from playwright.sync_api import Route, expect

from tests.service.web.pages.conftest import Window
from tests.service.web.pages.recorded_runs import (
    Tenant,
    add_tenant,
    load_recorded_evals,
)
from tests.service.web.pages.serving import sign_in_link, wait_for_value
from tests.service.web.pages.test_message_link_page import load_decision, open_pending_stop
from tests.service.web.pages.test_page_safety import HOSTILE_NAMES

pytestmark = pytest.mark.real

EVALS = load_recorded_evals("np-0044")

COUNT_EVAL_POINTS = "document.getElementById('chart').data.find((trace) => trace.name === 'eval').x.length"


@pytest.fixture
def tenant(embedded_database: Database, now: datetime) -> Tenant:
    """A project and a key to it, on the embedded database."""
    return add_tenant(embedded_database, now)


def wait_for_chart(window: Window, points: int) -> None:
    """Wait until the chart has this number of evals."""
    window.page.wait_for_selector("#chart .scatterlayer", state="attached")
    wait_for_value(window.page, COUNT_EVAL_POINTS, points)


def assert_page_fits(window: Window) -> None:
    """Check that the page does not extend past its right edge."""
    sizes = window.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert sizes[0] <= sizes[1]


def test_open_page_follows_a_run_to_its_stop(window: Window, tenant: Tenant) -> None:
    """The list and the run page show a new run, its verdicts and its stop as they happen, and replay another policy."""
    page = window.page
    window.sign_in(tenant)
    expect(page.get_by_text("Connect a trainer")).to_be_visible()
    expect(page.locator(".live")).to_have_attribute("data-live", "on")
    run = tenant.open_run("ppo-live", mode="enforce", total_steps=600)
    tenant.post_evals(run, EVALS[:10])
    expect(page.locator(".row-link")).to_have_text("ppo-live")
    expect(page.locator(".spark-line")).to_be_visible()

    page.click(".row-link")
    wait_for_chart(window, 10)
    expect(page.get_by_text("verdict: continue")).to_be_visible()
    tenant.post_evals(run, EVALS[10:27])
    expect(page.get_by_text("verdict: suspect")).to_be_visible()
    wait_for_chart(window, 27)
    tenant.post_evals(run, EVALS[27:29])
    expect(page.get_by_text("verdict: stop")).to_be_visible()
    expect(page.locator("#chart .annotation-text", has_text="stop requested")).to_be_visible()
    expect(page.locator("#chart .annotation-text", has_text="turn (estimated at the stop)")).to_be_visible()
    tenant.confirm_stop(tenant.load_decision(run))
    expect(page.get_by_text("The job is confirmed to be gone")).to_be_visible()
    expect(page.locator(".status-stopped")).to_be_visible()
    expect(page.locator("#chart .annotation-text", has_text="stop confirmed")).to_be_visible()
    expect(page.locator("#chart .annotation-text", has_text="320 steps not run")).to_be_visible()
    expect(page.locator(".states li")).to_contain_text(["stop requested 0s", "stop confirmed"])

    page.get_by_label("early@1").check()
    expect(page.locator("#what-if-answers")).to_contain_text("early would not have stopped this run up to step 280")
    page.get_by_label("paper@1").check()
    expect(page.locator("#what-if-answers li")).to_contain_text(
        ["early would not", "paper would have stopped this run at"]
    )
    expect(page.locator("#chart .annotation-text", has_text="what if paper@1")).to_be_visible()
    window.assert_no_errors()


@pytest.mark.nightly
def test_open_page_without_data_shows_the_first(window: Window, tenant: Tenant) -> None:
    """An overview and a precision page that were opened before the first run show it without being reloaded."""
    page = window.page
    window.sign_in(tenant)
    page.goto(f"{window.address}/")
    expect(page.get_by_text("No runs yet")).to_be_visible()
    run = tenant.open_run("first")
    expect(page.get_by_text("Needs you")).to_be_visible()
    page.wait_for_load_state()  # the page reloads itself, which would end the next navigation
    page.goto(f"{window.address}/precision")
    expect(page.get_by_text("No outcomes yet")).to_be_visible()
    tenant.post_evals(run, EVALS)
    tenant.finish_run(run)
    expect(page.get_by_text("Policies side by side")).to_be_visible()
    window.assert_no_errors()


@pytest.mark.nightly
def test_probability_panel_and_lanes(window: Window, tenant: Tenant) -> None:
    """The chart has a panel for the probability of a turn once it is not 0, and a lane for each observer, which says
    when it called."""
    page, panels = window.page, window.page.locator("#chart .annotation-text")
    window.sign_in(tenant)
    run = tenant.open_run("ppo", policy="default", total_steps=600)
    tenant.post_evals(run, EVALS[:3])
    page.goto(f"{window.address}/runs/{run.id}")
    expect(panels.get_by_text("k_decline observes, no call")).to_be_visible()
    expect(page.locator("[data-toggle=turned]")).to_be_hidden()
    tenant.post_evals(run, EVALS[3:29])
    expect(panels.get_by_text("probability of having turned")).to_be_visible()
    expect(page.locator("#chart").get_by_text("50 %", exact=True).first).to_be_visible()
    expect(panels.get_by_text("k_decline observes, called at step 260")).to_be_visible()
    page.click("[data-toggle=lanes]")
    expect(panels.get_by_text("k_decline")).to_have_count(0)
    window.assert_no_errors()


@pytest.mark.nightly
def test_update_keeps_the_focus(window: Window, tenant: Tenant) -> None:
    """An update that redraws a part of the page leaves the focus where it was."""
    page = window.page
    run = tenant.open_run("ppo")
    tenant.post_evals(run, EVALS[:2])
    window.sign_in(tenant)
    page.goto(f"{window.address}/runs/{run.id}")
    wait_for_chart(window, 2)
    page.focus(".uri .copy")
    tenant.post_evals(run, EVALS[2:5])
    wait_for_chart(window, 5)
    best = max(EVALS[:5], key=lambda item: item.gold)
    expect(page.locator(".uri")).to_contain_text(f"step-{best.step:06d}")
    assert page.evaluate("document.activeElement.matches('.uri .copy')")
    window.assert_no_errors()


@pytest.mark.nightly
def test_hostile_names_are_shown_as_text(window: Window, tenant: Tenant) -> None:
    """No name from a trainer runs as script, is fetched, or breaks a page or its chart."""
    page = window.page
    page.set_viewport_size({"width": 375, "height": 740})
    window.sign_in(tenant)
    for name in HOSTILE_NAMES:
        metrics: dict[str, MetricFields] = {name: {"role": "eval", "direction": "maximize"}}
        run = tenant.open_run(name, metrics=metrics, labels={name: name})
        points = tuple(PostedObservation(name, step, float(step), 0.1) for step in range(4))
        tenant.post_observations(run, points)
        page.goto(f"{window.address}/runs/{run.id}")
        wait_for_chart(window, 4)
        assert page.locator("h1").inner_text() == name
        assert_page_fits(window)
    page.goto(f"{window.address}/runs")
    expect(page.locator(".row-link")).to_have_count(len(HOSTILE_NAMES))
    assert_page_fits(window)
    window.assert_no_errors()


@pytest.mark.nightly
def test_charts_of_unusual_series(window: Window, tenant: Tenant) -> None:
    """No eval, one, only NaN, gaps: the chart is drawn, or says what it waits for.

    Metrics without a role get small charts, 24 at first.
    """
    page = window.page
    window.sign_in(tenant)
    for name, values in {
        "none": [],
        "one": [0.5],
        "nan": [math.nan, math.nan],
        "gaps": [0.1, math.nan, 0.3, 0.4, math.inf, 0.2],
    }.items():
        run = tenant.open_run(name)
        if values:
            points = tuple(PostedObservation("reward/gold", step, value, 0.1) for step, value in enumerate(values))
            tenant.post_observations(run, points)
        page.goto(f"{window.address}/runs/{run.id}")
        if values:
            wait_for_chart(window, len(values))
        else:
            expect(page.locator(".chart-empty")).to_be_visible()
    others = tuple(PostedObservation(f"train/{number}", step, float(step)) for number in range(30) for step in range(9))
    tenant.post_observations(run, others)
    page.locator("#others-title").scroll_into_view_if_needed()
    expect(page.locator("#metric-charts polyline")).to_have_count(30)
    window.assert_no_errors()


@pytest.mark.nightly
def test_preview_is_replaced_by_the_chart(window: Window, tenant: Tenant) -> None:
    """The server draws a run's curves, and the precision page its lines, until the charts' script has loaded."""
    page = window.page
    window.sign_in(tenant)
    run = tenant.open_run("drawn")
    tenant.post_evals(run, EVALS[:28])
    blocked: list[Route] = []
    page.route(re.compile("plotly"), lambda route: blocked.append(route))
    page.goto(f"{window.address}/runs/{run.id}", wait_until="commit")
    expect(page.locator("#chart-preview .curve-eval polyline")).to_be_visible()
    expect(page.locator("#chart")).to_be_hidden()
    blocked[0].continue_()
    wait_for_chart(window, 28)
    expect(page.locator("#chart-preview")).to_have_count(0)
    tenant.post_evals(run, EVALS[28:])
    tenant.finish_run(run)
    page.goto(f"{window.address}/precision", wait_until="commit")
    expect(page.locator("#over-time-chart .sketch polyline")).to_have_count(1)
    expect(page.locator("#over-time-chart .main-svg")).to_have_count(0)
    blocked[1].continue_()
    expect(page.locator("#over-time-chart .main-svg").first).to_be_visible()
    expect(page.locator(".sketch")).to_have_count(0)
    window.assert_no_errors()


@pytest.mark.nightly
def test_link_from_another_site_keeps_the_session(window: Window, tenant: Tenant) -> None:
    """A browser leaves out a strict cookie on a link from another site; the visitor reaches the run all the same."""
    page = window.page
    run = tenant.open_run("linked")
    page.goto(f"{window.address}{sign_in_link(tenant.key)}")
    page.wait_for_url(f"{window.address}/")
    elsewhere = window.address.replace("127.0.0.1", "localhost")
    page.goto(f"{elsewhere}/livez")
    page.evaluate(f"location.href = '{window.address}/runs/{run.id}'")
    expect(page.get_by_role("heading", name="linked")).to_be_visible()


def test_stop_is_vetoed_from_a_message(
    window: Window, embedded_database: Database, now: datetime, tmp_path: Path
) -> None:
    """In a browser, a person who is not signed in reads the page, has the stop wait, and vetoes it."""
    tenant, decision, path = open_pending_stop(embedded_database, now)
    page = window.page
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{window.address}{path}")
        page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
    page.get_by_role("button", name="Wait an hour").click()
    expect(page.get_by_role("button", name="Wait an hour")).to_have_count(0)
    page.get_by_label("Your name").fill("Kim")
    page.get_by_role("button", name="Veto the stop").click()
    expect(page.get_by_text("was vetoed")).to_be_visible()
    assert load_decision(embedded_database, tenant, decision).state == DecisionState.VETOED
    window.assert_no_errors()
