"""Numbers about the whole installation, cheap enough to be asked for at every scrape."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import deliveries, endpoints, projects, runs


@dataclass(frozen=True)
class Figures:
    """Where an installation stands.

    `running_runs`: those that have not ended. Waiting deliveries: `due`, `later` (between two attempts, in the hands of
    a worker, or in a grace period), `held` (their endpoint is disabled or gone). `oldest_due_seconds`: for how long the
    longest due has been due; `oldest_waiting_seconds`: how long ago the oldest that is not held was made; 0 for none.
    """

    running_runs: int
    due: int
    later: int
    held: int
    oldest_due_seconds: float
    oldest_waiting_seconds: float


def read(tx: Transaction, now: datetime) -> Figures:
    """The figures of this moment; reads what waits and what runs, not what has been."""
    # A project at a time, so that the index of what is not pruned leads straight to the runs that have not ended.
    unended = runs.c.ended_at.is_(None) & runs.c.pruned_at.is_(None)
    running = sa.select(sa.func.count()).where(runs.c.project_id == projects.c.id, unended)
    running_runs = sum(tx.execute(sa.select(running.scalar_subquery()).select_from(projects)).scalars())
    waiting = deliveries.c.state == sa.literal_column("'waiting'")  # spelled out, so that the partial index answers
    served = sa.and_(endpoints.c.enabled, endpoints.c.deleted_at.is_(None))
    kind = sa.case((~served, "held"), (deliveries.c.due_at <= now, "due"), else_="later")
    query = (
        sa.select(kind, sa.func.count(), sa.func.min(deliveries.c.due_at), sa.func.min(deliveries.c.created_at))
        .join(endpoints, endpoints.c.id == deliveries.c.endpoint_id)
        .where(waiting)
        .group_by(kind)
    )
    found = {row[0]: row for row in tx.execute(query)}
    counts = {name: found[name][1] if name in found else 0 for name in ("due", "later", "held")}
    made = [found[name][3] for name in ("due", "later") if name in found]
    return Figures(
        running_runs=running_runs,
        **counts,
        oldest_due_seconds=_age(found["due"][2] if "due" in found else None, now),
        oldest_waiting_seconds=_age(min(made, default=None), now),
    )


def _age(moment: datetime | None, now: datetime) -> float:
    return max((now - moment).total_seconds(), 0.0) if moment is not None else 0.0
