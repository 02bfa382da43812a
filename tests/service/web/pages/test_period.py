"""The period of the figures: once chosen, it applies to every page that sums over time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape

import httpx
import pytest
from evalstop_service.store.database import Database
from evalstop_service.web.pages.responses import PERIODS, Period

from tests.service.case_rows import insert_cases
from tests.service.web.pages.recorded_runs import Tenant, load_recorded_evals
from tests.service.web.pages.serving import SQLITE_ONLY, get_html

PAGES_WITH_PERIOD = ("/", "/precision", "/policies", "/cases")
OTHER_PAGES = (
    "/runs",
    "/runs/fleet",
    "/policies/level",
    "/policies/level/edit",
    "/settings",
    "/webhooks",
    "/runs/{run}",
)
ASSETS = ("/static/", "/help/")


def read_links(page: str) -> list[str]:
    """The links of a page, without those to assets and the documentation."""
    links = [unescape(link) for link in re.findall(r'<a [^>]*href="(/[^"]*)"', page)]
    return [link for link in links if not link.startswith(ASSETS)]


@SQLITE_ONLY
def test_links_keep_the_period(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """Every link of a page with a period, and the menu of any other, carries the chosen period."""
    run, _ = tenant.open_stopped_run("ppo", load_recorded_evals("np-0044")[:29], labels={"gpus": "8"})
    insert_cases(database, run, 60, now, gpus=8.0)
    insert_cases(database, run, 60, now, treatment="stopped")
    for path in PAGES_WITH_PERIOD + OTHER_PAGES:
        page = get_html(visitor, f"{path.format(run=run.id)}?days=30")
        links = read_links(page if path in PAGES_WITH_PERIOD else page.split("</header>")[0])
        assert len(links) > 6
        assert [link for link in links if not re.search(r"[?&]days=30(#|$)", link)] == []
    assert 'href="/precision?days=30"' in visitor.get("/precision/label?days=30").text
    run_list = get_html(visitor, "/runs?days=30&status=running")
    assert run_list.count('<input type="hidden" name="days" value="30">') == 2
    assert f'href="/runs/{run.id}?days=30"' in run_list
    assert "days" not in "".join(read_links(get_html(visitor, "/")))


@SQLITE_ONLY
def test_all_pages_sum_the_cases_of_the_period(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Overview, precision, policies and cases show the same figures for a period; any other period is refused."""
    run = tenant.open_run("ppo")
    stopped_case = {"treatment": "stopped", "gpus": 8.0, "gpu_hours": 80.0}
    insert_cases(database, run, 2, now - timedelta(days=60), gpu_hours_saved=7.0, **stopped_case)
    insert_cases(database, run, 3, now - timedelta(days=2), gpu_hours_saved=10.0, **stopped_case)
    insert_cases(database, run, 4, now - timedelta(days=2), treatment=None, run_outcome="healthy")
    for days, stops, hours in (("", 5, "44"), ("90", 5, "44"), ("30", 3, "30")):
        overview = get_html(visitor, f"/?days={days}")
        assert f'data-hours="saved">{hours}<' in overview
        assert f'<option value="{days}" selected>{PERIODS[days]}</option>' in overview
        (cases,) = re.findall(r'by <a href="([^"]*)">\d+ stops</a> that were', overview)
        assert get_html(visitor, unescape(cases)).count('class="row-link"') == stops
        assert f'data-hours="saved">{hours}</span> GPU-hours' in get_html(visitor, f"/precision?days={days}")
        assert f'data-hours="saved">{hours}</span> h<' in get_html(visitor, f"/policies?days={days}")
    for path in PAGES_WITH_PERIOD:
        assert visitor.get(f"{path}?days=31").status_code == 422


@pytest.mark.parametrize(
    ("path", "with_period"),
    [
        ("/", "/?days=7"),
        ("/#queue", "/?days=7#queue"),
        ("/cases?job_kind=", "/cases?job_kind=&days=7"),
        ("/cases?policy=a%20b%26", "/cases?policy=a+b%26&days=7"),
    ],
)
def test_period_is_added_to_a_link(path: str, with_period: str) -> None:
    """The period is added to a link's query; without a period the link stays as it is."""
    assert Period("7").link(path) == with_period
    assert Period().link(path) == path


def test_period_starts_at_a_full_hour() -> None:
    """A page rendered again within the hour has the same links."""
    assert Period("7").since(datetime(2026, 3, 9, 12, 34, 56, tzinfo=UTC)) == datetime(2026, 3, 2, 12, tzinfo=UTC)
    assert Period().since(datetime(2026, 3, 9, tzinfo=UTC)) is None
