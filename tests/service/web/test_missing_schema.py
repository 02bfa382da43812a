"""A database without a table that the service needs was not migrated, and the responses say so."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import sqlalchemy as sa
from evalstop_service.store.database import Database

from tests.security.served_project import ServedProject, serve_project
from tests.service.web.api.api_calls import FALLING, expect_problem, open_run


@pytest.fixture
def project(database: Database) -> Iterator[ServedProject]:
    with serve_project(database) as project:
        yield project


@pytest.fixture
def client(project: ServedProject) -> httpx.Client:
    return project.open_client()


@pytest.fixture
def run_path(client: httpx.Client) -> str:
    return f"/runs/{open_run(client)['id']}"


@pytest.fixture
def visitor(project: ServedProject) -> httpx.Client:
    """A client that has signed in with a key."""
    visitor = project.open_client(path="")
    token = visitor.get("/login").text.split('name="csrf" value="')[1].split('"')[0]
    visitor.post("/login", data={"key": project.create_key(), "csrf": token})
    return visitor


@pytest.fixture
def without_runs(database: Database, run_path: str, visitor: httpx.Client) -> Iterator[None]:
    """The table of runs is missing, once there is a run and a visitor."""
    rename(database, "runs", "gone")
    yield
    rename(database, "gone", "runs")


def rename(database: Database, name: str, new_name: str) -> None:
    with database.transaction() as tx:
        tx.execute(sa.text(f"ALTER TABLE {name} RENAME TO {new_name}"))


@pytest.mark.usefixtures("without_runs")
def test_requests_name_the_missing_migration(client: httpx.Client, run_path: str) -> None:
    """Reading, posting and MLflow's API name the command, on both databases."""
    for response in (client.get(run_path), client.post(f"{run_path}/observations", json={"observations": FALLING})):
        problem = expect_problem(response, 503)
        assert (problem["code"], "evalstop migrate" in problem["detail"]) == ("schema_too_old", True)
    response = client.get(
        str(client.base_url.copy_with(path="/mlflow/api/2.0/mlflow/runs/get")), params={"run_id": run_path[6:]}
    )
    assert response.status_code == 503
    assert "evalstop migrate" in response.json()["message"]


@pytest.mark.usefixtures("without_runs")
def test_pages_name_the_missing_migration(visitor: httpx.Client, run_path: str) -> None:
    """A page names the command, on both databases."""
    answer = visitor.get(run_path)
    assert answer.status_code == 503
    assert "evalstop migrate" in answer.text
