"""A process whose clock differs from PostgreSQL's, by which its veto windows end, reports it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.decisions import clock_check
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store.database import Database


def check_clock(database: Database, behind: timedelta) -> float:
    """Run the job once with a clock that is so far behind; return the seconds that its metric shows."""
    service_metrics = ServiceMetrics()
    clock_check.create_job(database, lambda: utc_now() - behind, service_metrics).do(lambda _: False)
    shown = service_metrics.registry.get_sample_value("evalstop_clock_behind_seconds")
    assert shown is not None
    return shown


@pytest.mark.parametrize(
    ("behind", "warning"),
    [
        (timedelta(hours=1), "behind PostgreSQL's, and veto windows are so much too short"),
        (-timedelta(hours=1), "long"),
    ],
    ids=["behind", "ahead"],
)
def test_wrong_clock_is_reported(
    postgres_database: Database, behind: timedelta, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A clock an hour off PostgreSQL's is logged, and shown in a metric."""
    assert check_clock(postgres_database, behind) == pytest.approx(behind.total_seconds(), abs=60)
    assert warning in caplog.text


def test_right_clock_is_not_reported(postgres_database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """The clock of the machine that PostgreSQL runs on is 0 s off it, however long the query takes."""
    assert check_clock(postgres_database, timedelta(0)) == 0.0
    assert caplog.text == ""
