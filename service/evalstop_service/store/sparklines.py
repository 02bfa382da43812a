"""Sparklines: the outlines of many series at once, in a few segments each."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import LIVE, observations

OUTLINED = 1_000
"""Up to this many observations, all of a series are read for its outline."""

Series = tuple[UUID, str]
"""A run and the name of one of its metrics."""


class Segment(NamedTuple):
    """Adjacent values of a series: the step where they end, the lowest and the highest of them."""

    step: int
    lowest: float
    highest: float


def load_segments(tx: Transaction, requested: Collection[Series], stretches: int) -> dict[Series, list[Segment]]:
    """The finite live values of each series in at most `stretches` segments of equal length, by ascending step.

    A series longer than `OUTLINED` is not read as a whole: that many single values are taken, evenly over its steps.
    """
    all_bounds = _load_bounds(tx, requested)
    short, long = ([bounds for bounds in all_bounds if bounds.long is is_long] for is_long in (False, True))
    segments: dict[Series, list[Segment]] = defaultdict(list)
    for bounds, rows in ((short, _outline_series(tx, short, stretches)), (long, _sample_series(tx, long, stretches))):
        for number, *stretch in rows:
            segments[bounds[number][:2]].append(Segment(*stretch))
    return segments


class _Bounds(NamedTuple):
    """A series with live observations: its first and last step, and whether it has more than `OUTLINED`."""

    run_id: UUID
    metric: str
    first: int
    last: int
    long: bool


def _load_bounds(tx: Transaction, requested: Collection[Series]) -> list[_Bounds]:
    if not requested:
        return []
    columns = sa.column("run_id", sa.Uuid), sa.column("metric", sa.Text)
    series = sa.values(*columns).data(list(requested)).cte("series")
    steps = sa.select(observations.c.step).where(*_is_of(series)).order_by(observations.c.step)
    first, last = (
        sa.select(end(observations.c.step)).where(*_is_of(series)).scalar_subquery()
        for end in (sa.func.min, sa.func.max)
    )
    past = steps.limit(1).offset(OUTLINED).scalar_subquery()
    query = sa.select(series.c.run_id, series.c.metric, first, last, past.is_not(None))
    return [_Bounds(*row) for row in tx.execute(query) if row[2] is not None]


def _outline_series(tx: Transaction, series_bounds: Sequence[_Bounds], stretches: int) -> Sequence[Any]:
    """The number of a series, and for each of its segments the last step, the lowest and the highest finite value."""
    if not series_bounds:
        return []
    bounds = _bounds_cte(series_bounds)
    stretch = (observations.c.step - bounds.c.first) * stretches // (bounds.c.last - bounds.c.first + 1)
    values = (func(observations.c.value) for func in (sa.func.min, sa.func.max))
    query = (
        sa.select(bounds.c.number, sa.func.max(observations.c.step).label("step"), *values)
        .join_from(bounds, observations, sa.and_(*_is_of(bounds)))
        .where(observations.c.value.between(-sys.float_info.max, sys.float_info.max))
        .group_by(bounds.c.number, stretch)
        .order_by(bounds.c.number, "step")
    )
    return tx.execute(query).all()


def _sample_series(
    tx: Transaction, series_bounds: Sequence[_Bounds], samples: int
) -> list[tuple[int, int, float, float]]:
    """The number of a series, and its first value at or after each of `samples` steps, evenly from first to last."""
    if not series_bounds:
        return []
    bounds = _bounds_cte(series_bounds)
    numbers = sa.values(sa.column("place", sa.BigInteger)).data([(sample,) for sample in range(samples)]).cte("places")
    step = bounds.c.first + (bounds.c.last - bounds.c.first) * numbers.c.place // (samples - 1)
    probes = [
        sa.select(column).where(*_is_of(bounds), observations.c.step >= step).order_by(observations.c.step).limit(1)
        for column in (observations.c.step, observations.c.value)
    ]
    query = sa.select(bounds.c.number, *(probe.scalar_subquery() for probe in probes))
    rows = set(map(tuple, tx.execute(query.join_from(bounds, numbers, sa.true()))))
    return [(number, step, value, value) for number, step, value in sorted(rows) if math.isfinite(value)]


def _bounds_cte(series_bounds: Sequence[_Bounds]) -> sa.CTE:
    """One row for each of these series: in a join each is looked up by index, whatever the planner's estimates.

    They are numbered, because reading a number thousands of times is faster than reading an id.
    """
    columns = [sa.column("run_id", sa.Uuid), sa.column("metric", sa.Text)]
    columns += [sa.column(name, sa.BigInteger) for name in ("first", "last", "number")]
    return (
        sa.values(*columns).data([(*bounds[:4], number) for number, bounds in enumerate(series_bounds)]).cte("bounds")
    )


def _is_of(series: sa.CTE) -> tuple[sa.ColumnElement[bool], ...]:
    """Whether an observation is a live one of this series."""
    return (
        observations.c.run_id == series.c.run_id,
        observations.c.metric == series.c.metric,
        observations.c.superseded_by == LIVE,
    )
