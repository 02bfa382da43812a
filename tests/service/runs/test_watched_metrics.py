"""Joined together: what a trainer does is counted, traced up to its webhook, and pruned in the end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from evalstop_service import cli
from evalstop_service.clock import utc_now
from evalstop_service.observability import tracing
from evalstop_service.runs import retention
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.fake_collector import run_collector
from tests.service.running_service import RunningService, run_service


class FakeEndpoint:
    """Takes every webhook, and keeps its headers and body."""

    def __init__(self) -> None:
        self.url = ""
        self.taken: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.came = threading.Event()


@contextmanager
def an_endpoint() -> Iterator[FakeEndpoint]:
    endpoint = FakeEndpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.taken.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(204)
            self.end_headers()
            if body["type"] == "run.stop_requested":
                endpoint.came.set()

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        endpoint.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()


def a_run(service: RunningService, values: list[float]) -> dict[str, Any]:
    """A run that reported these evals, one a request."""
    run: dict[str, Any] = service.client.post("/api/v1/runs", json={"name": "r", "policy": "paper"}).json()
    for step, value in enumerate(values):
        points = {"observations": [{"metric": "eval", "step": step, "value": value}]}
        assert service.client.post(f"/api/v1/runs/{run['id']}/observations", json=points).status_code == 200
    return run


def values(service: RunningService) -> dict[tuple[str, ...], float]:
    """What /metrics shows, by name and values of labels."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(service.scrape())
        for sample in family.samples
    }


def test_what_a_trainer_does_is_counted(database: Database) -> None:
    """Observations, their commits and their requests are in the numbers, with the route of the ingest endpoint."""
    with run_service(database) as service:
        run = a_run(service, [0.1, 0.2, 0.3])
        again = {
            "observations": [{"metric": "eval", "step": 0, "value": 0.1}, {"metric": "eval", "step": 1, "value": 9}]
        }
        assert service.client.post(f"/api/v1/runs/{run['id']}/observations", json=again).status_code == 200
        found = values(service)
    assert found["evalstop_observations_total", "accepted"] == 3
    assert found["evalstop_observations_total", "duplicate"] == 1
    assert found["evalstop_observations_total", "conflict"] == 1
    assert found["evalstop_commit_seconds_count",] == found["evalstop_commit_requests_sum",] == 4
    assert found["evalstop_detector_seconds_count",] == 4
    assert found["evalstop_request_seconds_count", "POST", "/api/v1/runs/{run_id}/observations", "2xx"] == 4
    assert found["evalstop_running_runs",] == 1


def test_a_stop_is_one_story(embedded_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit links to the requests that it serves, the detectors and the write are parts of it, and a webhook carries
    the trace of its delivery."""
    with run_collector() as collector, an_endpoint() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        tracer = tracing.create_tracer(os.environ)
        with run_service(embedded_database, tracer, deliver=True) as service:
            body = {"url": endpoint.url, "event_types": EVERY_EVENT}
            assert service.client.post("/api/v1/endpoints", json=body).status_code == 201
            run = a_run(service, [0.5, 0.4, 0.3, 0.2, 0.1])
            assert endpoint.came.wait(30)
        requests = {span.context for span in collector.spans if span.name == "POST /api/v1/runs/{run_id}/observations"}
        commits = [span for span in collector.spans if span.name == "commit"]
        assert len(requests) == 5
        assert requests <= {link for span in commits for link in span.links}
        parts = {(span.name, span.parent_id) for span in collector.spans}
        for commit in commits:
            assert {("step detectors", commit.span_id), ("write", commit.span_id)} <= parts
        sent = {headers["traceparent"][3:52] for headers, _ in endpoint.taken}
        delivered = [span for span in collector.spans if span.name == "deliver"]
        assert sent == {span.context for span in delivered}
        assert {span.attributes["evalstop.run_id"] for span in delivered} == {run["id"]}


def test_untraced_webhooks_carry_no_trace(embedded_database: Database) -> None:
    """Where nothing is traced a webhook says nothing of a trace."""
    with an_endpoint() as endpoint, run_service(embedded_database, deliver=True) as service:
        assert service.client.post(
            "/api/v1/endpoints", json={"url": endpoint.url, "event_types": EVERY_EVENT}
        ).is_success
        a_run(service, [0.5, 0.4, 0.3, 0.2, 0.1])
        assert endpoint.came.wait(30)
    assert all("traceparent" not in headers for headers, _ in endpoint.taken)


def test_a_problem_names_its_request(embedded_database: Database) -> None:
    """A caller who complains has the id in hand: in the answer's header and in the problem itself."""
    with run_service(embedded_database) as service:
        for path in ("/api/v1/runs/00000000-0000-0000-0000-000000000000", "/nowhere"):
            answer = service.client.get(path)
            assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_a_project_says_how_long_its_runs_are_kept(
    database: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set over the API, carried out by `evalstop prune`, told by the run; then nothing can be added to it."""
    with run_service(database) as service:
        kept = service.client.patch("/api/v1/project", json={"retention_days": 30})
        assert kept.json()["retention_days"] == 30
        assert service.client.patch("/api/v1/project", json={"veto_window_seconds": 1}).json()["retention_days"] == 30
        run = a_run(service, [0.1, 0.2])
        path = f"/api/v1/runs/{run['id']}"
        assert service.client.post(f"{path}/finish", json={"status": "completed"}).json()["pruned_at"] is None
        with database.transaction() as tx:
            tx.execute(tables.runs.update().values(ended_at=utc_now() - timedelta(days=31)))
        url = database.url.set(drivername=database.url.get_backend_name())
        monkeypatch.setenv("EVALSTOP_DATABASE_URL", url.render_as_string(hide_password=False))
        assert [pruned(capsys, "--dry-run")["rows"] > 0, pruned(capsys)["runs"]] == [True, {kept.json()["name"]: 1}]
        assert pruned(capsys)["runs"] == {}
        assert service.client.get(path).json()["pruned_at"] is not None
        assert service.client.get(f"{path}/observations", params={"metric": "eval"}).json()["items"] == []
        again = {"observations": [{"metric": "eval", "step": 5, "value": 0.1}]}
        for verb, body in (("observations", again), ("resume", {"step": 0})):
            answer = service.client.post(f"{path}/{verb}", json=body)
            assert answer.status_code == 409
            assert "pruned" in answer.json()["detail"]
        assert service.client.post("/api/v1/runs", json={"name": "r", "resume": "must"}).status_code == 409
        for_ever = service.client.patch("/api/v1/project", json={"retention_days": None})
        assert for_ever.json()["retention_days"] is None
        assert retention.prune_runs(database, utc_now(), dry_run=True) == retention.PruneResult()


def pruned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["prune", "--json", *options]) == cli.OK
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document
