"""What is counted is what happened, and a scrape shows it whatever state the service is in, without anybody's names."""

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
from evalstop_service.decisions import commands, pause, stale_runs
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.projects import api_keys
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.rules.decision_lifecycle import DecisionState, Reported
from evalstop_service.rules.event_types import EventType
from evalstop_service.store import endpoints, policies, projects, tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.queue import outbox
from evalstop_service.web.api import prometheus as metrics
from evalstop_service.web.api.prometheus import Installation
from evalstop_service.web.middleware import request_log
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from tests.fixtures.projects import create_project
from tests.service import project_fixture
from tests.service.running_service import RunningService, run_service

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
UNITS = (
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
    """A database that answers as it is told to: `broken` fails, `hung` waits until it is let go."""

    def __init__(self, real: Database) -> None:
        self._real = real
        self.questions = 0
        self.broken = False
        self.hung = threading.Event()
        self.hung.set()

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        self.questions += 1
        self.hung.wait()
        if self.broken:
            raise sa.exc.OperationalError("SELECT", {}, OSError("connection refused"))
        with self._real.reading() as tx:
            yield tx


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The values of a scrape by name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in read_text(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def registry_of(database: object) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Installation(cast(Database, database), lambda: NOW))
    return registry


def read_figures(registry: CollectorRegistry) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The first scrape that has the database's figures: a scrape waits for them for a second, which may be too short
    on a busy machine."""
    deadline = utc_now() + timedelta(seconds=30)
    while True:
        found = samples(generate_latest(registry).decode())
        if found["evalstop_database_up"] == {(): 1}:
            return found
        assert utc_now() < deadline, "the database was never up"


def test_names_tell_whose_they_are_and_in_which_unit() -> None:
    """Every number of ours begins with evalstop_ and ends in what it counts or measures; the rest is the process's."""
    service_metrics = ServiceMetrics()
    service_metrics.registry.register(Installation(cast(Database, None), utc_now))
    service_metrics.waiting_observations.set(3)
    for family in read_text(generate_latest(service_metrics.registry).decode()):
        if not family.name.startswith(("process_", "python_")):
            assert family.name.startswith("evalstop_")
            assert family.name.removesuffix("_info").endswith(UNITS), family.name
            assert family.documentation.endswith(".")


def test_every_part_can_have_one_of_its_own() -> None:
    """Two of them share nothing, so that every part works, and every test counts, by itself."""
    one, other = ServiceMetrics(), ServiceMetrics()
    one.observations.labels("accepted").inc(5)
    text = generate_latest(other.registry).decode()
    assert samples(text)["evalstop_observations_total"][(("result", "accepted"),)] == 0


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("evalstop_observations_total", "result", {"accepted", "duplicate", "conflict"}),
        ("evalstop_loaded_runs_total", "result", {"hit", "mistaken", "moved_on", "restored", "rebuilt"}),
        ("evalstop_deliveries_total", "result", {"delivered", "retry", "dead", "cancelled"}),
    ],
)
def test_what_never_happened_is_there_as_zero(name: str, label: str, values: set[str]) -> None:
    """A series is there before its first event: a rate over it, and an alert, see that first one."""
    found = samples(generate_latest(ServiceMetrics().registry).decode())[name]
    assert {dict(labels)[label] for labels in found} == values
    assert set(found.values()) == {0}


def test_speaks_both_formats(service: RunningService) -> None:
    """A scrape is answered in the format that it asks for, Prometheus text or OpenMetrics, and both can be read."""
    text = httpx.get(f"{service.url}/metrics", trust_env=False)
    assert text.headers["content-type"].startswith("text/plain; version=")
    open_ = httpx.get(f"{service.url}/metrics", headers={"Accept": "application/openmetrics-text"}, trust_env=False)
    assert open_.headers["content-type"].startswith("application/openmetrics-text; version=1")
    names = {family.name for family in read_text(text.text)} - {"evalstop_build_info"}
    families = read_openmetrics(open_.text)  # type: ignore[no-untyped-call]
    assert {family.name for family in families} - {"evalstop_build"} == names
    assert text.headers["cache-control"] == "no-store"


