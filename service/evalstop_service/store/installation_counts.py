"""Counts over the whole installation, cheap enough for every scrape."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from itertools import chain

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import AWAITING_CONFIRMATION, DecisionState, GuardKind
from evalstop_service.domain.liveness import Liveness
from evalstop_service.domain.quotas import Quota
from evalstop_service.store import quota_use
from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import decisions, deliveries, endpoints, projects, run_health, runs


@dataclass(frozen=True)
class InstallationCounts:
    """The state of an installation.

    `running_runs`: those that have not ended. Of these, as of their last check, `stale_runs` are late with their posts
    and `no_data_runs` have a watched metric without data. `paused_projects`: projects in which nothing is stopped.
    `on_hold_stops`: by kind of guard; a stop counts for each guard that holds it. `awaited_stops`: those that are not
    yet confirmed, by state. `open_endpoints`: endpoints with an open circuit breaker. `outbox_deliveries`: those that
    wait: `due`, `later` (between two attempts, leased to a worker, or in a veto window), `held` (the endpoint is
    disabled or deleted); how long the oldest due one has been due, and the age of the oldest that is not held, 0 for
    none. `quota_use_ratio`: for each quota the largest share that any project uses.
    """

    running_runs: int
    stale_runs: int
    no_data_runs: int
    paused_projects: int
    on_hold_stops: dict[str, int]
    awaited_stops: dict[str, int]
    open_endpoints: int
    outbox_deliveries: dict[str, int]
    outbox_oldest_due_seconds: float
    outbox_oldest_waiting_seconds: float
    quota_use_ratio: dict[Quota, float]


def read_counts(tx: Transaction, now: datetime) -> InstallationCounts:
    """The current counts; reads waiting deliveries and running runs, no history."""
    # One project at a time, so that the index of unpruned runs leads straight to the runs that have not ended.
    unended = runs.c.ended_at.is_(None) & runs.c.pruned_at.is_(None)
    running = sa.select(sa.func.count()).where(runs.c.project_id == projects.c.id, unended)
    running_runs = sum(tx.execute(sa.select(running.scalar_subquery()).select_from(projects)).scalars())
    no_data = sa.cast(run_health.c.metric_faults, sa.Text) != "[]"
    silent = sa.select(sa.func.count().filter(run_health.c.state == Liveness.STALE), sa.func.count().filter(no_data))
    stale_runs, no_data_runs = tx.execute(silent.where(run_health.c.next_check_at.is_not(None))).one()
    paused = sa.select(sa.func.count()).select_from(projects).where(projects.c.paused_at.is_not(None))
    waiting = deliveries.c.state == sa.literal_column("'waiting'")  # inlined, so that the partial index is used
    served = sa.and_(endpoints.c.enabled, endpoints.c.deleted_at.is_(None))
    kind = sa.case((~served, "held"), (deliveries.c.due_at <= now, "due"), else_="later")
    query = (
        sa.select(kind, sa.func.count(), sa.func.min(deliveries.c.due_at), sa.func.min(deliveries.c.created_at))
        .join(endpoints, endpoints.c.id == deliveries.c.endpoint_id)
        .where(waiting)
        .group_by(kind)
    )
    rows = {row[0]: row for row in tx.execute(query)}
    guard_kinds = tx.execute(_GUARD_KINDS).scalars()
    created_at = [rows[name][3] for name in ("due", "later") if name in rows]
    return InstallationCounts(
        running_runs=running_runs,
        stale_runs=stale_runs,
        no_data_runs=no_data_runs,
        paused_projects=tx.execute(paused).scalar_one(),
        on_hold_stops={**dict.fromkeys(GuardKind, 0), **Counter(chain.from_iterable(guard_kinds))},
        awaited_stops={**dict.fromkeys(AWAITING_CONFIRMATION, 0), **dict(tx.execute(_AWAITED).all())},
        open_endpoints=tx.execute(_OPEN).scalar_one(),
        outbox_deliveries={name: rows[name][1] if name in rows else 0 for name in ("due", "later", "held")},
        outbox_oldest_due_seconds=_compute_age(rows["due"][2] if "due" in rows else None, now),
        outbox_oldest_waiting_seconds=_compute_age(min(created_at, default=None), now),
        quota_use_ratio=quota_use.find_highest_use(tx, now),
    )


_GUARD_KINDS = sa.select(decisions.c.guard_kinds).where(
    decisions.c.state == DecisionState.ON_HOLD, decisions.c.deadline_at.is_not(None)
)

_AWAITED = (
    sa.select(decisions.c.state, sa.func.count())
    .where(decisions.c.deadline_at.is_not(None), decisions.c.state.in_(AWAITING_CONFIRMATION))
    .group_by(decisions.c.state)
)

_OPEN = (
    sa.select(sa.func.count())
    .select_from(endpoints)
    .where(endpoints.c.open_until.is_not(None), endpoints.c.enabled, endpoints.c.deleted_at.is_(None))
)


def _compute_age(moment: datetime | None, now: datetime) -> float:
    return max((now - moment).total_seconds(), 0.0) if moment is not None else 0.0
