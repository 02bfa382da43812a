"""A trainer's requests are counted, traced through to the webhook, and its runs pruned by the project's retention."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.observability import tracing
from evalstop_service.runs import retention
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.concurrency import wait_until
from tests.service.fake_collector import run_collector
from tests.service.running_service import RunningService, run_service
from tests.service.webhooks.delivery.fakes import FakeEndpoint, Reply


def has_received_stop(endpoint: FakeEndpoint) -> bool:
    return any(json.loads(request.body)["type"] == "run.stop_requested" for request in endpoint.received)


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


def test_trace_links_requests_commit_and_webhook(embedded_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit span links to its requests and has child spans; a webhook carries the trace of its delivery."""
    with run_collector() as collector, FakeEndpoint(Reply(204)) as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        tracer = tracing.create_tracer(os.environ)
        with run_service(embedded_database, tracer, deliver=True) as service:
            body = {"url": endpoint.url, "event_types": EVERY_EVENT}
            assert service.client.post("/api/v1/endpoints", json=body).status_code == 201
            run = post_run(service, [0.5, 0.4, 0.3, 0.2, 0.1])
            wait_until(lambda: has_received_stop(endpoint))
        requests = {span.context for span in collector.spans if span.name == "POST /api/v1/runs/{run_id}/observations"}
        commits = [span for span in collector.spans if span.name == "commit"]
        assert len(requests) == 5
        assert requests <= {link for span in commits for link in span.links}
        parts = {(span.name, span.parent_id) for span in collector.spans}
        for commit in commits:
            assert {("step detectors", commit.span_id), ("write", commit.span_id)} <= parts
        sent = {request.headers["traceparent"][3:52] for request in endpoint.received}
        delivered = [span for span in collector.spans if span.name == "deliver"]
        assert sent == {span.context for span in delivered}
        assert {span.attributes["evalstop.run_id"] for span in delivered} == {run["id"]}


def test_untraced_webhooks_carry_no_trace(embedded_database: Database) -> None:
    """Without tracing, webhooks have no `traceparent` header."""
    with FakeEndpoint(Reply(204)) as endpoint, run_service(embedded_database, deliver=True) as service:
        assert service.client.post(
            "/api/v1/endpoints", json={"url": endpoint.url, "event_types": EVERY_EVENT}
        ).is_success
        post_run(service, [0.5, 0.4, 0.3, 0.2, 0.1])
        wait_until(lambda: has_received_stop(endpoint))
    assert all("traceparent" not in request.headers for request in endpoint.received)


def test_problem_names_its_request(embedded_database: Database) -> None:
    """An error has the same request id in its header and its body."""
    with run_service(embedded_database) as service:
        for path in ("/api/v1/runs/00000000-0000-0000-0000-000000000000", "/nowhere"):
            answer = service.client.get(path)
            assert answer.json()["request_id"] == answer.headers["x-request-id"]


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