def test_requests_are_counted_by_route_and_not_by_path(service: RunningService) -> None:
    """A route is one series whatever stood in its path, all that leads nowhere is one more, and errors are apart."""
    for name in ("a", "b"):
        run = service.client.post("/api/v1/runs", json={"name": name}).json()
        assert service.client.get(f"/api/v1/runs/{run['id']}").status_code == 200
    for _ in range(3):
        service.client.get(f"/api/v1/runs/{uuid.uuid4()}")
        service.client.get(f"/{uuid.uuid4()}")
    service.client.request("BREW", "/api/v1/runs")
    service.client.get("/login?token=forged")
    counted = samples(service.scrape())["evalstop_request_seconds_count"]
    found = {tuple(value for _, value in labels): number for labels, number in counted.items()}
    assert found["POST", "/api/v1/runs", "2xx"] == 2
    assert found["GET", "/api/v1/runs/{run_id}", "2xx"] == 2
    assert found["GET", "/api/v1/runs/{run_id}", "4xx"] == 3
    assert found["GET", request_log.ELSEWHERE, "4xx"] == 3
    assert ("GET", "/login", "4xx") in found or ("GET", "/login", "2xx") in found
    assert {method for method, _, _ in found} <= request_log.METHODS | {"OTHER"}


def test_a_request_that_breaks_is_counted(service: RunningService) -> None:
    """A fault of the service is a 5xx in the numbers, too, with the id by which its log is found."""
    with service.database.transaction() as tx:
        tx.exec_driver_sql("DROP TABLE verdicts")
    run = service.client.post("/api/v1/runs", json={"name": "r"}).json()
    answer = service.client.get(f"/api/v1/runs/{run['id']}/verdicts")
    assert answer.status_code >= 500
    assert answer.headers["x-request-id"]
    counted = samples(service.scrape())["evalstop_request_seconds_count"]
    assert counted[("method", "GET"), ("route", "/api/v1/runs/{run_id}/verdicts"), ("status", "5xx")] == 1


def test_a_scrape_tells_no_names(service: RunningService) -> None:
    """Nothing that a tenant has named, and no id, is in what everybody may read."""
    named = [f"{word}-{uuid.uuid4().hex}" for word in ("run", "metric", "label", "uri")]
    body = {"name": named[0], "metrics": {named[1]: {"role": "eval", "direction": "maximize"}}}
    run = service.client.post("/api/v1/runs", json={**body, "labels": {"job": named[2]}}).json()
    path = f"/api/v1/runs/{run['id']}"
    points = [{"metric": named[1], "step": step, "value": 0.1} for step in range(3)]
    assert service.client.post(f"{path}/observations", json={"observations": points}).status_code == 200
    assert service.client.post(f"{path}/checkpoints", json={"step": 1, "uri": named[3]}).status_code == 201
    text = service.scrape()
    answer = service.client.get("/api/v1/project").json()
    for secret in (*named, run["id"], answer["id"], answer["name"], service.key):
        assert secret not in text


def test_closed_it_is_for_keys_to_the_whole_installation(embedded_database: Database) -> None:
    """Not public, it answers keys to the installation and nobody else: a project's key learns nothing of the others."""
    prometheus = api_keys.create_named_key(embedded_database, None, "prometheus", ("read",), utc_now())[1]
    with run_service(embedded_database, public=False) as service:
        asked = {
            key: httpx.get(f"{service.url}/metrics", headers={"Authorization": f"Bearer {key}"}, trust_env=False)
            for key in (prometheus, service.key, "esk_forged")
        }
        assert [answer.status_code for answer in asked.values()] == [200, 403, 401]
        assert httpx.get(f"{service.url}/metrics", trust_env=False).status_code == 401
        assert "evalstop_" not in asked[service.key].text


