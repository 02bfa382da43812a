"""Labels: limited in number and size, and a key cannot change which job a run of another key belongs to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from evalstop_service.store import tables
from evalstop_service.store.database import Database

from tests.security.served_project import ServedProject, serve_project
from tests.service.web.api.api_calls import FALLING, expect_json, expect_problem
from tests.service.web.api.routes import ENDPOINT

JOB = {"slurm_job_id": "4711", "job_id": "7"}


@pytest.fixture
def project(embedded_database: Database) -> Iterator[ServedProject]:
    with serve_project(embedded_database) as project:
        yield project


def start_run(trainer: httpx.Client) -> str:
    """A run that has a job and an observation."""
    run = expect_json(trainer.post("/api/v1/runs", json={"name": "r", "labels": JOB}), 201)["id"]
    posted = {"observations": [{"metric": "eval", "step": 1, "value": 0.5}]}
    expect_json(trainer.post(f"/api/v1/runs/{run}/observations", json=posted), 200)
    return str(run)


def read_labels(trainer: httpx.Client, run: str) -> dict[str, str]:
    labels: dict[str, str] = expect_json(trainer.get(f"/api/v1/runs/{run}"), 200)["labels"]
    return labels


@pytest.mark.parametrize(
    "label",
    [{"slurm_job_id": "4712"}, {"job_id": "8"}, {"kubernetes_name": "other"}, {"receiver": "a"}, {"process_id": "8"}],
)
def test_another_key_cannot_change_the_job_of_a_run(project: ServedProject, label: dict[str, str]) -> None:
    """Once a run has observations, neither a resume nor a tag of another key replaces its labels."""
    trainer, other = (
        project.open_client("ingest", name="trainer", path=""),
        project.open_client("ingest", name="other", path=""),
    )
    run = start_run(trainer)
    body = {"name": "r", "labels": label}
    for terms in ({}, {"resume": "must"}, {"resume": "must", "job": "mine"}):
        expect_problem(other.post("/api/v1/runs", json=body | terms), 409)
    (key, value), tags = *label.items(), "/mlflow/api/2.0/mlflow/runs"
    for path, document in (
        ("set-tag", {"run_id": run, "key": key, "value": value}),
        ("log-batch", {"run_id": run, "tags": [{"key": key, "value": value}]}),
    ):
        assert other.post(f"{tags}/{path}", json=document).status_code in range(400, 500)
    expect_json(other.post(f"/api/v1/runs/{run}/resume", json={"step": 0}), 200)  # no observation counts from now on
    expect_problem(other.post("/api/v1/runs", json=body | {"resume": "must"}), 409)
    assert read_labels(trainer, run) == JOB
    expect_json(other.post("/api/v1/runs", json={"name": "r", "resume": "must", "labels": {"note": "seen"}}), 200)
    assert read_labels(trainer, run) == JOB | {"note": "seen"}


@pytest.mark.parametrize(
    ("terms", "kept"),
    [
        ({"labels": {"slurm_job_id": "9"}}, "label slurm_job_id"),
        ({"policy": "default"}, "policy"),
        ({"mode": "shadow"}, "mode"),
        ({"total_steps": 7}, "total_steps"),
        ({"labels": {"max_steps": "7"}}, "total_steps"),
        ({"resume": "must", "job": "mine"}, "job"),
        ({"resume": "must", "labels": {"slurm_job_id": "9"}}, "label slurm_job_id"),
    ],
)
def test_another_key_changes_no_terms_of_a_run_without_observations(
    project: ServedProject, terms: dict[str, Any], kept: str
) -> None:
    """From its opening on a run belongs to its key: others attach on its terms, and changes by its key are audited."""
    owner, other = (project.open_client("ingest", name=name) for name in ("trainer", "other"))
    opening = {"name": "r", "labels": JOB, "policy": "paper", "mode": "enforce", "total_steps": 100}
    run = expect_json(owner.post("/runs", json=opening), 201)
    assert kept in expect_problem(other.post("/runs", json={"name": "r"} | terms), 409)["detail"]
    attached = expect_json(other.post("/runs", json=opening | {"labels": {"slurm_job_id": "4711"}}), 200)
    shown = ("id", "labels", "policy", "mode", "total_steps")
    assert {name: attached[name] for name in shown} == {name: run[name] for name in shown}
    may_change = "total_steps" in kept or "resume" in terms
    assert owner.post("/runs", json={"name": "r"} | terms).status_code == (200 if may_change else 409)
    entries = expect_json(project.open_client().get("/audit"), 200)["items"]
    changed_by = {entry["actor"] for entry in entries if entry["action"] == "run.terms_changed"}
    assert changed_by == ({"key trainer"} if may_change else set())


def test_another_key_changes_no_length_by_mlflow(project: ServedProject) -> None:
    """A tag of another key is refused; a param is stored and changes no length."""
    owner, other = (project.open_client("ingest", name=name, path="") for name in ("trainer", "other"))
    run = expect_json(owner.post("/api/v1/runs", json={"name": "r", "total_steps": 100}), 201)["id"]
    tags = "/mlflow/api/2.0/mlflow/runs"
    tag = {"run_id": run, "key": "max_steps", "value": "7"}
    assert other.post(f"{tags}/set-tag", json=tag).status_code == 409
    expect_json(other.post(f"{tags}/log-parameter", json=tag), 200)
    assert expect_json(owner.get(f"/api/v1/runs/{run}"), 200)["total_steps"] == 100


def test_own_key_or_admin_changes_the_job_of_a_run(project: ServedProject) -> None:
    """The trainer that resumes in another job changes it, as may an admin, who can stop jobs anyway."""
    trainer = project.open_client("ingest", name="trainer", path="")
    run = start_run(trainer)
    reopening = {"name": "r", "resume": "must", "labels": {"slurm_job_id": "4712"}}
    expect_json(trainer.post("/api/v1/runs", json=reopening), 200)
    admin = project.open_client("admin", name="head", path="")
    expect_json(admin.post("/api/v1/runs", json=reopening | {"labels": {"slurm_job_id": "4713"}}), 200)
    assert read_labels(trainer, run)["slurm_job_id"] == "4713"


def test_run_of_a_revoked_key_belongs_to_the_next_key(project: ServedProject) -> None:
    """The key that resumes the run may then change its job, and no third key."""
    trainer, admin = (
        project.open_client("ingest", name="trainer", path=""),
        project.open_client("admin", name="head", path=""),
    )
    start_run(trainer)
    keys = expect_json(admin.get("/api/v1/keys"), 200)["items"]
    trainer_id = next(key["id"] for key in keys if key["name"] == "trainer")
    assert admin.delete(f"/api/v1/keys/{trainer_id}").status_code == 204
    reopening = {"name": "r", "resume": "must", "labels": {"slurm_job_id": "4712"}}
    expect_json(project.open_client("ingest", name="successor", path="").post("/api/v1/runs", json=reopening), 200)
    third = project.open_client("ingest", name="third", path="")
    expect_problem(third.post("/api/v1/runs", json=reopening | {"labels": {"slurm_job_id": "4713"}}), 409)


EVENT_BYTES = 64 * 1024


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    """A client of a project with a subscription to all events."""
    with serve_project(database) as project:
        client = project.open_client(path="")
        expect_json(client.post("/api/v1/endpoints", json=ENDPOINT), 201)
        yield client


def build_label(index: int, length: int) -> dict[str, str]:
    return {f"label-{index:04}": "x" * length}


def build_labels(start: int, count: int, length: int) -> dict[str, str]:
    return {key: value for index in range(start, start + count) for key, value in build_label(index, length).items()}


def test_merged_labels_are_limited_to_500(client: httpx.Client) -> None:
    """Reopening a run with more labels is a 422 that names the limit."""
    for start in range(0, 500, 100):
        body = {"name": "r", "labels": build_labels(start, 100, 10)}
        assert client.post("/api/v1/runs", json=body).status_code < 300
    body = {"name": "r", "labels": build_labels(500, 100, 10)}
    refused = expect_problem(client.post("/api/v1/runs", json=body), 422)
    assert "500" in refused["detail"]


def test_merged_labels_are_limited_to_256_kib(client: httpx.Client) -> None:
    """Reopening a run with larger labels is a 422 that names the limit."""
    responses = [
        client.post("/api/v1/runs", json={"name": "r", "labels": build_labels(start, 50, 1900)})
        for start in range(0, 200, 50)
    ]
    assert "256 KiB" in expect_problem(responses[-1], 422)["detail"]


def test_tags_over_the_size_limit_are_dropped(client: httpx.Client, database: Database) -> None:
    """MLflow tags that exceed the labels' limit are left out, and the request succeeds."""
    experiment = {"experiment_id": "0", "run_name": "r"}
    run = client.post("/mlflow/api/2.0/mlflow/runs/create", json=experiment).json()["run"]["info"]["run_id"]
    for start in range(0, 400, 100):
        tags = [{"key": key, "value": value} for key, value in build_labels(start, 100, 2000).items()]
        logged = client.post("/mlflow/api/2.0/mlflow/runs/log-batch", json={"run_id": run, "tags": tags})
        assert logged.status_code == 200, logged.text
    with database.reading() as tx:
        stored_labels = tx.execute(sa.select(tables.runs.c.labels)).scalars().all()
    assert all(len(json.dumps(labels)) <= 256 * 1024 + 10_000 for labels in stored_labels)


def test_stop_event_stays_under_64_kib(client: httpx.Client, database: Database) -> None:
    """Even with the most labels the event is smaller, and keeps the labels of the run's job."""
    terms = {"name": "r", "mode": "enforce"}
    run = expect_json(client.post("/api/v1/runs", json=terms | {"labels": {"slurm_job_id": "4711"}}), 201)["id"]
    for start in range(0, 90, 30):
        body = terms | {"labels": build_labels(start, 30, 2000)}
        assert client.post("/api/v1/runs", json=body).status_code < 300
    expect_json(client.post(f"/api/v1/runs/{run}/checkpoints", json={"step": 1, "uri": "file:///1"}), 201)
    expect_json(client.post(f"/api/v1/runs/{run}/observations", json={"observations": FALLING}), 200)
    with database.reading() as tx:
        bodies = tx.execute(sa.select(tables.events.c.body)).scalars().all()
    assert any("run.stop_requested" in body for body in bodies)
    for body in bodies:
        assert len(body.encode()) < EVENT_BYTES
        assert json.loads(body)["data"]["run"]["labels"]["slurm_job_id"] == "4711"
