"""How much of its quotas each project uses."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.quotas import Quota, begin_day, first_id, seconds_to_wait
from evalstop_service.errors import QuotaReached
from evalstop_service.store.database import Transaction
from evalstop_service.store.keys import is_in_use
from evalstop_service.store.projects import Project
from evalstop_service.store.tables import endpoints, experiments, keys, policies, projects, runs

COUNTED = (Quota.OPEN_RUNS, Quota.RUNS_PER_DAY, Quota.KEYS, Quota.ENDPOINTS, Quota.POLICIES, Quota.EXPERIMENTS)
"""What is counted by rows; metrics are counted by run, and artifacts on disk, where they arrive."""


@dataclass(frozen=True)
class QuotaUse:
    """How many there are of one thing in a project, and the limit."""

    quota: Quota
    used: int
    most: int


def require_room(tx: Transaction, project: Project, quota: Quota, now: datetime, *, added: int = 0) -> None:
    """Raise QuotaReached when a project is at its limit; `added`: rows that this transaction already added."""
    most = project.quotas.get(quota) + added
    table, condition = _count_query(quota, now)
    # Counted no further than the quota: far below it all rows are read, otherwise never more than the limit.
    counted = sa.select(sa.literal(1)).select_from(table).where(table.c.project_id == project.id, condition).limit(most)
    if tx.execute(sa.select(sa.func.count()).select_from(counted.subquery())).scalar_one() >= most:
        raise QuotaReached(quota, most - added, seconds_to_wait(quota, now))


def load_use(tx: Transaction, now: datetime, project_id: UUID | None = None) -> dict[UUID, list[QuotaUse]]:
    """The quota use of one project, or of all."""
    counts = []
    for quota in COUNTED:
        table, condition = _count_query(quota, now)
        counts.append(sa.select(sa.func.count()).where(table.c.project_id == projects.c.id, condition))
    query = sa.select(projects.c.id, projects.c.quotas, *(count.scalar_subquery() for count in counts))
    if project_id is not None:
        query = query.where(projects.c.id == project_id)
    return {
        row[0]: [QuotaUse(quota, used, row[1].get(quota)) for quota, used in zip(COUNTED, row[2:], strict=True)]
        for row in tx.execute(query)
    }


def find_highest_use(tx: Transaction, now: datetime) -> dict[Quota, float]:
    """For each quota the largest share that any project uses."""
    uses = [use for used in load_use(tx, now).values() for use in used]
    return {
        quota: max((quota_use.used / quota_use.most for quota_use in uses if quota_use.quota is quota), default=0.0)
        for quota in COUNTED
    }


def _count_query(quota: Quota, now: datetime) -> tuple[sa.Table, sa.ColumnElement[bool]]:
    """The table and the rows of it that count towards a quota."""
    match quota:
        case Quota.OPEN_RUNS:
            return runs, runs.c.ended_at.is_(None) & runs.c.pruned_at.is_(None)
        case Quota.RUNS_PER_DAY:
            return runs, runs.c.id >= first_id(begin_day(now))
        case Quota.KEYS:
            return keys, is_in_use(now)
        case Quota.ENDPOINTS:
            return endpoints, endpoints.c.deleted_at.is_(None)
        case Quota.POLICIES:
            return policies, sa.true()
        case Quota.EXPERIMENTS:
            return experiments, sa.true()
    raise AssertionError(f"{quota} is not counted by project")
