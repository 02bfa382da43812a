"""Projects: the tenants of an installation."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.rules.case_requirements import CaseRequirements
from evalstop_service.rules.decision_lifecycle import Mode
from evalstop_service.rules.quotas import Quotas
from evalstop_service.store.database import Transaction, find_one, insert_if_new
from evalstop_service.store.tables import projects


@dataclass(frozen=True)
class Project:
    """A tenant, and the defaults of its runs.

    `retention_days`: how long after its end a run keeps its details; None: for ever. `paused_at`: since then nothing is
    stopped. `stops_per_hour`, `stops_share`: the most stops in an hour, and the largest share of the running runs;
    None: no limit. `confirm_seconds`: how long a requested stop may wait for its confirmation. `stale_seconds`: a run
    that reported within this time is never stale. `seed`: of all random choices in the project. `held_out_share`: the
    share of stops held out to learn whether they are right. `role_patterns`: which metrics play which role, the first
    that matches a name; see `evalstop_detectors.roles.recognition`. `second_person`: ending jobs takes two people.
    `max_mode`: nothing is stopped unless it is `enforce`. `allowed_policies`: those that trainers may choose, as `NAME`
    or `NAME@VERSION`; None: any. `case_seconds`, `case_evals`, `case_gpu_hours`, `cases_per_key_and_day`: the
    requirements for a case to count towards a rollout stage.
    """

    id: UUID
    name: str
    default_policy: str
    default_mode: Mode
    veto_window_seconds: float
    created_at: datetime
    retention_days: int | None = None
    paused_at: datetime | None = None
    paused_by: str | None = None
    paused_reason: str | None = None
    stops_per_hour: int | None = 30
    stops_share: float | None = 0.5
    confirm_seconds: float = 900.0
    stale_seconds: float = 300.0
    seed: str = ""
    held_out_share: float = 0.0
    second_person: bool = False
    case_seconds: float = 600.0
    case_evals: int = 8
    case_gpu_hours: float = 0.1
    cases_per_key_and_day: int = 20
    price_per_gpu_hour: float | None = None
    currency: str = "USD"
    role_patterns: list[dict[str, str]] = field(default_factory=list)
    max_mode: Mode = Mode.SHADOW
    allowed_policies: list[str] | None = None
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
    return [Project(**row) for row in tx.execute(sa.select(projects).order_by(projects.c.name)).mappings()]


_GET = sa.select(projects).where(projects.c.id == sa.bindparam("of_id"))
