"""Observations: what trainers measured, each identity once."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import observations

LIVE = 0
"""`superseded_by` of an observation that counts."""

_CHUNK = 500  # SQLite takes some thousands of variables in a statement; a plan for each length is not worth having


@dataclass(frozen=True)
class Point:
    """One value of one metric at one step, in the trainer's own unit and direction; it may be NaN or infinite."""

    metric: str
    step: int
    value: float
    stderr: float | None = None
    observed_at: datetime | None = None

    @property
    def identity(self) -> tuple[str, int]:
        return self.metric, self.step


@dataclass(frozen=True)
class StoredPoint(Point):
    """A point and what became of it."""

    attempt: int = 1
    superseded_by: int = LIVE
    received_at: datetime | None = None


@dataclass(frozen=True)
class Latest:
    """A metric's last live observation, and how many there are."""

    metric: str
    count: int
    step: int
    value: float
    stderr: float | None


@dataclass(frozen=True)
class Stretch:
    """Some neighbouring values of a series: where they end, the lowest and the highest of them."""

    step: int
    lowest: float
    highest: float


def add(tx: Transaction, run_id: UUID, attempt: int, points: Iterable[Point], now: datetime) -> None:
    """Store points whose identities have no live observation."""
    rows = [
        {
            "run_id": run_id,
            "metric": point.metric,
            "step": point.step,
            "superseded_by": LIVE,
            "value": point.value,
            "stderr": point.stderr,
            "attempt": attempt,
            "observed_at": point.observed_at,
            "received_at": now,
        }
        for point in points
    ]
    if rows:
        tx.execute(observations.insert(), rows)


def live_values(tx: Transaction, run_id: UUID, identities: Collection[tuple[str, int]]) -> dict[tuple[str, int], float]:
    """The stored value of each of these identities that has a live observation."""
    by_metric: dict[str, list[int]] = defaultdict(list)
    for metric, step in identities:
        by_metric[metric].append(step)
    found: dict[tuple[str, int], float] = {}
    for metric, steps in by_metric.items():
        for start in range(0, len(steps), _CHUNK):
            query = sa.select(observations.c.step, observations.c.value).where(
                observations.c.run_id == run_id,
                observations.c.metric == metric,
                observations.c.step.in_(steps[start : start + _CHUNK]),
                observations.c.superseded_by == LIVE,
            )
            found.update({(metric, step): value for step, value in tx.execute(query)})
    return found


def series(tx: Transaction, run_id: UUID, metrics: Collection[str]) -> list[Point]:
    """The live observations of these metrics by ascending step."""
    query = (
        sa.select(*_POINT)
        .where(
            observations.c.run_id == run_id,
            observations.c.metric.in_(sorted(metrics)),
            observations.c.superseded_by == LIVE,
        )
        .order_by(observations.c.step)
    )
    return [Point(*row) for row in tx.execute(query)]


def latest(tx: Transaction, run_id: UUID) -> list[Latest]:
    """Each metric of a run, by name."""
    live = (observations.c.run_id == run_id) & (observations.c.superseded_by == LIVE)
    ends = sa.select(
        observations.c.metric, sa.func.count().label("count"), sa.func.max(observations.c.step).label("step")
    )
    last = ends.where(live).group_by(observations.c.metric).subquery()
    query = sa.select(last.c.metric, last.c.count, last.c.step, observations.c.value, observations.c.stderr)
    query = query.join(
        observations, (observations.c.metric == last.c.metric) & (observations.c.step == last.c.step) & live
    )
    return [Latest(*row) for row in tx.execute(query.order_by(last.c.metric))]


def outlines(tx: Transaction, metrics: Mapping[UUID, str], stretches: int) -> dict[UUID, list[Stretch]]:
    """One metric a run: the finite live values in so many stretches of equal count, by ascending step."""
    bucket = sa.func.ntile(stretches).over(partition_by=observations.c.run_id, order_by=observations.c.step)
    rows = (
        sa.select(observations.c.run_id, observations.c.step, observations.c.value, bucket.label("bucket"))
        .where(
            sa.tuple_(observations.c.run_id, observations.c.metric).in_(list(metrics.items())),
            observations.c.superseded_by == LIVE,
            observations.c.value.between(-sys.float_info.max, sys.float_info.max),
        )
        .subquery()
    )
    query = (
        sa.select(rows.c.run_id, sa.func.max(rows.c.step), sa.func.min(rows.c.value), sa.func.max(rows.c.value))
        .group_by(rows.c.run_id, rows.c.bucket)
        .order_by(rows.c.run_id, rows.c.bucket)
    )
    found: dict[UUID, list[Stretch]] = defaultdict(list)
    for run_id, *stretch in tx.execute(query):
        found[run_id].append(Stretch(*stretch))
    return found


def last_step(tx: Transaction, run_id: UUID) -> int | None:
    """The highest step with a live observation."""
    query = sa.select(sa.func.max(observations.c.step))
    query = query.where(observations.c.run_id == run_id, observations.c.superseded_by == LIVE)
    return tx.execute(query).scalar()


def any_since(tx: Transaction, run_id: UUID, attempt: int) -> bool:
    """Whether this attempt has observed anything."""
    query = sa.exists().where(observations.c.run_id == run_id, observations.c.attempt == attempt)
    return tx.execute(sa.select(query)).scalar_one()


def supersede(tx: Transaction, run_id: UUID, after_step: int, by_attempt: int) -> int:
    """Put the live observations past a step out of force; gives their number."""
    query = observations.update().where(
        observations.c.run_id == run_id,
        observations.c.step > after_step,
        observations.c.superseded_by == LIVE,
    )
    return tx.execute(query.values(superseded_by=by_attempt)).rowcount


def page(
    tx: Transaction, run_id: UUID, *, metric: str, after: tuple[int, int] | None = None, limit: int = 1000
) -> Sequence[StoredPoint]:
    """One metric's observations, superseded ones too, by (step, superseded_by), past the key `after`."""
    key = sa.tuple_(observations.c.step, observations.c.superseded_by)
    query = sa.select(*_POINT, observations.c.attempt, observations.c.superseded_by, observations.c.received_at).where(
        observations.c.run_id == run_id, observations.c.metric == metric
    )
    if after is not None:
        query = query.where(key > sa.tuple_(*map(sa.literal, after)))
    query = query.order_by(observations.c.step, observations.c.superseded_by).limit(limit)
    return [StoredPoint(*row) for row in tx.execute(query)]


_POINT = (
    observations.c.metric,
    observations.c.step,
    observations.c.value,
    observations.c.stderr,
    observations.c.observed_at,
)
