"""A trainer's requests are counted, and its runs pruned by the project's retention."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from evalstop_service.clock import utc_now
from evalstop_service.runs import retention
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from prometheus_client.parser import text_string_to_metric_families

from tests.service.running_service import RunningService, run_service


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
