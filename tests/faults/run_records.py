"""What is on record of a run, and where it would stand had nothing ever gone wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.ingest import Content, Observations
from evalstop_service.projects import api_keys
from evalstop_service.store import projects, runs, tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.service.project_fixture import ProjectFixture, lift_stop_limits, set_up_project


def installed(database: Database) -> tuple[ProjectFixture, str]:
    """A new project, which may have all its runs stopped, with a key that may do everything in it."""
    project = set_up_project(database)
    lift_stop_limits(database)
    with database.reading() as tx:
        name = projects.get_project(tx, project.id).name
    return project, api_keys.create_named_key(database, name, "all", ("ingest", "read", "operate", "admin"), utc_now())[
        1
    ]


def run_of(project: ProjectFixture, run_id: str) -> Run:
    with project.database.reading() as tx:
        found = runs.find_run(tx, project.id, UUID(run_id))
    assert found is not None
    return found


def stands(run: Run) -> dict[str, Any]:
    """Where a run stands."""
    names = ("verdict", "best_checkpoint", "raw_maximum", "last_step", "attempt", "status")
    return {name: getattr(run, name) for name in names}


def history(project: ProjectFixture, run: Run) -> dict[str, Any]:
    """How a run came there: its verdicts, decisions and events, times and ids apart."""
    changes = sorted(project.load_rows(tables.verdicts, run), key=itemgetter("sequence"))
    made = sorted(project.load_rows(tables.decisions, run), key=itemgetter("attempt"))
    return {
        "verdicts": [(row["attempt"], row["verdict"]) for row in changes],
        "decisions": [(row["attempt"], row["state"], row["step"], row["verdict"]) for row in made],
        "events": sorted(row["type"] for row in project.load_rows(tables.events, run)),
    }


def values(project: ProjectFixture, run: Run) -> list[tuple[int, str, int, float]]:
    """Every stored observation: attempt, metric, step and value; superseded ones too."""
    rows = project.load_rows(tables.observations, run)
    return sorted((row["attempt"], row["metric"], row["step"], row["value"]) for row in rows)


def undisturbed(database: Database, news: Iterable[Content], policy: str = "paper") -> tuple[ProjectFixture, Run]:
    """The run as one process takes it in that nothing ever happens to."""
    project = set_up_project(database)
    run = project.open_run(policy=policy, mode="enforce")
    for item in news:
        project.submit(run, item)
    return project, project.load_run(run)


def assert_nothing_lost(
    project: ProjectFixture, run_id: str, told: Sequence[Sequence[PostedObservation]], embedded: Database
) -> None:
    """Each acknowledged observation is stored once and no other is, and the run stands where it would undisturbed."""
    run = run_of(project, run_id)
    assert values(project, run) == sorted((1, p.metric, p.step, p.value) for points in told for p in points)
    other, expected = undisturbed(embedded, [Observations(tuple(points)) for points in told])
    assert stands(run) == stands(expected)
    assert history(project, run) == history(other, expected)


def deadlocks(database: Database) -> int:
    """How many transactions of this database PostgreSQL has broken off to end a deadlock."""
    with database.reading() as tx:
        query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        count: int = tx.execute(sa.text(query)).scalar_one()
    return count
