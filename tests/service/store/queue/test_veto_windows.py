"""Veto windows that are extended: those that would end sooner, with their deliveries and the caches of their runs."""

from __future__ import annotations

from datetime import timedelta

from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.queue import veto_windows

from tests.service.project_fixture import DECLINING_EVALS, NOW, set_up_project


def test_extension_shortens_no_window(database: Database) -> None:
    """A window that ends sooner is open for another minute; one that ends later stays as it is."""
    project = set_up_project(database, veto_window_seconds=3600.0)
    project.add_endpoint()
    sooner, later = project.open_run(), project.open_run()
    for run, minutes in ((sooner, 0), (later, 30)):
        project.post_observations(run, DECLINING_EVALS, NOW + timedelta(minutes=minutes))
    versions = [project.load_run(run).version for run in (sooner, later)]
    with database.transaction() as tx:
        assert veto_windows.extend_windows(tx, NOW + timedelta(minutes=59, seconds=30), "an overload") == 1
    ends = [NOW + timedelta(minutes=60, seconds=30), NOW + timedelta(minutes=90)]
    for run, version, changes, ends_at in zip((sooner, later), versions, (2, 1), ends, strict=True):
        assert project.load_decision_states(run) == ["pending"] * changes
        assert project.load_decision(run).due_at == ends_at
        assert ends_at in [row["due_at"] for row in project.load_rows(tables.deliveries, run)]
        assert project.load_run(run).version == version + changes - 1, "other processes reload its decision"
