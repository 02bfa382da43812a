"""Whose data a spool holds: it is sent with another key only if that key is of the same project."""

from __future__ import annotations

from pathlib import Path

import pytest
from evalstop_client import Limits, Run
from evalstop_service.clock import utc_now
from evalstop_service.store import keys
from evalstop_service.store.database import Database

from tests.clients.real_service import Project, make_project
from tests.clients.runs import list_messages
from tests.fixtures.projects import create_named_key


def create_revoked_key(project: Project) -> str:
    """A key of the project that the service refuses, so that a run spools what it logs."""
    key, secret = create_named_key(project.database, project.name, "revoked", ("ingest",), utc_now())
    assert key.project_id is not None
    with project.database.transaction() as tx:
        assert keys.revoke_key(tx, key.project_id, key.id, utc_now()) is not None
    return secret


def log_run(project: Project, key: str, value: float) -> None:
    """Log one eval in a run of one name."""
    with Run("a run", url=project.url, key=key, limits=Limits(flush_seconds=60)) as run:
        run.log({"eval": value}, step=0)


def list_evals(project: Project) -> list[float]:
    """The evals of all runs of the project, oldest run first."""
    runs = sorted(project.api.runs(), key=lambda run: run.created_at)
    return [point.value for run in runs for point in run.history("eval")]


@pytest.mark.parametrize("job", ["1", "2"], ids=["same_job", "another_job"])
def test_spool_reaches_its_project_with_a_new_key(
    project: Project,
    real_service: tuple[str, Database],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    job: str,
) -> None:
    """A key of another project leaves the spool where it is; a new key of the same project sends it."""
    other = make_project(*real_service, mode="shadow")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    log_run(project, create_revoked_key(project), 0.1)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    log_run(other, other.key, 0.2)
    assert list_evals(other) == [0.2]
    assert len([line for line in list_messages(caplog) if "another project" in line]) == 1
    log_run(project, project.key, 0.3)
    assert list_evals(project) == [0.1, 0.3]


def test_spool_of_an_unknown_key_is_sent(project: Project, tmp_path: Path) -> None:
    """What was logged with a mistyped key, or without one, reaches the project of the next key."""
    log_run(project, "esk_mistyped", 0.1)
    assert list_evals(project) == []
    log_run(project, "", 0.2)
    log_run(project, project.key, 0.3)
    assert list_evals(project) == [0.1, 0.2, 0.3]
    assert not list((tmp_path / "spool").glob("*/*"))
