"""The benchmark of pages."""

from __future__ import annotations

import pytest
from evalstop_lab.benchmarks.pages import RUNNING, copy_runs
from evalstop_lab.benchmarks.processes import libpq_url
from evalstop_service.store.database import Database

from tests.conftest import ClonePostgres
from tests.service.project_fixture import set_up_project


@pytest.mark.nightly
def test_runs_are_copied_with_their_decisions(clone_postgres: ClonePostgres) -> None:
    """Ended runs are copied with all columns of their decisions, and running runs up to a fleet."""
    url = clone_postgres()
    database = Database(url)
    project = set_up_project(database)
    run, _ = project.open_declining_run("ended")
    project.finish_run(run)
    project.open_run("running")
    database.close()
    runs, decisions = copy_runs(libpq_url(url), 4, 3)
    assert (runs, decisions) == (3 + RUNNING, 3)
