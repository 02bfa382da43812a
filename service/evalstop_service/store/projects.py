"""Projects: the tenants of an installation."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction, find_all, find_one, insert_if_new
from evalstop_service.store.tables import projects
from evalstop_service.store.tables.projects import Project as Project


def add_project(tx: Transaction, project: Project) -> bool:
    """Store a new project; False if its name is taken."""
    return insert_if_new(tx, projects, vars(project), ["name"])


def update_project(tx: Transaction, project: Project) -> None:
    """Store a project's changed settings."""
    fixed = ("id", "name", "created_at", "seed")
    settings = {name: value for name, value in vars(project).items() if name not in fixed}
    tx.execute(projects.update().where(projects.c.id == project.id).values(settings))


def lock_project(tx: Transaction, project_id: UUID) -> Project:
    """The project with this id, which must exist, locked until the transaction ends.

    A run is always locked before its project, never after: two stops of a project then wait only for each other. The
    lock mode permits concurrent inserts of rows that refer to the project: with a stronger one, two transactions that
    each added an event and then made a decision would deadlock.
    """
    query = sa.select(projects).where(projects.c.id == project_id).with_for_update(key_share=True)
    return Project(**tx.execute(query).mappings().one())


def find_project(tx: Transaction, project_id: UUID) -> Project | None:
    """The project with this id."""
    return find_one(tx, Project, sa.select(projects).where(projects.c.id == project_id))


def get_project(tx: Transaction, project_id: UUID) -> Project:
    """The project with this id, which must exist."""
    return Project(**tx.execute(_GET, {"of_id": project_id}).mappings().one())


def find_project_by_name(tx: Transaction, name: str) -> Project | None:
    """The project with this name."""
    return find_one(tx, Project, sa.select(projects).where(projects.c.name == name))


def list_projects(tx: Transaction) -> list[Project]:
    """All projects, by name."""
    return find_all(tx, Project, sa.select(projects).order_by(projects.c.name))


def list_ended_pauses(tx: Transaction, now: datetime) -> list[UUID]:
    """The paused projects whose pause is over."""
    return list(tx.execute(sa.select(projects.c.id).where(projects.c.paused_until <= now)).scalars())


_GET = sa.select(projects).where(projects.c.id == sa.bindparam("of_id"))
