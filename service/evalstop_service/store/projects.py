"""Projects: the tenants of an installation."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.project_settings import CaseRequirements, ProjectSettings
from evalstop_service.domain.quotas import Quotas
from evalstop_service.store.database import Transaction, find_all, find_one, insert_if_new
from evalstop_service.store.tables import projects


@dataclass(frozen=True)
class Project(ProjectSettings):
    """A tenant, with its settings.

    `paused_at`: since then nothing is stopped, until `paused_until` (None: until somebody resumes it). `seed`: of all
    random choices in the project.
    """

    id: UUID
    name: str
    created_at: datetime
    paused_at: datetime | None = None
    paused_by: str | None = None
    paused_reason: str | None = None
    paused_until: datetime | None = None
    seed: str = ""
    quotas: Quotas = field(default_factory=Quotas)

    @property
    def case_requirements(self) -> CaseRequirements:
        """The requirements for a case to count towards a rollout stage."""
        return CaseRequirements(self.case_seconds, self.case_evals, self.case_gpu_hours, self.cases_per_key_and_day)


def add_project(tx: Transaction, project: Project) -> bool:
    """Store a new project; False if its name is taken."""
    return insert_if_new(tx, projects, vars(project), ["name"])


def update_project(tx: Transaction, project: Project) -> None:
    """Store a project's changed settings."""
    tx.execute(
        projects.update()
        .where(projects.c.id == project.id)
        .values(
            {name: value for name, value in vars(project).items() if name not in ("id", "name", "created_at", "seed")}
        )
    )


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
