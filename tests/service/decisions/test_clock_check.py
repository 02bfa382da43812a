"""A process whose clock differs from PostgreSQL's, by which its veto windows end, reports it."""

from __future__ import annotations

from datetime import datetime, timedelta

import httpx
import pytest
from evalstop_service.app import create_app
from evalstop_service.clock import CorrectedClock, utc_now
from evalstop_service.decisions import clock_check
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.projects import api_keys
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database

from tests.fixtures.http_server import serve_app
from tests.fixtures.projects import create_project
from tests.service.concurrency import wait_until


def check_clock(database: Database, behind: timedelta) -> float:
    """Run the job once with a clock that is so far behind; return the seconds that its metric shows."""
    service_metrics = ServiceMetrics()
    clock = CorrectedClock(lambda: utc_now() - behind)
    clock_check.create_job(database, clock, service_metrics).do(lambda _: False)
    assert clock() - utc_now() == pytest.approx(max(-behind, timedelta(0)), abs=timedelta(seconds=60))
    shown = service_metrics.registry.get_sample_value("evalstop_clock_behind_seconds")
    assert shown is not None
    return shown


@pytest.mark.parametrize(
    ("behind", "warning"),
    [
        (timedelta(hours=1), "behind PostgreSQL's, and corrected"),
        (-timedelta(hours=1), "veto windows are longer"),
    ],
    ids=["behind", "ahead"],
)
def test_wrong_clock_is_reported(
    postgres_database: Database, behind: timedelta, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A clock an hour off PostgreSQL's is logged and shown in a metric; if it is behind, it is corrected."""
    assert check_clock(postgres_database, behind) == pytest.approx(behind.total_seconds(), abs=60)
    assert warning in caplog.text


def test_veto_windows_of_a_replica_whose_clock_is_behind_are_not_shorter(postgres_database: Database) -> None:
    """They begin when PostgreSQL says that it is now."""
    service_metrics = ServiceMetrics()
    app = create_app(
        Settings(),
        postgres_database,
        lambda: utc_now() - timedelta(hours=1),
        session_secret="secret",
        service_metrics=service_metrics,
    )
    project = create_project(postgres_database, "late", "enforce", 600.0, utc_now(), "paper")
    key = api_keys.create_named_key(postgres_database, project.name, "test", ("ingest", "read"), utc_now())[1]
    observations = [{"metric": "score", "step": step, "value": value} for step, value in enumerate((5, 9, 3, 2, 1))]
    with serve_app(app) as url, httpx.Client(base_url=f"{url}/api/v1", trust_env=False, timeout=60) as client:
        client.headers["authorization"] = f"Bearer {key}"
        wait_until(lambda: bool(service_metrics.registry.get_sample_value("evalstop_clock_behind_seconds")))
        run = client.post("/runs", json={"name": "run", "metrics": {"score": {"role": "eval"}}}).json()
        client.post(f"/runs/{run['id']}/observations", json={"observations": observations})
        decision = client.get(f"/runs/{run['id']}").json()["decision"]
    due_at = datetime.fromisoformat(decision["due_at"])
    assert due_at - utc_now() == pytest.approx(timedelta(seconds=600), abs=timedelta(seconds=60))


def test_right_clock_is_not_reported(postgres_database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """The clock of the machine that PostgreSQL runs on is 0 s off it, however long the query takes."""
    assert check_clock(postgres_database, timedelta(0)) == 0.0
    assert caplog.text == ""
