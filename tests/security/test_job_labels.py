"""A key cannot have another key's run name a job of somebody else, and have that job stopped by a bad run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.store.database import Database

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_project
from tests.service.web.api.api_calls import expect_json, expect_problem

JOB = {"slurm_job_id": "4711", "job_id": "7"}


class Clients:
    """Clients of one service and project, by their keys."""

    def __init__(self, url: str, database: Database, opened: ExitStack) -> None:
        self.url, self.database, self.opened = url, database, opened

    def new(self, name: str, scope: str) -> httpx.Client:
        """A client with a key of its own."""
        secret = api_keys.create_named_key(self.database, "p", name, [scope], utc_now())[1]
        headers = {"Authorization": f"Bearer {secret}"}
        return self.opened.enter_context(
            httpx.Client(verify=get_ssl_context(), base_url=self.url, headers=headers, trust_env=False)
        )


@pytest.fixture
def clients(embedded_database: Database) -> Iterator[Clients]:
    create_project(embedded_database, "p", "enforce", 0.0, utc_now(), "paper")
    with start_server(embedded_database) as url, ExitStack() as opened:
        yield Clients(url, embedded_database, opened)


def start_run(trainer: httpx.Client) -> str:
    """A run that names its job and has an observation."""
    run = expect_json(trainer.post("/api/v1/runs", json={"name": "r", "labels": JOB}), 201)["id"]
    posted = {"observations": [{"metric": "eval", "step": 1, "value": 0.5}]}
    expect_json(trainer.post(f"/api/v1/runs/{run}/observations", json=posted), 200)
    return str(run)


def read_labels(trainer: httpx.Client, run: str) -> dict[str, str]:
    labels: dict[str, str] = expect_json(trainer.get(f"/api/v1/runs/{run}"), 200)["labels"]
    return labels


@pytest.mark.parametrize("label", [{"slurm_job_id": "4712"}, {"job_id": "8"}, {"kubernetes_name": "other"}])
def test_another_key_cannot_name_another_job(clients: Clients, label: dict[str, str]) -> None:
    """Once there are observations a run's labels are its key's: no resume and no tag of another key replaces them."""
    trainer, other = clients.new("trainer", "ingest"), clients.new("other", "ingest")
    run = start_run(trainer)
    body = {"name": "r", "labels": label}
    for terms in ({}, {"resume": "must"}, {"resume": "must", "job": "mine"}):
        expect_problem(other.post("/api/v1/runs", json=body | terms), 409)
    (key, value), tags = *label.items(), "/mlflow/api/2.0/mlflow/runs"
    for path, document in (
        ("set-tag", {"run_id": run, "key": key, "value": value}),
        ("log-batch", {"run_id": run, "tags": [{"key": key, "value": value}]}),
        ("delete-tag", {"run_id": run, "key": "job_id"}),
    ):
        assert other.post(f"{tags}/{path}", json=document).status_code in range(400, 500)
    assert read_labels(trainer, run) == JOB
    expect_json(other.post("/api/v1/runs", json={"name": "r", "resume": "must", "labels": {"note": "seen"}}), 200)
    assert read_labels(trainer, run) == JOB | {"note": "seen"}


def test_the_run_s_own_key_names_its_next_job(clients: Clients) -> None:
    """A trainer that resumes in another job says so, as may whoever can end jobs anyway."""
    trainer = clients.new("trainer", "ingest")
    run = start_run(trainer)
    resumed = {"name": "r", "resume": "must", "labels": {"slurm_job_id": "4712"}}
    expect_json(trainer.post("/api/v1/runs", json=resumed), 200)
    head = clients.new("head", "admin")
    expect_json(head.post("/api/v1/runs", json=resumed | {"labels": {"slurm_job_id": "4713"}}), 200)
    assert read_labels(trainer, run)["slurm_job_id"] == "4713"


def test_a_run_whose_key_is_out_of_use_is_the_next_key_s(clients: Clients) -> None:
    """When the key of a run was revoked, the key that resumes it says which job it is, and no third one."""
    trainer, head = clients.new("trainer", "ingest"), clients.new("head", "admin")
    start_run(trainer)
    keys = expect_json(head.get("/api/v1/keys"), 200)["items"]
    trainer_id = next(key["id"] for key in keys if key["name"] == "trainer")
    assert head.delete(f"/api/v1/keys/{trainer_id}").status_code == 204
    resumed = {"name": "r", "resume": "must", "labels": {"slurm_job_id": "4712"}}
    expect_json(clients.new("successor", "ingest").post("/api/v1/runs", json=resumed), 200)
    third = clients.new("third", "ingest")
    expect_problem(third.post("/api/v1/runs", json=resumed | {"labels": {"slurm_job_id": "4713"}}), 409)
