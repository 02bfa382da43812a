"""All pages in a real Chromium: accessibility, unusual data, keyboard, phone and print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from evalstop_client import MetricRole, Run
from evalstop_service.clock import utc_now
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from playwright.sync_api import Browser, Page, expect

from tests.service.web.pages.conftest import Window
from tests.service.web.pages.populated_project import populate_project
from tests.service.web.pages.recorded_runs import (
    Eval,
    Tenant,
    add_tenant,
    load_recorded_evals,
)
from tests.service.web.pages.serving import (
    find_accessibility_faults,
    press_tab_until_focused,
    sign_in_link,
    start_dashboard_server,
)

pytestmark = [pytest.mark.real, pytest.mark.nightly]

EMPTY_PROJECT_PAGES = (
    *("/", "/runs", "/runs/fleet", "/runs/compare", "/precision", "/precision/label", "/cases", "/policies"),
    *("/policies/default", "/policies/default/edit", "/webhooks", "/settings", "/settings/audit", "/nowhere"),
)
"""The pages checked in a project without data."""

FIND_CRAMPED_TABLES = """[...document.querySelectorAll("table")].filter((table) => {
    const right = table.parentElement.getBoundingClientRect().right;
    const fits = !table.closest(".scroll") || table.matches(".stack, .matrix");
    const leaves = fits && table.getBoundingClientRect().right > right + 1;
    return leaves || [...table.querySelectorAll("td.c-name")].some((cell) => cell.clientWidth < 100);
}).map((table) => table.className)"""
"""Finds tables wider than their card and not meant to be scrolled, or with a name column too narrow to read."""

FIND_HIDDEN_LINKS = """[...document.querySelectorAll(".nav [aria-current], .filter [aria-current]")].filter((link) => {
    const { left, right } = link.getBoundingClientRect();
    const row = link.parentElement.getBoundingClientRect();
    return left < row.left - 1 || right > row.right + 1;
}).map((link) => link.textContent)"""
"""Finds links to the current page or filter that one would have to scroll to."""


@dataclass
class PopulatedSite:
    """A server with a project full of runs, a signed-in page on it, and the errors that occurred there."""

    address: str
    database: Database
    page: Page
    paths: list[str]
    pending: str
    errors: list[str]

    def visit(self, path: str) -> Page:
        """Open a page and wait until its charts are computed."""
        self.page.goto(self.address + path)
        for note in self.page.locator("[data-note]:visible").all():
            expect(note).not_to_have_text("Fitting…")
            expect(note).not_to_have_text("Replaying…")
        return self.page


@pytest.fixture(scope="module")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PopulatedSite]:
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('site')}/evalstop.db")
    schema.upgrade_schema(database)
    now = utc_now()
    tenant = add_tenant(database, now, veto_window_seconds=3600)
    paths, pending = populate_project(tenant)
    with (
        start_dashboard_server(database) as address,
        browser.new_context(viewport={"width": 1280, "height": 800}) as context,
    ):
        context.set_default_navigation_timeout(120_000)  # on a busy machine
        page = context.new_page()
        errors: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(dialog.message))
        host = urlsplit(address).netloc
        page.on("request", lambda sent: errors.append(sent.url) if urlsplit(sent.url).netloc != host else None)
        page.goto(f"{address}{sign_in_link(tenant.key)}&next=/runs")
        page.wait_for_url(f"{address}/runs")
        yield PopulatedSite(address, database, page, paths, pending, errors)
    database.close()


@pytest.mark.timeout(900)
def test_pages_meet_wcag_aa(site: PopulatedSite, browser: Browser) -> None:
    """Axe finds no violation of WCAG 2.1 AA on any page, and enough contrast in the dark scheme."""
    violations = [found for path in site.paths[:23] for found in find_accessibility_faults(site.visit(path))]
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{site.address}/login")
        violations += find_accessibility_faults(page)
        empty = add_tenant(site.database, utc_now(), "empty")
        page.goto(f"{site.address}{sign_in_link(empty.key)}&next=/runs/fleet")
        expect(page.get_by_text("No run is running")).to_be_visible()
        for path in EMPTY_PROJECT_PAGES:
            page.goto(site.address + path)
            violations += find_accessibility_faults(page)
    assert violations == []


def test_pages_fit_a_phone_without_errors(site: PopulatedSite) -> None:
    """At 375 px nothing extends past an edge, for usual and unusual runs, and the console shows no error."""
    site.page.set_viewport_size({"width": 375, "height": 740})
    site.errors.clear()
    too_wide = []
    for path in site.paths:
        page = site.visit(path)
        sizes = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        if sizes[0] > sizes[1]:
            too_wide.append((path, sizes))
        too_wide += [
            (path, element) for element in (*page.evaluate(FIND_CRAMPED_TABLES), *page.evaluate(FIND_HIDDEN_LINKS))
        ]
        assert page.locator("main h1").count() == 1, path
    site.page.set_viewport_size({"width": 1280, "height": 800})
    assert too_wide == []
    assert [error for error in site.errors if "404" not in error] == []


def test_print_hides_controls(site: PopulatedSite) -> None:
    """Printed, a run's page has its numbers and charts but no menu or button."""
    page = site.visit(f"/runs/{site.pending}")
    page.emulate_media(media="print")
    expect(page.locator(".top")).to_be_hidden()
    expect(page.locator(".controls .act").first).to_be_hidden()
    expect(page.locator("#chart")).to_be_visible()
    expect(page.get_by_role("heading", name="Best checkpoint")).to_be_visible()
    page.emulate_media(media="screen")


