"""Metrics: they count what happened, are served whatever state the database is in, and reveal no names."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import httpx
import pytest
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.decisions import pause, stale_runs
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.event_types import EventType
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.runs import retention
from evalstop_service.store import endpoints, tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.queue import outbox
from evalstop_service.store.tables import deliveries
from evalstop_service.web import request_log
from evalstop_service.web.api import health as metrics
from evalstop_service.web.api.health import Installation
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as read_text

from tests.service import project_fixture
from tests.service.running_service import RunningService, run_service

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
UNITS = (
    "bytes",
    "ratio",
    "seconds",
    "steps",
    "observations",
    "requests",
    "runs",
    "rows",
    "deliveries",
    "endpoints",
    "build",
    "up",
    "projects",
    "stops",
    "items",
)


@pytest.fixture
def service(embedded_database: Database) -> Iterator[RunningService]:
    with run_service(embedded_database) as service:
        yield service


class FakeDatabase:
    """A database that fails while `broken`, and waits until `unblocked` is set."""

    def __init__(self, real: Database) -> None:
        self._real = real
        self.read_count = 0
        self.broken = False
        self.unblocked = threading.Event()
        self.unblocked.set()

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        self.read_count += 1
        self.unblocked.wait()
        if self.broken:
            raise sa.exc.OperationalError("SELECT", {}, OSError("connection refused"))
        with self._real.reading() as tx:
            yield tx


def parse_samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The values of a scrape by name and labels."""
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in read_text(text):
        for sample in family.samples:
            values.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return values


def build_registry(database: object) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Installation(cast(Database, database), lambda: NOW))
    return registry