def test_a_port_of_its_own(embedded_database: Database) -> None:
    """A process that serves nothing else shows the same at a port of its own, which is closed with the block."""
    service_metrics = ServiceMetrics()
    service_metrics.registry.register(Installation(embedded_database, utc_now))
    with metrics.listening(service_metrics, "127.0.0.1", 0) as port:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        assert samples(text)["evalstop_database_up"] == {(): 1}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)


def test_a_port_of_its_own_may_ask_for_a_key(embedded_database: Database) -> None:
    """With `EVALSTOP_METRICS_PUBLIC` off a key to the installation opens it, and neither a project's nor none."""
    create_project(embedded_database, "p", "shadow", 0.0, utc_now(), "paper")
    opens, closed = (
        api_keys.create_named_key(embedded_database, project, "prometheus", ("read",), utc_now())[1]
        for project in (None, "p")
    )
    key_cache = KeyCache(embedded_database, 10.0, utc_now)
    with metrics.listening(ServiceMetrics(), "127.0.0.1", 0, key_cache) as port:
        for sent, status in ((f"Bearer {opens}", 200), (f"Bearer {closed}", 401), ("Bearer esk_", 401), ("", 401)):
            answer = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": sent}, trust_env=False)
            assert answer.status_code == status, sent
            assert ("evalstop_" in answer.text) == (status == 200)


def test_tells_where_the_installation_stands(database: Database) -> None:
    """Runs that have not ended, and deliveries that are due, that wait for later and that nobody takes, with ages."""
    project = project_fixture.set_up_project(database)
    running, ended = project.open_run("running"), project.open_run("ended")
    with database.transaction() as tx:
        tx.execute(tables.runs.update().where(tables.runs.c.id == ended.id).values(ended_at=NOW, status="completed"))
        project_row = projects.get_project(tx, project.id)
        taken, disabled = (
            endpoints.add_endpoint(tx, project_row.id, url=f"https://example.org/{name}", event_types=("*",), now=NOW)
            for name in ("taken", "disabled")
        )
        for age, wait in ((500, -100), (400, -300), (300, 60)):
            announce(tx, project, running.id, NOW - timedelta(seconds=age), NOW + timedelta(seconds=wait))
        endpoints.disable_endpoint(tx, disabled.id)
    assert taken.enabled
    found = read_figures(registry_of(database))
    assert found["evalstop_running_runs"] == {(): 1}
    waiting = {labels[0][1]: value for labels, value in found["evalstop_outbox_deliveries"].items()}
    assert waiting == {"due": 2, "later": 1, "held": 3}
    assert found["evalstop_outbox_oldest_due_seconds"] == {(): 300}
    assert found["evalstop_outbox_oldest_waiting_seconds"] == {(): 500}


def test_the_database_tells_what_is_held_back(database: Database) -> None:
    """Silent runs and such without data, paused projects, and on hold stops by every kind of guard that holds them."""
    project, paused = project_fixture.set_up_project(database), project_fixture.set_up_project(database)
    silent, blind, still = (
        project.open_run("silent"),
        project.open_run("blind"),
        project.open_run("still", policy="default"),
    )
    project.post_observations(blind, project_fixture.evals(0.5, *[0.25] * 8), NOW + timedelta(seconds=299))
    project.post_observations(still, project_fixture.evals(0.5), NOW + timedelta(seconds=299))
    stale_runs.check_due_runs(database, NOW + timedelta(seconds=300))
    pause.pause_project(database, paused.id, "dana", "", NOW)
    document = {"name": "strict", "members": [{"detector": "k_decline"}]}
    with database.transaction() as tx:
        policies.add_policy(tx, projects.get_project(tx, paused.id), "strict", document, NOW)
    for name, policy in (("a", "paper"), ("b", "strict")):
        paused.post_observations(paused.open_run(name, policy=policy), project_fixture.DECLINING_EVALS)
    found = read_figures(registry_of(database))
    assert (silent.status, found["evalstop_stale_runs"], found["evalstop_no_data_runs"]) == (
        "running",
        {(): 1},
        {(): 1},
    )
    assert found["evalstop_paused_projects"] == {(): 1}
    on_hold = {labels[0][1]: value for labels, value in found["evalstop_on_hold_stops"].items() if value}
    assert on_hold == {"paused": 2, "no_checkpoint": 1}


