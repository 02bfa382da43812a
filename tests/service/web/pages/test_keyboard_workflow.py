"""An operator's day in a real Chromium, by keyboard: watch a run, veto, label, read precision, try a policy."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from evalstop_client import MetricRole, Run
from evalstop_service.store.database import Database
from playwright.sync_api import expect

from tests.service.web.pages.conftest import Window
from tests.service.web.pages.recorded_runs import (
    Eval,
    Tenant,
    add_tenant,
    load_recorded_evals,
)
from tests.service.web.pages.serving import press_tab_until_focused

pytestmark = [pytest.mark.real, pytest.mark.nightly]

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