def read_figures(registry: CollectorRegistry) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The first scrape with the database's figures.

    A scrape waits one second for them, which may be too short on a busy machine.
    """
    deadline = utc_now() + timedelta(seconds=30)
    while True:
        samples = parse_samples(generate_latest(registry).decode())
        if samples["evalstop_database_up"] == {(): 1}:
            return samples
        assert utc_now() < deadline, "no scrape had the database's figures"


def test_metric_names_have_a_prefix_and_a_unit() -> None:
    """Each name starts with evalstop_ and ends in its unit; the others are metrics of the process."""
    service_metrics = ServiceMetrics()
    service_metrics.registry.register(Installation(cast(Database, None), utc_now))
    service_metrics.waiting_observations.set(3)
    for family in read_text(generate_latest(service_metrics.registry).decode()):
        if not family.name.startswith(("process_", "python_")):
            assert family.name.startswith("evalstop_")
            assert family.name.removesuffix("_info").endswith(UNITS), family.name
            assert family.documentation.endswith(".")


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("evalstop_observations_total", "result", {"accepted", "duplicate", "conflict"}),
        ("evalstop_loaded_runs_total", "result", {"hit", "mistaken", "moved_on", "restored", "rebuilt"}),
        ("evalstop_deliveries_total", "result", {"delivered", "retry", "dead", "cancelled"}),
    ],
)
def test_labelled_series_start_at_zero(name: str, label: str, values: set[str]) -> None:
    """A rate or an alert then sees the first event of a series."""
    series = parse_samples(generate_latest(ServiceMetrics().registry).decode())[name]
    assert {dict(labels)[label] for labels in series} == values
    assert set(series.values()) == {0}


def test_scrape_format_follows_the_accept_header(service: RunningService) -> None:
    """Prometheus text and OpenMetrics are served with the same names."""
    text = httpx.get(f"{service.url}/metrics", trust_env=False, timeout=60)
    assert text.headers["content-type"].startswith("text/plain; version=")
    openmetrics = httpx.get(
        f"{service.url}/metrics", headers={"Accept": "application/openmetrics-text"}, trust_env=False, timeout=60
    )
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text; version=1")
    names = {family.name for family in read_text(text.text)} - {"evalstop_build_info"}
    families = read_openmetrics(openmetrics.text)  # type: ignore[no-untyped-call]
    assert {family.name for family in families} - {"evalstop_build"} == names
    assert text.headers["cache-control"] == "no-store"


def test_requests_are_counted_by_route(service: RunningService) -> None:
    """All paths of a route are one series, and all unknown paths are another."""
    for name in ("a", "b"):
        run = service.client.post("/api/v1/runs", json={"name": name}).json()
        assert service.client.get(f"/api/v1/runs/{run['id']}").status_code == 200
    for _ in range(3):
        service.client.get(f"/api/v1/runs/{uuid.uuid4()}")
        service.client.get(f"/{uuid.uuid4()}")
    service.client.request("BREW", "/api/v1/runs")
    service.client.get("/login?token=forged")
    samples = parse_samples(service.scrape())["evalstop_request_seconds_count"]
    counts = {tuple(value for _, value in labels): number for labels, number in samples.items()}
    assert counts["POST", "/api/v1/runs", "2xx"] == 2
    assert counts["GET", "/api/v1/runs/{run_id}", "2xx"] == 2
    assert counts["GET", "/api/v1/runs/{run_id}", "4xx"] == 3
    assert counts["GET", request_log.ELSEWHERE, "4xx"] == 3
    assert counts["GET", "/login", "4xx"] == 1
    assert {method for method, _, _ in counts} <= request_log.METHODS | {"OTHER"}


def test_internal_error_is_counted_as_5xx(service: RunningService) -> None:
    """The response has the request id by which its log lines are found."""
    with service.database.transaction() as tx:
        tx.exec_driver_sql("DROP TABLE eval_requests")
    run = service.client.post("/api/v1/runs", json={"name": "r"}).json()
    answer = service.client.get(f"/api/v1/runs/{run['id']}/eval-requests")
    assert answer.status_code >= 500
    assert answer.headers["x-request-id"]
    counts = parse_samples(service.scrape())["evalstop_request_seconds_count"]
    assert counts[("method", "GET"), ("route", "/api/v1/runs/{run_id}/eval-requests"), ("status", "5xx")] == 1


def test_scrape_contains_no_names_ids_or_keys(service: RunningService) -> None:
    """Anyone may read a public scrape, so that it has nothing of a project."""
    names = [f"{word}-{uuid.uuid4().hex}" for word in ("run", "metric", "label", "uri")]
    body = {"name": names[0], "metrics": {names[1]: {"role": "eval", "direction": "maximize"}}}
    run = service.client.post("/api/v1/runs", json={**body, "labels": {"job": names[2]}}).json()
    path = f"/api/v1/runs/{run['id']}"
    points = [{"metric": names[1], "step": step, "value": 0.1} for step in range(3)]
    assert service.client.post(f"{path}/observations", json={"observations": points}).status_code == 200
    assert service.client.post(f"{path}/checkpoints", json={"step": 1, "uri": names[3]}).status_code == 201
    text = service.scrape()
    project = service.client.get("/api/v1/project").json()
    for private in (*names, run["id"], project["id"], project["name"], service.key):
        assert private not in text


def test_metrics_are_served_on_a_separate_port(embedded_database: Database) -> None:
    """The port is closed at the end of the block."""
    service_metrics = ServiceMetrics()
    service_metrics.registry.register(Installation(embedded_database, utc_now))
    with metrics.listening(service_metrics, "127.0.0.1", 0) as port:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=60).text
        assert parse_samples(text)["evalstop_database_up"] == {(): 1}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=60)


def test_running_runs_and_waiting_deliveries_are_measured(database: Database) -> None:
    """Deliveries are counted as due, later and held, with the ages of the oldest."""
    project = project_fixture.set_up_project(database)
    running = project.open_run()
    project.finish_run(project.open_run())
    _enabled, disabled = (project.add_endpoint(url=f"https://example.org/{index}") for index in range(2))
    with database.transaction() as tx:
        for age, wait in ((500, -100), (400, -300), (300, 60)):
            event_id = outbox.add_event(
                tx,
                project_id=project.id,
                run_id=running.id,
                event_type=EventType.STOPPED,
                data={},
                now=NOW - timedelta(seconds=age),
            )
            of_event = deliveries.c.event_id == event_id
            tx.execute(deliveries.update().where(of_event).values(due_at=NOW + timedelta(seconds=wait)))
        endpoints.update_endpoint(tx, project.id, disabled.id, enabled=False)
    figures = read_figures(build_registry(database))
    assert figures["evalstop_running_runs"] == {(): 1}
    waiting = {labels[0][1]: value for labels, value in figures["evalstop_outbox_deliveries"].items()}
    assert waiting == {"due": 2, "later": 1, "held": 3}
    assert figures["evalstop_outbox_oldest_due_seconds"] == {(): 300}
    assert figures["evalstop_outbox_oldest_waiting_seconds"] == {(): 500}


def test_stale_runs_and_stops_on_hold_are_measured(database: Database) -> None:
    """Stops on hold are counted by the guard that holds them."""
    project, paused = project_fixture.set_up_project(database), project_fixture.set_up_project(database)
    silent, no_data, current = (
        project.open_run("silent"),
        project.open_run("blind"),
        project.open_run("still", policy="default"),
    )
    project.post_observations(no_data, project_fixture.evals(0.5), NOW - timedelta(minutes=1))
    project.post_observations(no_data, [PostedObservation("renamed", 900, 0.5)], NOW + timedelta(seconds=299))
    project.post_observations(current, project_fixture.evals(0.5), NOW + timedelta(seconds=299))
    stale_runs.check_due_runs(database, NOW + timedelta(seconds=300))
    pause.pause_project(database, paused.id, "dana", "", NOW)
    paused.add_policy({"name": "strict", "members": [{"detector": "k_decline"}]})
    for policy in ("paper", "strict"):
        paused.open_declining_run(policy=policy)
    figures = read_figures(build_registry(database))
    assert (silent.status, figures["evalstop_stale_runs"], figures["evalstop_no_data_runs"]) == (
        "running",
        {(): 1},
        {(): 1},
    )
    assert figures["evalstop_paused_projects"] == {(): 1}
    on_hold = {labels[0][1]: value for labels, value in figures["evalstop_on_hold_stops"].items() if value}
    assert on_hold == {"paused": 2, "no_checkpoint": 1}


def test_unconfirmed_stops_are_measured_by_state(database: Database) -> None:
    """Confirmed stops are not counted."""
    project = project_fixture.set_up_project(database)
    project_fixture.lift_stop_limits(database)
    decisions = [project.open_declining_run()[1] for _ in range(4)]
    for decision, state in zip(decisions, (DecisionState.ACKNOWLEDGED, DecisionState.CONFIRMED), strict=False):
        project.record_report(decision, state, NOW)
    figures = read_figures(build_registry(database))
    awaited = {labels[0][1]: value for labels, value in figures["evalstop_awaited_stops"].items()}
    assert awaited == {"acknowledged": 1, "escalated": 0, "requested": 2}


def test_concurrent_scrapes_share_one_database_read(embedded_database: Database) -> None:
    """Scrapes at the same time, and shortly after each other, read the database once."""
    fake = FakeDatabase(embedded_database)
    registry = build_registry(fake)
    fake.unblocked.clear()
    scrapes = [threading.Thread(target=generate_latest, args=(registry,)) for _ in range(4)]
    for scrape in scrapes:
        scrape.start()
    fake.unblocked.set()
    for scrape in scrapes:
        scrape.join()
    generate_latest(registry)
    assert fake.read_count == 1


def test_scrape_without_a_database_has_the_other_metrics(embedded_database: Database) -> None:
    """The database is reported as down and its figures are left out."""
    fake = FakeDatabase(embedded_database)
    fake.broken = True
    service_metrics = ServiceMetrics()
    service_metrics.registry.register(Installation(cast(Database, fake), utc_now))
    samples = parse_samples(generate_latest(service_metrics.registry).decode())
    assert samples["evalstop_database_up"] == {(): 0}
    assert "evalstop_running_runs" not in samples
    assert "evalstop_observations_total" in samples


def test_blocked_database_does_not_block_scrapes(embedded_database: Database) -> None:
    """A scrape ends while the read is blocked; once it returns, the figures are back."""
    fake = FakeDatabase(embedded_database)
    registry = build_registry(fake)
    fake.unblocked.clear()
    try:
        for _ in range(2):
            assert parse_samples(generate_latest(registry).decode())["evalstop_database_up"] == {(): 0}
        assert fake.read_count == 1
    finally:
        fake.unblocked.set()
    assert read_figures(registry)["evalstop_running_runs"] == {(): 0}


def post_run(service: RunningService, values: list[float]) -> dict[str, Any]:
    """Open a run and post these evals, one per request."""
    run: dict[str, Any] = service.client.post("/api/v1/runs", json={"name": "r", "policy": "paper"}).json()
    for step, value in enumerate(values):
        body = {"observations": [{"metric": "eval", "step": step, "value": value}]}
        assert service.client.post(f"/api/v1/runs/{run['id']}/observations", json=body).status_code == 200
    return run


def read_metrics(service: RunningService) -> dict[tuple[str, ...], float]:
    """Parse /metrics into values by name and label values."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(service.scrape())
        for sample in family.samples
    }


