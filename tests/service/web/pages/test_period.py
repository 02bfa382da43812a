"""The period of the figures, on every page that sums over time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape

import httpx
from evalstop_service.store.database import Database
from evalstop_service.web.pages.responses import PERIODS, find_beginning

from tests.service.case_rows import insert_cases
from tests.service.web.pages.recorded_runs import Tenant
from tests.service.web.pages.serving import SQLITE_ONLY, get_html


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
    for path in ("/", "/precision", "/policies"):
        assert visitor.get(f"{path}?days=31").status_code == 422


def test_period_starts_at_a_full_hour() -> None:
    """A page rendered again within the hour has the same links."""
    assert find_beginning("7", datetime(2026, 3, 9, 12, 34, 56, tzinfo=UTC)) == datetime(2026, 3, 2, 12, tzinfo=UTC)
    assert find_beginning("", datetime(2026, 3, 9, tzinfo=UTC)) is None
