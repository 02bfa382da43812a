"""Every page in a real Chromium: readable for everybody, whole with odd data, by keyboard, on a phone and on paper."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from evalstop_detectors import POLICIES, policy_to_document
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands
from evalstop_service.evaluation import backtests, rollout_stage
from evalstop_service.ingest import Observations
from evalstop_service.ingest import open_run as opening
from evalstop_service.rules.role_recognition import MetricFields
from evalstop_service.rules.run_descriptions import DescriptionIn
from evalstop_service.runs.descriptions import describe_run
from evalstop_service.store import schema
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web import dashboard
from playwright.sync_api import Browser, Page, expect

from tests.service.project_fixture import submit_message
from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant, open_run, recorded, report
from tests.service.web.dashboard.serving import SECRET, serving

pytestmark = pytest.mark.real

HACKING = recorded("np-0044")

NOW = utc_now()

WCAG = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations", "incomplete"]}

CONTRAST = {"runOnly": {"type": "rule", "values": ["color-contrast"]}, "resultTypes": ["violations", "incomplete"]}
"""All that differs in the dark is colors."""

PAGES = (
    *("/", "/runs", "/runs/fleet", "/runs/compare", "/precision", "/precision/label", "/cases", "/policies"),
    *("/policies/default", "/policies/default/edit", "/webhooks", "/settings", "/settings/audit", "/nowhere"),
)
"""The pages of a project that has nothing yet."""

CRAMPED = """[...document.querySelectorAll("table")].filter((table) => {
    const right = table.parentElement.getBoundingClientRect().right;
    const leaves = !table.closest(".scroll") && table.getBoundingClientRect().right > right + 1;
    return leaves || [...table.querySelectorAll("td.c-name")].some((cell) => cell.clientWidth < 100);
}).map((table) => table.className)"""
"""The tables that leave their card, or break names letter by letter."""

OUT_OF_VIEW = """[...document.querySelectorAll(".nav [aria-current], .filter [aria-current]")].filter((link) => {
    const { left, right } = link.getBoundingClientRect();
    const row = link.parentElement.getBoundingClientRect();
    return left < row.left - 1 || right > row.right + 1;
}).map((link) => link.textContent)"""
"""The links to what is shown, where they have to be scrolled for."""


@dataclass
class House:
    """A server with a project full of runs, a page in it that has signed in, and what went wrong there."""

    address: str
    database: Database
    tenant: Tenant
    page: Page
    paths: list[str]
    pending: str
    complaints: list[str]

    def visit(self, path: str) -> Page:
        """Open a page and wait until it stands."""
        self.page.goto(self.address + path)
        for note in self.page.locator("[data-note]").all():
            expect(note).not_to_have_text("Fitting…")
            expect(note).not_to_have_text("Replaying…")
        return self.page


@pytest.fixture(scope="module")
def house(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('house')}/evalstop.db", "NORMAL")
    schema.upgrade_schema(database)
    tenant = add_tenant(database, NOW, veto_window_seconds=3600)
    paths, pending = filled(database, tenant)
    with serving(database) as address, browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        host = urlsplit(address).netloc
        page.on("request", lambda sent: complaints.append(sent.url) if urlsplit(sent.url).netloc != host else None)
        page.goto(f"{address}/login?token={dashboard.sign_in_token(SECRET, tenant.key.id)}&next=/runs")
        page.wait_for_url(f"{address}/runs")
        yield House(address, database, tenant, page, paths, pending, complaints)
    database.close()


def filled(database: Database, tenant: Tenant) -> tuple[list[str], str]:
    """Runs of all sorts, a backtest: the paths of all pages, and the run whose stop is pending."""
    pending = open_run(database, tenant, NOW, "pending", mode="enforce")
    report(database, tenant, pending.id, HACKING[:29], NOW)
    ended = open_run(database, tenant, NOW - timedelta(hours=3), "ended", labels={"gpus": "8", "job_kind": "rlhf"})
    report(database, tenant, ended.id, HACKING, NOW)
    commands.finish_run(database, tenant.project.id, ended.id, "completed", NOW)
    odd = [
        told(database, tenant, "none", "eval", []),
        told(database, tenant, "one", "eval", [0.5]),
        told(database, tenant, "nan", "eval", [math.nan] * 12),
        told(database, tenant, "ends", "eval", [1e308, -1e308, 5e-324, math.inf, 0.0]),
        told(database, tenant, "<script>alert(1)</script>", "__proto__", [0.1, 0.2]),
        told(database, tenant, "\u202egnp.exe \u05d0\u05d1\u05d2", "\u05d0\u05d1", [0.3] * 3),
        told(database, tenant, "long", "eval", [0.3] * 3, label="x" * 250_000),
        told(database, tenant, "tomorrow", "eval", [0.3] * 3, days=1),
        told(database, tenant, "yesterday", "eval", [0.3] * 3, days=-1),
    ]
    endless = open_run(database, tenant, NOW, "W" * 256, mode="enforce")
    report(database, tenant, endless.id, HACKING[:29], NOW)
    odd += [f"/runs/{endless.id}", f"/runs/{endless.id}/observations"]
    document = policy_to_document(POLICIES["cautious"])
    backtest = backtests.request_backtest(database, tenant.project.id, document, 50, "dana", NOW)
    backtests.run_next_backtest(database, utc_now)
    said = DescriptionIn(owner="dana@example.org", group="seeds & co", tags=["baseline", "<b>"], notes="two\nlines")
    for run in (pending, ended):
        describe_run(database, Author(tenant.project.id, "dana", NOW), run.id, said)
    fixed = [
        "/",
        "/runs",
        "/runs?group=seeds+%26+co&tag=baseline",
        "/runs?verdict=stop&order=updated",
        "/runs/fleet",
        f"/runs/{pending.id}",
        f"/runs/{ended.id}/observations",
    ]
    every = [str(pending.id), *(path.split("/")[2] for path in odd[:8]), str(endless.id)]
    fixed += [f"/runs/compare?{'&'.join(f'run={run_id}' for run_id in every)}"]
    with database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, tenant.project.id, "cautious", 1, 0.9, 0.2, NOW)
    fixed += ["/policies", "/policies/cautious?against=default@1", f"/policies/backtests/{backtest.id}"]
    fixed += [f"/policies/cautious/edit?backtest={backtest.id}", "/precision/label"]
    fixed += ["/precision", "/cases", "/webhooks", "/settings", "/settings/audit", "/runs/nowhere", "/runs?status=lost"]
    return [*fixed, *odd], str(pending.id)


def told(
    database: Database, tenant: Tenant, name: str, metric: str, values: list[float], days: int = 0, label: str = ""
) -> str:
    metrics: dict[str, MetricFields] = {metric: {"role": "eval", "direction": "maximize"}}
    labels = {"tag": label} if label else {}
    at = NOW + timedelta(days=days)
    run, _ = opening.open_run(
        database, tenant.project.id, opening.OpenRequest(name=name, metrics=metrics, labels=labels), at
    )
    if values:
        points = tuple(PostedObservation(metric, step, value, 0.1, at) for step, value in enumerate(values))
        submit_message(database, tenant.project.id, run.id, Observations(points), at)
    return f"/runs/{run.id}"


def test_everybody_can_read_it(house: House, browser: Browser) -> None:
    """On no page axe finds anything against WCAG 2.1 AA, nor too little contrast in the dark."""
    found = [fault for path in house.paths[:19] for fault in faults(house.visit(path))]
    with browser.new_context() as stranger:
        page = stranger.new_page()
        page.goto(f"{house.address}/login")
        found += faults(page)
        empty = add_tenant(house.database, NOW, "empty")
        page.goto(f"{house.address}/login?token={dashboard.sign_in_token(SECRET, empty.key.id)}&next=/runs/fleet")
        expect(page.get_by_text("No run is running")).to_be_visible()
        for path in PAGES:
            page.goto(house.address + path)
            found += faults(page)
    assert found == []


def faults(page: Page) -> list[str]:
    """What axe finds on a page as it stands, in light and in dark, and where."""
    found = said(page, "light", WCAG) + said(page, "dark", CONTRAST)
    page.emulate_media(color_scheme="light")
    return found


def said(page: Page, scheme: Literal["light", "dark"], options: dict[str, Any]) -> list[str]:
    # Text in the color of its ground is a fault as well, which axe only calls incomplete.
    page.emulate_media(color_scheme=scheme)
    answer = Axe().run(page, options=options).response
    found = [(violation["id"], node) for violation in answer["violations"] for node in violation["nodes"][:3]]
    found += [(rule["id"], node) for rule in answer["incomplete"] for node in rule["nodes"] if is_invisible(node)]
    return [
        f"{page.url}, {scheme}: {name}: {node['html'][:160]} {node['failureSummary'][:200]}" for name, node in found
    ]


def is_invisible(node: dict[str, Any]) -> bool:
    """Whether a node that axe could not judge is text in the color of its ground."""
    return any((check["data"] or {}).get("messageKey") == "equalRatio" for check in node["any"])


def test_every_page_fits_a_phone_and_is_whole(house: House) -> None:
    """With odd runs and ordinary ones: at 375 px nothing lies past an edge, and the browser complains of nothing."""
    house.page.set_viewport_size({"width": 375, "height": 740})
    house.complaints.clear()
    wide = []
    for path in house.paths:
        page = house.visit(path)
        sizes = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        if sizes[0] > sizes[1]:
            wide.append((path, sizes))
        wide += [(path, what) for what in (*page.evaluate(CRAMPED), *page.evaluate(OUT_OF_VIEW))]
        assert page.locator("main h1").count() == 1, path
    house.page.set_viewport_size({"width": 1280, "height": 800})
    assert wide == []
    assert [one for one in house.complaints if "404" not in one] == []


def test_on_paper(house: House) -> None:
    """Printed, a run has its numbers and none of what only a screen can do."""
    page = house.visit(f"/runs/{house.pending}")
    page.emulate_media(media="print")
    expect(page.locator(".top")).to_be_hidden()
    expect(page.locator(".controls .act").first).to_be_hidden()
    expect(page.locator("#chart")).to_be_visible()
    expect(page.get_by_role("heading", name="Best checkpoint")).to_be_visible()
    page.emulate_media(media="screen")


def test_keys_and_the_list_of_them(house: House) -> None:
    """They move along rows and between pages, not while one types, and not once they are switched off."""
    page = house.visit("/runs")
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
    press_keys(page, "Escape", "Escape", "Escape")  # out of the palette, the text away, out of the field
    expect(page.locator("#search")).not_to_be_focused()
    page.keyboard.press("v")
    expect(page.locator("#toast")).to_contain_text("Move to a stop first")
    page.keyboard.press("Escape")
    expect(page.locator("#toast")).to_be_hidden()
    press_keys(page, "g", "f")
    page.wait_for_url(f"{house.address}/runs/fleet")
    name = page.locator(".row-link").nth(1).inner_text()
    press_keys(page, "j", "j", "Enter")
    page.wait_for_url(re.compile("/runs/[0-9a-f-]{36}$"))
    expect(page.locator("h1")).to_have_text(name)
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    assert faults(page) == []
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
    page.wait_for_url(f"{house.address}/")
    expect(page.locator("#queue .what > a").first).to_be_visible()
    press_keys(page, "j", "v")
    expect(page.locator("#queue li").first.locator("input[name=reason]")).to_be_focused()


def test_a_key_right_after_a_dialog_closed(house: House) -> None:
    """It counts, although the dialog's field keeps the focus until the next frame."""
    page = house.visit("/runs")
    focused, taken = page.evaluate(
        """() => {
          const [dialog, field] = [document.querySelector("#keys"), document.querySelector("#keys input")];
          dialog.showModal();
          field.focus();
          dialog.close();
          const key = new KeyboardEvent("keydown", {key: "j", bubbles: true, cancelable: true});
          return [document.activeElement === field, !document.activeElement.dispatchEvent(key)];
        }"""
    )
    assert focused, "the test has lost its point: closing a dialog takes the focus from its fields"
    assert taken
    expect(page.locator(".row-link").first).to_be_focused()