def test_single_keys_and_their_dialog(site: PopulatedSite) -> None:
    """Keys move along rows and between pages, not while typing, and not once switched off."""
    page = site.visit("/runs")
    links = page.locator(".row-link")
    for key, place in (("j", 0), ("j", 1), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        expect(links.nth(place)).to_be_focused()
    page.keyboard.press("Control+j")
    expect(links.nth(1)).to_be_focused()
    page.keyboard.press("/")
    page.keyboard.type("jk?gf")
    expect(page.locator("#search")).to_have_value("jk?gf")
    expect(page.locator("#keys")).to_be_hidden()
    page.keyboard.press("Control+k")
    expect(page.locator("#palette")).to_be_visible()
    press_keys(page, "Escape", "Escape", "Escape")  # close the palette, clear the text, leave the field
    expect(page.locator("#search")).not_to_be_focused()
    page.keyboard.press("v")
    expect(page.locator("#toast")).to_contain_text("Move to a stop first")
    page.keyboard.press("Escape")
    expect(page.locator("#toast")).to_be_hidden()
    press_keys(page, "g", "f")
    page.wait_for_url(f"{site.address}/runs/fleet")
    name = page.locator(".row-link").nth(1).inner_text()
    press_keys(page, "j", "j", "Enter")
    page.wait_for_url(re.compile("/runs/[0-9a-f-]{36}$"))
    expect(page.locator("h1")).to_have_text(name)
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    assert find_accessibility_faults(page) == []
    press_keys(page, "g", "o")
    expect(page.locator("#keys")).to_be_visible()
    page.get_by_label("Keys without Ctrl").uncheck()
    press_keys(page, "Escape", "?")
    expect(page.locator("#keys")).to_be_hidden()
    page.keyboard.press("Control+k")
    page.keyboard.type("Keys")
    page.keyboard.press("Enter")
    page.get_by_label("Keys without Ctrl").check()
    page.keyboard.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()
    press_keys(page, "g", "o")
    page.wait_for_url(f"{site.address}/")
    expect(page.locator("#queue .what > a").first).to_be_visible()
    press_keys(page, "j", "v")
    expect(page.locator("#queue li").first.locator("input[name=reason]")).to_be_focused()


def test_command_palette(site: PopulatedSite) -> None:
    """The palette finds pages, actions and runs by name, whatever they are called, and fits 375 px."""
    page = site.visit("/policies")
    page.keyboard.press("Control+k")
    option = page.locator("#palette [role=option]")
    expect(option.first).to_have_attribute("aria-selected", "true")
    page.keyboard.type("<script>")
    expect(option.locator("bdi")).to_have_text(["<script>alert(1)</script>"])
    page.locator("#palette input").fill("o")
    expect(option.locator("small", has_text="run").first).to_be_visible()
    page.set_viewport_size({"width": 375, "height": 740})
    assert find_accessibility_faults(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.set_viewport_size({"width": 1280, "height": 800})
    page.locator("#palette input").fill("nothing at all")
    expect(page.locator("#palette [role=status]")).to_have_text("Nothing found")
    page.locator("#palette input").fill("pend")
    expect(option).to_have_text(["pendingrun"])
    page.keyboard.press("Enter")
    page.wait_for_url(f"{site.address}/runs/{site.pending}")
    page.keyboard.press("Control+k")
    page.keyboard.type("label")
    press_keys(page, "ArrowDown", "ArrowUp", "Enter")
    expect(page.locator("input[name=outcome]").first).to_be_focused()
    assert [error for error in site.errors if "404" not in error] == []


def test_views_of_the_run_list_are_saved_by_name(site: PopulatedSite) -> None:
    """A named view leads back to its filters, order and columns, until it is removed."""
    page = site.visit("/runs?verdict=stop&order=step&column=opened")
    page.get_by_text("Views", exact=True).click()
    page.get_by_label("Name of this view").fill("stops")
    page.keyboard.press("Enter")
    page = site.visit("/runs")
    page.get_by_text("Views", exact=True).click()
    page.get_by_role("link", name="stops", exact=True).click()
    page.wait_for_url(f"{site.address}/runs?verdict=stop&order=step&column=opened")
    expect(page.get_by_role("columnheader", name="Opened")).to_be_visible()
    assert find_accessibility_faults(page) == []
    page.get_by_text("Views", exact=True).click()
    page.get_by_label("Remove the view stops").click()
    expect(page.get_by_role("link", name="stops", exact=True)).to_have_count(0)


def press_keys(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


EVALS = load_recorded_evals("np-0044")


def test_operator_workflow_by_keyboard(
    window: Window, embedded_database: Database, now: datetime, tmp_path: Path
) -> None:
    """Every step from signing in to the backtest works by keyboard, without an error in the console."""
    database, page = embedded_database, window.page
    tenant = add_tenant(database, now, veto_window_seconds=3600)
    for name in ("past-1", "past-2"):
        add_past_run(tenant, name)

    page.goto(f"{window.address}/login?next=/runs")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type(tenant.secret)
    page.keyboard.press("Enter")
    page.wait_for_url(f"{window.address}/runs")
    expect(page.locator(".row-link")).to_have_count(2)

    with start_live_run(window, tenant, tmp_path) as run:
        expect(page.locator(".row-link")).to_have_count(3)
        focus_and_press_enter(window, ".row-link:has-text('ppo-live')")
        log_evals(run, EVALS[:10])
        expect(page.locator(".live")).to_have_attribute("data-live", "on")
        log_evals(run, EVALS[10:27])
        expect(page.get_by_text("verdict: suspect")).to_be_visible()
        log_evals(run, EVALS[27:28])
        expect(page.get_by_text("verdict: stop")).to_be_visible()
        focus_and_press_enter(window, "#act-veto > summary")
        press_tab_until_focused(window.page, "#why-veto")
        page.keyboard.type("the eval set was broken")
        page.keyboard.press("Enter")
        expect(page.get_by_text("was vetoed. The run continues")).to_be_visible()
        log_evals(run, EVALS[29:31])
        expect(page.locator("[data-part=facts] dd").first).to_contain_text(f"{EVALS[30].step}")
        assert not run.should_stop

    precision = page.locator(".tile", has_text="Precision: stops that were right")
    for outcome, value in (("wrong", "50.0 %"), ("right", "100.0 %")):
        label_stop(window, "past-1", outcome)
        focus_and_press_enter(window, ".nav a[href='/precision']")
        expect(precision.locator(".value")).to_have_text(value)

    focus_and_press_enter(window, ".nav a[href='/policies']")
    focus_and_press_enter(window, ".row-link[href='/policies/cautious']")
    focus_and_press_enter(window, "a:has-text('Edit and backtest')")
    focus_and_press_enter(window, "button:has-text('Try on the last')")
    expect(page.get_by_text("3 runs replayed")).to_be_visible()
    focus_and_press_enter(window, "a:has-text('Each run')")
    expect(page.locator(".row-link")).to_have_count(3)
    window.assert_no_errors()


def add_past_run(tenant: Tenant, name: str) -> None:
    """Add a completed shadow run that would have been stopped, and that its later evals show to have turned."""
    run = tenant.open_run(name)
    tenant.post_evals(run, EVALS)
    tenant.finish_run(run)


def start_live_run(window: Window, tenant: Tenant, folder: Path) -> Run:
    metrics: dict[str, MetricRole] = {
        "reward/gold": {"role": "eval"},
        "reward/proxy": {"role": "proxy"},
        "policy/kl": {"role": "kl"},
    }
    return Run("ppo-live", url=window.address, key=tenant.secret, metrics=metrics, mode="enforce", spool_folder=folder)


def log_evals(run: Run, evals: tuple[Eval, ...]) -> None:
    """Log evals with the client, and wait until the service has them."""
    for row in evals:
        values = {"reward/gold": row.gold, "reward/proxy": row.proxy, "policy/kl": row.kl}
        run.log(values, step=row.step, stderr={"reward/gold": row.gold_stderr})
    assert run.flush(30)


def label_stop(window: Window, name: str, outcome: str) -> None:
    """On the overview, label whether the stop of a run was right."""
    focus_and_press_enter(window, ".nav a[href='/']")
    button = f"[aria-label='Was the stop of {name} right?'] .label-{outcome}"
    focus_and_press_enter(window, button)
    expect(window.page.locator(button)).to_have_attribute("aria-pressed", "true")


def focus_and_press_enter(window: Window, selector: str) -> None:
    press_tab_until_focused(window.page, selector)
    window.page.keyboard.press("Enter")