def test_observations_and_commits_are_counted(database: Database) -> None:
    """Observations, commits and requests appear in /metrics with the route of the ingest endpoint."""
    with run_service(database) as service:
        run = post_run(service, [0.1, 0.2, 0.3])
        again = {
            "observations": [{"metric": "eval", "step": 0, "value": 0.1}, {"metric": "eval", "step": 1, "value": 9}]
        }
        assert service.client.post(f"/api/v1/runs/{run['id']}/observations", json=again).status_code == 200
        metrics = read_metrics(service)
    assert metrics["evalstop_observations_total", "accepted"] == 3
    assert metrics["evalstop_observations_total", "duplicate"] == 1
    assert metrics["evalstop_observations_total", "conflict"] == 1
    assert metrics["evalstop_commit_requests_sum",] == 4
    # The batch with a duplicate and a conflict is an edit: its message is taken from its group, and committed alone.
    assert metrics["evalstop_commit_seconds_count",] == 5
    assert metrics["evalstop_detector_seconds_count",] == 3  # what changes nothing is not judged
    assert metrics["evalstop_request_seconds_count", "POST", "/api/v1/runs/{run_id}/observations", "2xx"] == 4
    assert metrics["evalstop_running_runs",] == 1


def test_project_retention_is_applied_by_prune(database: Database) -> None:
    """A retention set over the API is applied by the worker's job; a pruned run accepts nothing more."""
    with run_service(database) as service:
        settings_answer = service.client.patch("/api/v1/project", json={"retention_days": 30})
        assert settings_answer.json()["retention_days"] == 30
        assert service.client.patch("/api/v1/project", json={"veto_window_seconds": 1}).json()["retention_days"] == 30
        run = post_run(service, [0.1, 0.2])
        path = f"/api/v1/runs/{run['id']}"
        assert service.client.post(f"{path}/finish", json={"status": "completed"}).json()["pruned_at"] is None
        with database.transaction() as tx:
            tx.execute(tables.runs.update().values(ended_at=utc_now() - timedelta(days=31)))
        assert retention.prune_runs(database, utc_now()).runs == {settings_answer.json()["name"]: 1}
        assert service.client.get(path).json()["pruned_at"] is not None
        assert service.client.get(f"{path}/observations", params={"metric": "eval"}).json()["items"] == []
        again = {"observations": [{"metric": "eval", "step": 5, "value": 0.1}]}
        for action, body in (("observations", again), ("resume", {"step": 0})):
            answer = service.client.post(f"{path}/{action}", json=body)
            assert answer.status_code == 409
            assert "pruned" in answer.json()["detail"]
        assert service.client.post("/api/v1/runs", json={"name": "r", "resume": "must"}).status_code == 409
        unlimited = service.client.patch("/api/v1/project", json={"retention_days": None})
        assert unlimited.json()["retention_days"] is None