def test_the_database_tells_what_is_not_confirmed(database: Database) -> None:
    """Stops that were handed out are counted by how far their receivers are; what is over is not."""
    project = project_fixture.set_up_project(database)
    project_fixture.lift_stop_limits(database)
    decided = [
        project.post_observations(project.open_run(), project_fixture.DECLINING_EVALS).decision for _ in range(4)
    ]
    for decision, state in zip(decided, (DecisionState.ACKNOWLEDGED, DecisionState.CONFIRMED), strict=False):
        assert decision is not None
        said = Reported(project_fixture.NOW, state, "receiver", "as seen", {}, 0.0)
        commands.record_report(database, project.id, decision.id, said)
    found = read_figures(registry_of(database))
    awaited = {labels[0][1]: value for labels, value in found["evalstop_awaited_stops"].items()}
    assert awaited == {"acknowledged": 1, "escalated": 0, "requested": 2}


def announce(
    tx: Transaction, project: project_fixture.ProjectFixture, run_id: uuid.UUID, now: datetime, due_at: datetime
) -> None:
    data: dict[str, Any] = {}
    outbox.add_event(
        tx, project_id=project.id, run_id=run_id, type=EventType("run.stopped"), data=data, now=now, due_at=due_at
    )


def test_an_empty_installation_has_figures(database: Database) -> None:
    """Nothing runs and nothing waits: zeros, and not nothing."""
    found = read_figures(registry_of(database))
    assert found["evalstop_running_runs"] == found["evalstop_outbox_oldest_due_seconds"] == {(): 0}
    assert set(found["evalstop_outbox_deliveries"].values()) == {0}


def test_asks_the_database_once_for_many_scrapes(embedded_database: Database) -> None:
    """Scrapes that follow each other closely, and those at one time, are one question to the database."""
    fake = FakeDatabase(embedded_database)
    registry = registry_of(fake)
    fake.hung.clear()
    scrapes = [threading.Thread(target=generate_latest, args=(registry,)) for _ in range(4)]
    for scrape in scrapes:
        scrape.start()
    fake.hung.set()
    for scrape in scrapes:
        scrape.join()
    generate_latest(registry)
    assert fake.questions == 1


def test_a_database_that_is_away_breaks_no_scrape(embedded_database: Database) -> None:
    """It is said to be down, its figures are left out, and the rest is there."""
    fake = FakeDatabase(embedded_database)
    fake.broken = True
    service_metrics = ServiceMetrics()
    service_metrics.registry.register(Installation(cast(Database, fake), utc_now))
    found = samples(generate_latest(service_metrics.registry).decode())
    assert found["evalstop_database_up"] == {(): 0}
    assert "evalstop_running_runs" not in found
    assert "evalstop_observations_total" in found


def test_a_database_that_hangs_holds_no_scrape_up(embedded_database: Database) -> None:
    """A scrape ends while the question still waits for its answer; with the answer the figures are back."""
    fake = FakeDatabase(embedded_database)
    registry = registry_of(fake)
    fake.hung.clear()
    try:
        for _ in range(2):
            assert samples(generate_latest(registry).decode())["evalstop_database_up"] == {(): 0}
        assert fake.questions == 1
    finally:
        fake.hung.set()
    assert read_figures(registry)["evalstop_running_runs"] == {(): 0}


def test_the_numbers_of_the_process_are_there(service: RunningService) -> None:
    """Memory, processor time, open files and the release that runs are told beside ours."""
    found = samples(service.scrape())
    assert found["process_resident_memory_bytes"][()] > 0
    assert found["process_open_fds"][()] > 0
    assert len(found["evalstop_build_info"]) == 1
