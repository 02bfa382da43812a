"""The period of the figures: chosen once, it holds for every page that sums over a time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape

import httpx
import pytest
from evalstop_service.store.database import Database
from evalstop_service.web.dashboard.period import PERIODS, Period

from tests.service.case_rows import insert_cases
from tests.service.web.dashboard.recorded_runs import Tenant, open_run, recorded, report
from tests.service.web.dashboard.serving import EMBEDDED
from tests.service.web.dashboard.test_pages import seen

SUMMING = ("/", "/precision", "/policies", "/cases")
ELSEWHERE = ("/runs", "/runs/fleet", "/policies/level", "/policies/level/edit", "/settings", "/webhooks", "/runs/{run}")
ASSETS = ("/static/", "/help/")


def links(page: str) -> list[str]:
    """The pages that a page links to."""
    found = [unescape(link) for link in re.findall(r'<a [^>]*href="(/[^"]*)"', page)]
    return [link for link in found if not link.startswith(ASSETS)]


@EMBEDDED
def test_every_link_keeps_the_period(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """From a page that sums every link, from any other the menu, so that the next such page is of the same period."""
    run = open_run(database, tenant, now, "ppo", mode="enforce", labels={"gpus": "8"})
    report(database, tenant, run.id, recorded("np-0044")[:29], now)
    insert_cases(database, run, 60, now, gpus=8.0)
    insert_cases(database, run, 60, now, treatment="stopped")
    for path in SUMMING + ELSEWHERE:
        page = seen(visitor, f"{path.format(run=run.id)}?days=30")
        found = links(page if path in SUMMING else page.split("</header>")[0])
        assert len(found) > 6
        assert [link for link in found if not re.search(r"[?&]days=30(#|$)", link)] == []
    assert visitor.get("/precision/label?days=30").headers["location"].endswith("&days=30")
    listed = seen(visitor, "/runs?days=30&status=running")
    assert listed.count('<input type="hidden" name="days" value="30">') == 2
    assert f'href="/runs/{run.id}?days=30"' in listed
    assert "days" not in "".join(links(seen(visitor, "/")))


@EMBEDDED
def test_all_pages_sum_the_same_cases(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """Those of the period, of which the page says which it is; a period that cannot be chosen is not found."""
    run = open_run(database, tenant, now, "ppo")
    saved = {"treatment": "stopped", "gpus": 8.0, "gpu_hours": 80.0}
    insert_cases(database, run, 2, now - timedelta(days=60), gpu_hours_saved=7.0, **saved)
    insert_cases(database, run, 3, now - timedelta(days=2), gpu_hours_saved=10.0, **saved)
    insert_cases(database, run, 4, now - timedelta(days=2), treatment=None, run_outcome="healthy")
    for days, stops, hours in (("", 5, "44"), ("90", 5, "44"), ("30", 3, "30")):
        overview = seen(visitor, f"/?days={days}")
        assert f"{hours} <small>GPU-hours" in overview
        assert f'<option value="{days}" selected>{PERIODS[days]}</option>' in overview
        (cases,) = re.findall(r'<dt>Stops carried out</dt><dd><a href="([^"]*)"', overview)
        assert seen(visitor, unescape(cases)).count('class="row-link"') == stops
        assert f'<span class="figure">{hours}</span> GPU-hours' in seen(visitor, f"/precision?days={days}")
        assert f'data-label="GPU-hours saved"><span>{hours}<' in seen(visitor, f"/policies?days={days}")
    for path in SUMMING:
        assert visitor.get(f"{path}?days=31").status_code == 404


@pytest.mark.parametrize(
    ("address", "carried"),
    [
        ("/", "/?days=7"),
        ("/#queue", "/?days=7#queue"),
        ("/cases?job_kind=", "/cases?job_kind=&days=7"),
        ("/cases?policy=a%20b%26", "/cases?policy=a+b%26&days=7"),
    ],
)
def test_an_address_with_a_period(address: str, carried: str) -> None:
    """The period is added to what an address has; without one the address stays as it is."""
    assert Period("7").link(address) == carried
    assert Period().link(address) == address


def test_a_period_begins_at_a_full_hour() -> None:
    """So that a page rendered again has the same links."""
    assert Period("7").since(datetime(2026, 3, 9, 12, 34, 56, tzinfo=UTC)) == datetime(2026, 3, 2, 12, tzinfo=UTC)
    assert Period().since(datetime(2026, 3, 9, tzinfo=UTC)) is None