def test_the_command_palette(house: House) -> None:
    """It finds pages, what the page can do, and runs by name, whatever they are called; at 375 px, too."""
    page = house.visit("/policies")
    page.keyboard.press("Control+k")
    option = page.locator("#palette [role=option]")
    expect(option.first).to_have_attribute("aria-selected", "true")
    page.keyboard.type("<script>")
    expect(option.locator("bdi")).to_have_text(["<script>alert(1)</script>"])
    page.locator("#palette input").fill("o")
    expect(option.locator("small", has_text="run").first).to_be_visible()
    page.set_viewport_size({"width": 375, "height": 740})
    assert faults(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.set_viewport_size({"width": 1280, "height": 800})
    page.locator("#palette input").fill("nothing at all")
    expect(page.locator("#palette [role=status]")).to_have_text("Nothing found")
    page.locator("#palette input").fill("pend")
    expect(option).to_have_text(["pendingrun"])
    page.keyboard.press("Enter")
    page.wait_for_url(f"{house.address}/runs/{house.pending}")
    page.keyboard.press("Control+k")
    page.keyboard.type("label")
    press_keys(page, "ArrowDown", "ArrowUp", "Enter")
    expect(page.locator("input[name=outcome]").first).to_be_focused()
    assert [one for one in house.complaints if "404" not in one] == []


def press_keys(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def test_what_was_done_can_be_taken_back_where_that_is_so(house: House) -> None:
    """A pause has an Undo, which works; it is offered once."""
    page = house.visit("/settings")
    page.locator("#pause summary").click()
    page.locator("#pause form button").click()
    toast = page.locator("#toast")
    expect(toast).to_contain_text("Stopping is paused.")
    assert faults(page) == []
    toast.get_by_role("button", name="Undo").click()
    expect(toast).to_contain_text("Stops are resumed.")
    expect(page.locator("#pause")).not_to_contain_text("paused since")
    page.reload()
    expect(toast).to_be_hidden()


def test_a_veto_and_a_label_by_keyboard(house: House) -> None:
    """Open the form, say why, send it; then say that the stop would have been right, and at which step it turned."""
    page = house.visit(f"/runs/{house.pending}")
    page.keyboard.press("v")
    expect(page.locator("#why-veto")).to_be_focused()
    page.keyboard.type("the eval set was broken")
    page.keyboard.press("Enter")
    expect(page.get_by_text("was vetoed. The run continues")).to_be_visible()
    expect(page.locator("#toast")).to_contain_text("A veto cannot be undone")
    expect(page.locator("#toast").get_by_role("button", name="Undo")).to_have_count(0)
    expect(page.locator("[data-part=decisions]").get_by_text("the eval set was broken")).to_be_visible()
    press_until(page, "#act-label > summary")
    page.keyboard.press("Enter")
    press_until(page, "input[name=outcome]")
    page.keyboard.press("Space")
    press_until(page, "#turn-label")
    page.keyboard.type("soon")
    page.keyboard.press("Enter")
    assert page.locator("#turn-label").evaluate("field => field.validity.patternMismatch")  # said beside the field
    page.locator("#turn-label").fill("230")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Outcome: right, turn at step 230")).to_be_visible()
    assert [one for one in house.complaints if "404" not in one] == []


def press_until(page: Page, selector: str) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(f"document.activeElement.matches({selector!r})"):
            return
    raise AssertionError(f"{selector} is not reached by the Tab key")
