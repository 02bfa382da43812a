"""Outlines of series: a few stretches of each, to be drawn small, for many runs at once."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import LIVE, observations

OUTLINED = 1_000
"""Up to so many observations a series is read as a whole for its outline."""


@dataclass(frozen=True)
class Segment:
    """Some neighbouring values of a series: where they end, the lowest and the highest of them."""

    step: int
    lowest: float
    highest: float


def load_segments(tx: Transaction, metrics: Mapping[UUID, str], stretches: int) -> dict[UUID, list[Segment]]:
    """One metric a run: the finite live values in so many stretches of equal count, by ascending step.

    Of a series longer than `OUTLINED` as many single values, evenly over its steps: it is not read as a whole.
    """
    long = _longer(tx, metrics)
    found: dict[UUID, list[Segment]] = defaultdict(list)
    for run_id in long:
        found[run_id] = _sampled(tx, run_id, metrics[run_id], stretches)
    short = {run_id: metric for run_id, metric in metrics.items() if run_id not in long}
    if not short:
        return found
    series = _series(short)
    bucket = sa.func.ntile(stretches).over(partition_by=observations.c.run_id, order_by=observations.c.step)
    rows = (
        sa.select(observations.c.run_id, observations.c.step, observations.c.value, bucket.label("bucket"))
        .join(series, (observations.c.run_id == series.c.run_id) & (observations.c.metric == series.c.metric))
        .where(
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
    for run_id, *stretch in tx.execute(query):
        found[run_id].append(Segment(*stretch))
    return found


def _longer(tx: Transaction, metrics: Mapping[UUID, str]) -> set[UUID]:
    """The runs whose metric has more than `OUTLINED` live observations."""
    if not metrics:
        return set()
    series = _series(metrics)
    past = (
        sa.select(observations.c.step)
        .where(
            observations.c.run_id == series.c.run_id,
            observations.c.metric == series.c.metric,
            observations.c.superseded_by == LIVE,
        )
        .order_by(observations.c.step)
        .limit(1)
        .offset(OUTLINED)
        .scalar_subquery()
    )
    return set(tx.execute(sa.select(series.c.run_id).where(past.is_not(None))).scalars())


def _series(metrics: Mapping[UUID, str]) -> sa.CTE:
    """One row for each of these series: joined, each is looked up where it lies, whatever a planner thinks of many."""
    columns = sa.column("run_id", sa.Uuid), sa.column("metric", sa.Text)
    return sa.values(*columns, name="given").data(list(metrics.items())).cte("series")


def _sampled(tx: Transaction, run_id: UUID, metric: str, places: int) -> list[Segment]:
    """The first value at or past each of so many steps, evenly from the first to the last."""
    of_series = (
        observations.c.run_id == run_id,
        observations.c.metric == metric,
        observations.c.superseded_by == LIVE,
    )
    first, last = tx.execute(
        sa.select(sa.func.min(observations.c.step), sa.func.max(observations.c.step)).where(*of_series)
    ).one()
    steps = [first + (last - first) * place // (places - 1) for place in range(places)]
    probes = [
        sa.select(observations.c.step, observations.c.value)
        .where(*of_series, observations.c.step >= step)
        .order_by(observations.c.step)
        .limit(1)
        .subquery()
        for step in steps
    ]
    rows = tx.execute(sa.union_all(*(sa.select(probe.c.step, probe.c.value) for probe in probes)))
    return [Segment(step, value, value) for step, value in sorted(set(map(tuple, rows))) if math.isfinite(value)]
