"""Counts: how much of its quotas a project uses, and the state of the installation, for every scrape."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Annotated, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import AWAITING_CONFIRMATION, DecisionState, GuardKind
from evalstop_service.domain.fields import doc
from evalstop_service.domain.health import Liveness
from evalstop_service.domain.times import begin_day
from evalstop_service.errors import QuotaReached
from evalstop_service.store.database import Transaction
from evalstop_service.store.keys import is_in_use
from evalstop_service.store.projects import Project
from evalstop_service.store.tables import (
    decisions,
    deliveries,
    endpoints,
    experiments,
    keys,
    policies,
    projects,
    run_health,
    runs,
)


class QuotaUse(NamedTuple):
    """How many there are of one thing in a project, and the limit."""

    quota: str
    used: int
    most: int


def require_room(tx: Transaction, project: Project, quota: str, now: datetime, *, added: int = 0) -> None:
    """Raise QuotaReached when a project is at its limit; `added`: rows that this transaction already added."""
    limit: int = getattr(project.quotas, quota)
    table, condition = _list_counted(now)[quota]
    # Counted no further than the quota: far below it all rows are read, otherwise never more than the limit.
    counted = sa.select(sa.literal(1)).where(table.c.project_id == project.id, condition).limit(limit + added)
    if tx.execute(sa.select(sa.func.count()).select_from(counted.subquery())).scalar_one() >= limit + added:
        raise QuotaReached(quota, limit, seconds_to_wait(quota, now))


def seconds_to_wait(quota: str, now: datetime) -> float | None:
    """The seconds until a reached quota has room again; None if waiting does not help."""
    if quota == "runs_per_day":
        return (begin_day(now) + timedelta(days=1) - now).total_seconds()
    return 60.0 if quota == "open_runs" else None


def load_use(tx: Transaction, now: datetime, project: Project) -> list[QuotaUse]:
    """How much of its quotas a project uses."""
    counted = _list_counted(now)
    queries = [sa.select(sa.func.count()).where(of.c.project_id == project.id, rows) for of, rows in counted.values()]
    used = tx.execute(sa.select(*(query.scalar_subquery() for query in queries))).one()
    quotas = zip(counted, used, strict=True)
    return [QuotaUse(quota, number, getattr(project.quotas, quota)) for quota, number in quotas]


def _list_counted(now: datetime) -> dict[str, tuple[sa.Table, sa.ColumnElement[bool]]]:
    """By quota the table and the rows of it that count; metrics are counted by run, and artifacts on disk, where they
    arrive."""
    return {
        "open_runs": (runs, runs.c.ended_at.is_(None) & runs.c.pruned_at.is_(None)),
        "runs_per_day": (runs, runs.c.id >= first_id(begin_day(now))),
        "keys": (keys, is_in_use(now)),
        "endpoints": (endpoints, endpoints.c.deleted_at.is_(None)),
        "policies": (policies, sa.true()),
        "experiments": (experiments, sa.true()),
    }


def first_id(moment: datetime) -> UUID:
    """The lowest UUIDv7 of a time."""
    return UUID(int=int(moment.timestamp() * 1000) << 80 | 0x7 << 76 | 0b10 << 62)


@dataclass(frozen=True)
class InstallationCounts:
    """The state of an installation: what `/metrics` shows of it, each by the name of its field.

    Stale runs and runs without data are those found at their last check. A stop counts for each guard that holds it. A
    delivery waits and is `due`, `later` (between two attempts, leased to a worker, or in a veto window), or `held` (the
    endpoint is disabled or deleted).
    """

    running_runs: Annotated[int, doc("Runs that have not ended.")]
    stale_runs: Annotated[int, doc("Runs that have not ended and have been silent for too long.")]
    no_data_runs: Annotated[int, doc("Runs that have not ended and have a watched metric without usable data.")]
    paused_projects: Annotated[int, doc("Projects whose stops are paused.")]
    on_hold_stops: Annotated[dict[str, int], doc("Stops that are on hold, by kind of guard."), "guard"]
    awaited_stops: Annotated[dict[str, int], doc("Requested stops that no scheduler has confirmed yet."), "state"]
    open_endpoints: Annotated[int, doc("Endpoints that are paused after repeated failures.")]
    outbox_deliveries: Annotated[
        dict[str, int],
        doc("Waiting deliveries: due, later (a pause, a lease or a veto window), held (their endpoint is disabled)."),
        "waiting",
    ]
    outbox_oldest_due_seconds: Annotated[float, doc("How long the oldest due delivery has been due.")]
    outbox_oldest_waiting_seconds: Annotated[float, doc("Age of the oldest waiting delivery that is not held.")]


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
