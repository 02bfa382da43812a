"""The pages in a real Chromium: a run turns while one looks on."""

from __future__ import annotations

import math
import re
import time
from datetime import datetime

import pytest
from evalstop_service.ingest import Observations
from evalstop_service.ingest import open_run as opening
from evalstop_service.rules.role_recognition import MetricFields
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web import dashboard
from playwright.sync_api import Browser, Route, expect

from tests.service.project_fixture import submit_message
from tests.service.web.dashboard.conftest import Window
from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant, confirm, open_run, recorded, report
from tests.service.web.dashboard.serving import SECRET
from tests.service.web.dashboard.test_page_safety import HOSTILE

pytestmark = pytest.mark.real

EVALS = recorded("np-0044")

DEADLINE_SECONDS = 30.0

PANELS = "Object.keys(document.getElementById('chart').layout).filter((name) => name.startsWith('yaxis')).length"

EVAL_POINTS = "document.getElementById('chart').data.find((trace) => trace.name === 'eval').x.length"


@pytest.fixture
def tenant(embedded_database: Database, now: datetime) -> Tenant:
    """A project and a key to it, on the embedded database."""
    return add_tenant(embedded_database, now)


def wait_for_chart(window: Window, points: int) -> None:
    window.page.wait_for_selector("#chart .scatterlayer", state="attached")
    # Not wait_for_function: it evaluates a string in the page, which the content security policy refuses.
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (drawn := window.page.evaluate(EVAL_POINTS)) != points:
        assert time.monotonic() < deadline, f"the chart has {drawn} evals, not {points}"
        window.page.wait_for_timeout(20)


def fits(window: Window) -> bool:
    """Whether nothing of the page lies past its right edge."""
    sizes = window.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert sizes[0] <= sizes[1]
    return True


def test_a_run_turns_while_one_looks_on(
    window: Window, embedded_database: Database, tenant: Tenant, now: datetime
) -> None:
    """Sign in, see a run appear, watch it being suspected, stopped and confirmed, and try another policy on it."""
    page, database = window.page, embedded_database
    window.sign_in(tenant)
    expect(page.get_by_text("Connect a trainer")).to_be_visible()
    expect(page.locator(".live")).to_have_attribute("data-live", "on")
    run = open_run(database, tenant, now, "ppo-live", mode="enforce", total_steps=600)
    report(database, tenant, run.id, EVALS[:10], now)
    expect(page.locator(".row-link")).to_have_text("ppo-live")
    expect(page.locator(".spark-line")).to_be_visible()

    page.click(".row-link")
    wait_for_chart(window, 10)
    expect(page.get_by_text("verdict: continue")).to_be_visible()
    report(database, tenant, run.id, EVALS[10:28], now)
    expect(page.get_by_text("verdict: suspect")).to_be_visible()
    wait_for_chart(window, 28)
    receipt = report(database, tenant, run.id, EVALS[28:29], now)
    expect(page.get_by_text("verdict: stop")).to_be_visible()
    expect(page.locator("#chart .annotation-text", has_text="stop requested")).to_be_visible()
    expect(page.locator("#chart .annotation-text", has_text="suspected turn")).to_be_visible()
    assert receipt.decision is not None
    confirm(database, tenant, receipt.decision.id, now)
    expect(page.get_by_text("The job is confirmed to be gone")).to_be_visible()
    expect(page.locator(".status-stopped")).to_be_visible()
    expect(page.locator("#chart .annotation-text", has_text="stop confirmed")).to_be_visible()
    expect(page.locator("#chart .annotation-text", has_text="320 steps not run")).to_be_visible()
    expect(page.locator(".lanes li")).to_contain_text(["verdict", "stop requested 0 s", "stop confirmed"])

    page.select_option("#what-if-policy", "early@1")
    expect(page.locator("#what-if-answer")).to_contain_text("early would not have stopped this run up to step 280")
    page.locator("#what-if-stop-at").fill("0.6")
    expect(page.locator("#what-if-answer")).to_contain_text("at step 270, 10 steps sooner than on record")
    expect(page.locator("#chart .annotation-text", has_text="what if early@1")).to_be_visible()
    assert window.is_clean()


