"""The audit log for auditors: chained in the background, and verified."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from evalstop_service.background import PeriodicJob, handle_each
from evalstop_service.errors import NotFound
from evalstop_service.store import audit, projects
from evalstop_service.store.audit import INSTALLATION, ChainReport
from evalstop_service.store.database import Database

EVERY_SECONDS = 2.0

INSTALLATION_NAME = "(installation)"
"""Name of the installation's own log, which belongs to no project."""


def create_job(database: Database) -> PeriodicJob:
    """The periodic job that chains new entries."""
    return PeriodicJob("audit chain", lambda _: chain_waiting(database), EVERY_SECONDS)


def chain_waiting(database: Database) -> None:
    """Chain all waiting entries; any number of processes may do so concurrently."""
    with database.reading() as tx:
        waiting = audit.list_waiting_projects(tx)
    handle_each(waiting, lambda project_id: _chain_project(database, project_id))


def _chain_project(database: Database, project_id: UUID) -> None:
    chained = audit.ENTRIES_AT_A_TIME
    while chained == audit.ENTRIES_AT_A_TIME:
        with database.transaction() as tx:
            chained = audit.chain_entries(tx, project_id)


def find_trails(database: Database, project_name: str | None = None) -> dict[str, UUID]:
    """The log of a project, or those of all projects and the installation, by name; raises NotFound."""
    with database.reading() as tx:
        project_ids = {project.name: project.id for project in projects.list_projects(tx)}
        project_ids[INSTALLATION_NAME] = INSTALLATION
    if project_name is None:
        return project_ids
    if project_name not in project_ids:
        raise NotFound(f"there is no project {project_name!r}; there are {', '.join(sorted(project_ids))}")
    return {project_name: project_ids[project_name]}


def verify_trail(database: Database, project_id: UUID, contains: str | None = None) -> ChainReport:
    """Chain waiting entries, then verify every entry of a log; `contains`: a hash that must be in it."""
    chain_waiting(database)
    with database.reading(snapshot=True) as tx:
        report = audit.verify_chain(tx, project_id, contains)
    if not report.entries and report.fault is None and project_id != INSTALLATION:
        return replace(report, fault="there is no entry, but creating a project writes one")
    return report
