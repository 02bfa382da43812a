"""The stored records of a run, and the records it would have without any fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.ingest import Content, Observations
from evalstop_service.store import projects, runs, tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.fixtures.projects import create_named_key
from tests.service.project_fixture import ProjectFixture, lift_stop_limits, set_up_project


def create_project_and_key(database: Database) -> tuple[ProjectFixture, str]:
    """Create a project without limits on stops and an API key with all scopes."""
    project = set_up_project(database)
    lift_stop_limits(database)
    with database.reading() as tx:
        name = projects.get_project(tx, project.id).name
    scopes = ("ingest", "read", "operate", "admin")
    _, key = create_named_key(database, name, "all", scopes, utc_now())
    return project, key


def find_run(project: ProjectFixture, run_id: str) -> Run:
    with project.database.reading() as tx:
        run = runs.find_run(tx, project.id, UUID(run_id))
    assert run is not None
    return run


def summarize_run(run: Run) -> dict[str, Any]:
    """The fields of a run that depend on its observations alone."""
    names = ("verdict", "best_checkpoint", "raw_maximum", "last_step", "attempt", "status")
    return {name: getattr(run, name) for name in names}


def load_history(project: ProjectFixture, run: Run) -> dict[str, Any]:
    """The verdicts, decisions and events of a run, without times and ids."""
    changes = sorted(project.load_rows(tables.verdicts, run), key=itemgetter("sequence"))
    decisions = sorted(project.load_rows(tables.decisions, run), key=itemgetter("attempt"))
    return {
        "verdicts": [(row["attempt"], row["verdict"]) for row in changes],
        "decisions": [(row["attempt"], row["state"], row["step"], row["verdict"]) for row in decisions],
        "events": sorted(row["type"] for row in project.load_rows(tables.events, run)),
    }


def load_observations(project: ProjectFixture, run: Run) -> list[tuple[int, str, int, float]]:
    """All stored observations as (attempt, metric, step, value), superseded ones included."""
    rows = project.load_rows(tables.observations, run)
    return sorted((row["attempt"], row["metric"], row["step"], row["value"]) for row in rows)


def ingest_without_faults(
    database: Database, messages: Iterable[Content], policy: str = "paper"
) -> tuple[ProjectFixture, Run]:
    """Submit the messages in order in this process; returns the project and its run."""
    project = set_up_project(database)
    run = project.open_run(policy=policy, mode="enforce")
    for message in messages:
        project.submit(run, message)
    return project, project.load_run(run)


def assert_nothing_lost(
    project: ProjectFixture,
    run_id: str,
    acknowledged: Sequence[Sequence[PostedObservation]],
    reference_database: Database,
) -> None:
    """Check that exactly the acknowledged observations are stored, and that the run is as without faults."""
    run = find_run(project, run_id)
    assert load_observations(project, run) == sorted(
        (1, p.metric, p.step, p.value) for points in acknowledged for p in points
    )
    other, expected = ingest_without_faults(
        reference_database, [Observations(tuple(points)) for points in acknowledged]
    )
    assert summarize_run(run) == summarize_run(expected)
    assert load_history(project, run) == load_history(other, expected)


def count_deadlocks(database: Database) -> int:
    """Count the transactions of this database that PostgreSQL cancelled because of a deadlock."""
    with database.reading() as tx:
        query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        count: int = tx.execute(sa.text(query)).scalar_one()
    return count