def test_what_a_run_may_still_gain(window: Window, embedded_database: Database, tenant: Tenant, now: datetime) -> None:
    """A panel for what the run has covered, with its caption; one for the probability once the detector says one.

    No other detector has evidence to draw: the chart of the eval over the KL has the row to itself.
    """
    page, panels = window.page, window.page.locator("#chart .annotation-text")
    window.sign_in(tenant)
    run = open_run(embedded_database, tenant, now, "ppo", policy="default", total_steps=600)
    report(embedded_database, tenant, run.id, EVALS[:20], now)
    page.goto(f"{window.address}/runs/{run.id}")
    expect(panels.get_by_text("final range covered")).to_be_visible()
    expect(page.locator("#covered-note")).to_be_visible()
    expect(page.locator("[data-toggle=turned]")).to_be_hidden()
    expect(page.locator("#evidence-card")).to_be_hidden()
    expect(page.locator("#gao .main-svg").first).to_be_visible()
    drawn, given = page.evaluate("['#gao .main-svg', '#gao'].map((one) => document.querySelector(one).clientWidth)")
    assert drawn == given
    report(embedded_database, tenant, run.id, EVALS[20:29], now)
    expect(panels.get_by_text("probability of having turned")).to_be_visible()
    expect(page.locator("#chart").get_by_text("50 %", exact=True).first).to_be_visible()
    page.click("[data-toggle=covered]")
    expect(panels.get_by_text("final range covered")).to_have_count(0)
    assert window.is_clean()


