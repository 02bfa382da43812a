"""The whole journey in a real Chromium, without a mouse: watch a run turn, veto, judge, see precision, try a policy."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from evalstop_client import MetricRole, Run
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands
from evalstop_service.evaluation import backtests
from evalstop_service.store.database import Database
from playwright.sync_api import expect

from tests.service.web.dashboard.conftest import Window
from tests.service.web.dashboard.recorded_runs import Eval, Tenant, add_tenant, open_run, recorded, report

pytestmark = pytest.mark.real

EVALS = recorded("np-0044")
MOST_TABS = 60


def test_an_operators_day_by_keyboard(
    window: Window, embedded_database: Database, now: datetime, tmp_path: Path
) -> None:
    """From the key to the figures: each step is made by keys alone, and the browser complains of nothing throughout."""
    database, page = embedded_database, window.page
    tenant = add_tenant(database, now, veto_window_seconds=3600)
    for name in ("past-1", "past-2"):
        past_run(database, tenant, now, name)

    page.goto(f"{window.address}/login?next=/runs")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type(tenant.secret)
    page.keyboard.press("Enter")
    page.wait_for_url(f"{window.address}/runs")
    expect(page.locator(".row-link")).to_have_count(2)

    with live_run(window, tenant, tmp_path) as run:
        expect(page.locator(".row-link")).to_have_count(3)
        press(window, ".row-link:has-text('ppo-live')")
        tell(run, EVALS[:10])
        expect(page.locator(".live")).to_have_attribute("data-live", "on")
        tell(run, EVALS[10:28])
        expect(page.get_by_text("verdict: suspect")).to_be_visible()
        tell(run, EVALS[28:29])
        expect(page.get_by_text("verdict: stop")).to_be_visible()
        press(window, "#act-veto > summary")
        tab_to(window, "#why-veto")
        page.keyboard.type("the eval set was broken")
        page.keyboard.press("Enter")
        expect(page.get_by_text("was vetoed. The run continues")).to_be_visible()
        tell(run, EVALS[29:31])
        expect(page.locator("[data-part=facts] dd").first).to_contain_text(f"{EVALS[30].step}")
        assert not run.should_stop

    precision = page.locator(".tile", has_text="Precision: stops that were right")
    for word, value in (("wrong", "50.0 %"), ("right", "100 %")):
        judge(window, "past-1", word)
        press(window, ".nav a[href='/precision']")
        expect(precision.locator(".value")).to_have_text(value)

    press(window, ".nav a[href='/policies']")
    press(window, ".row-link[href='/policies/cautious']")
    press(window, "a:has-text('Edit and backtest')")
    press(window, "button:has-text('Try on the last')")
    expect(page.get_by_text("waiting for a worker")).to_be_visible()
    assert backtests.run_next_backtest(database, utc_now)
    expect(page.get_by_text("3 runs replayed")).to_be_visible()
    press(window, "a:has-text('Each run')")
    expect(page.locator(".row-link")).to_have_count(3)
    assert window.is_clean()


def past_run(database: Database, tenant: Tenant, now: datetime, name: str) -> None:
    """A run that was watched in the shadow, would have been stopped, and turned as its later evals show."""
    run = open_run(database, tenant, now, name)
    report(database, tenant, run.id, EVALS, now)
    commands.finish_run(database, tenant.project.id, run.id, "completed", now)


def live_run(window: Window, tenant: Tenant, folder: Path) -> Run:
    metrics: dict[str, MetricRole] = {
        "reward/gold": {"role": "eval"},
        "reward/proxy": {"role": "proxy"},
        "policy/kl": {"role": "kl"},
    }
    return Run("ppo-live", url=window.address, key=tenant.secret, metrics=metrics, mode="enforce", spool_folder=folder)


def tell(run: Run, evals: tuple[Eval, ...]) -> None:
    """Have a trainer report evals, and the service take them."""
    for item in evals:
        values = {"reward/gold": item.gold, "reward/proxy": item.proxy, "policy/kl": item.kl}
        run.log(values, step=item.step, stderr={"reward/gold": item.gold_stderr})
    assert run.flush(30)


def judge(window: Window, name: str, word: str) -> None:
    """Say on the overview, by its one key, whether the stop of a run was right."""
    press(window, ".nav a[href='/']")
    button = f"[aria-label='Was the stop of {name} right?'] .label-{word}"
    press(window, button)
    expect(window.page.locator(button)).to_have_attribute("aria-pressed", "true")


def press(window: Window, selector: str) -> None:
    tab_to(window, selector)
    window.page.keyboard.press("Enter")


def tab_to(window: Window, selector: str) -> None:
    """Press Tab until this has the focus."""
    wanted = window.page.locator(selector)
    expect(wanted).to_have_count(1)
    for _ in range(MOST_TABS):
        window.page.keyboard.press("Tab")
        if wanted.evaluate("(element) => element === document.activeElement"):
            return
    raise AssertionError(f"{selector} is not reached by the Tab key")