def test_the_keyboard_is_enough(window: Window, embedded_database: Database, tenant: Tenant, now: datetime) -> None:
    """Sign in, search, open a run, hide a line and copy the address without a mouse."""
    page = window.page
    run = open_run(embedded_database, tenant, now, "ppo-keys")
    open_run(embedded_database, tenant, now, "other")
    report(embedded_database, tenant, run.id, EVALS[:10], now)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{window.address}/login?next=/runs")
    expect(page.locator("input[name=key]")).to_be_focused()
    page.keyboard.type(tenant.secret)
    page.keyboard.press("Enter")
    page.wait_for_url(f"{window.address}/runs")
    page.keyboard.press("/")
    expect(page.locator("input[name=name]")).to_be_focused()
    page.keyboard.type("keys")
    page.keyboard.press("Enter")
    expect(page.locator(".row-link")).to_have_count(1)
    tab_to(window, ".row-link")
    page.keyboard.press("Enter")
    wait_for_chart(window, 10)
    tab_to(window, "[data-toggle=proxy]")
    page.keyboard.press("Space")
    expect(page.locator("[data-toggle=proxy]")).to_have_attribute("aria-pressed", "false")
    tab_to(window, ".uri .copy")
    page.keyboard.press("Enter")
    expect(page.locator(".uri .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("file:///checkpoints/step-")
    assert window.is_clean()


def tab_to(window: Window, selector: str) -> None:
    for _ in range(40):
        window.page.keyboard.press("Tab")
        if window.page.evaluate(f"document.activeElement.matches({selector!r})"):
            return
    raise AssertionError(f"{selector} is not reached by the Tab key")


def test_what_has_the_focus_keeps_it(
    window: Window, embedded_database: Database, tenant: Tenant, now: datetime
) -> None:
    """News that redraws a part of the page leaves the focus where it was."""
    page = window.page
    run = open_run(embedded_database, tenant, now, "ppo")
    report(embedded_database, tenant, run.id, EVALS[:2], now)
    window.sign_in(tenant)
    page.goto(f"{window.address}/runs/{run.id}")
    wait_for_chart(window, 2)
    page.focus(".uri .copy")
    report(embedded_database, tenant, run.id, EVALS[2:5], now)
    wait_for_chart(window, 5)
    best = max(EVALS[:5], key=lambda item: item.gold)
    expect(page.locator(".uri")).to_contain_text(f"step-{best.step:06d}")
    assert page.evaluate("document.activeElement.matches('.uri .copy')")
    assert window.is_clean()


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_dark_and_narrow(
    browser: Browser, window: Window, embedded_database: Database, tenant: Tenant, now: datetime, scheme: str
) -> None:
    """On a phone, dark or light, no page scrolls sideways, and the colors are those of the scheme."""
    page = window.page
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.set_viewport_size({"width": 375, "height": 740})
    run = open_run(embedded_database, tenant, now, "a-name-without-any-space-" + "x" * 200, mode="enforce")
    report(embedded_database, tenant, run.id, EVALS[:29], now)
    page.goto(f"{window.address}/login")
    assert fits(window)
    window.sign_in(tenant)
    expect(page.locator(".spark-line")).to_be_visible()
    assert fits(window)
    page.goto(f"{window.address}/runs/{run.id}")
    wait_for_chart(window, 29)
    assert fits(window)
    red = int(page.evaluate("getComputedStyle(document.body).backgroundColor").split("(")[1].split(",")[0])
    assert red < 40 if scheme == "dark" else red > 200
    assert window.is_clean()


def test_hostile_names_in_a_browser(window: Window, embedded_database: Database, tenant: Tenant, now: datetime) -> None:
    """Nothing that a trainer names runs, is fetched, or breaks a page or its chart."""
    page = window.page
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    page.set_viewport_size({"width": 375, "height": 740})
    window.sign_in(tenant)
    for name in HOSTILE:
        metrics: dict[str, MetricFields] = {name: {"role": "eval", "direction": "maximize"}}
        request = opening.OpenRequest(name=name, metrics=metrics, labels={name: name})
        run, _ = opening.open_run(embedded_database, tenant.project.id, request, now)
        points = tuple(PostedObservation(name, step, float(step), 0.1) for step in range(4))
        submit_message(embedded_database, tenant.project.id, run.id, Observations(points), now)
        page.goto(f"{window.address}/runs/{run.id}")
        wait_for_chart(window, 4)
        assert page.locator("h1").inner_text() == name
        assert fits(window)
    page.goto(f"{window.address}/runs")
    expect(page.locator(".row-link")).to_have_count(len(HOSTILE))
    assert fits(window)
    assert dialogs == []
    assert window.is_clean()


def test_charts_of_odd_series(window: Window, embedded_database: Database, tenant: Tenant, now: datetime) -> None:
    """Nothing yet, one eval, only NaN, gaps: the chart stands or says what it waits for, with no axis for no data.

    Metrics without a role get small charts as they come, 24 at first.
    """
    page = window.page
    window.sign_in(tenant)
    for name, values in {
        "none": [],
        "one": [0.5],
        "nan": [math.nan, math.nan],
        "gaps": [0.1, math.nan, 0.3, 0.4, math.inf, 0.2],
    }.items():
        run = open_run(embedded_database, tenant, now, name)
        if values:
            points = tuple(PostedObservation("reward/gold", step, value, 0.1) for step, value in enumerate(values))
            submit_message(embedded_database, tenant.project.id, run.id, Observations(points), now)
        page.goto(f"{window.address}/runs/{run.id}")
        if values:
            wait_for_chart(window, len(values))
            assert page.evaluate(PANELS) == 1
        else:
            expect(page.locator(".chart-empty")).to_be_visible()
    others = tuple(PostedObservation(f"train/{number}", step, float(step)) for number in range(30) for step in range(9))
    submit_message(embedded_database, tenant.project.id, run.id, Observations(others), now)
    page.locator("#others-title").scroll_into_view_if_needed()
    expect(page.locator("#metric-charts polyline")).to_have_count(24)
    page.get_by_role("link", name="Show more").click()
    expect(page.locator("#metric-charts polyline")).to_have_count(30)
    assert window.is_clean()


def test_the_curves_are_there_before_the_chart(
    window: Window, embedded_database: Database, tenant: Tenant, now: datetime
) -> None:
    """The server draws them, and the chart takes their place when what draws it has come."""
    page = window.page
    window.sign_in(tenant)
    run = open_run(embedded_database, tenant, now, "drawn")
    report(embedded_database, tenant, run.id, EVALS[:28], now)
    held: list[Route] = []
    page.route(re.compile("plotly"), lambda route: held.append(route))
    page.goto(f"{window.address}/runs/{run.id}", wait_until="commit")
    expect(page.locator("#chart-preview .curve-eval polyline")).to_be_visible()
    expect(page.locator("#chart")).to_be_hidden()
    held[0].continue_()
    wait_for_chart(window, 28)
    expect(page.locator("#chart-preview")).to_have_count(0)
    assert window.is_clean()


def test_a_link_from_another_site_finds_the_session(
    window: Window, embedded_database: Database, tenant: Tenant, now: datetime
) -> None:
    """A strict cookie does not come along from another site; the visitor lands on the run all the same."""
    page = window.page
    run = open_run(embedded_database, tenant, now, "linked")
    page.goto(f"{window.address}/login?token={dashboard.sign_in_token(SECRET, tenant.key.id)}")
    page.wait_for_url(f"{window.address}/")
    elsewhere = window.address.replace("127.0.0.1", "localhost")
    page.goto(f"{elsewhere}/livez")
    page.evaluate(f"location.href = '{window.address}/runs/{run.id}'")
    expect(page.get_by_role("heading", name="linked")).to_be_visible()
