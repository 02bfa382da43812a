"""A metric of a run as charts draw it: a long one in buckets, and the outlines of many at once, as sparklines."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction
from evalstop_service.store.observations import read_series, write_statements
from evalstop_service.store.tables import LIVE, observations
from evalstop_service.store.tables.columns import Real

FEW = 10_000
"""Up to this many observations are read individually."""


class Bucket(NamedTuple):
    """The live observations of a stretch of steps: `lowest` and `highest` of the finite ones, None when there are none;
    `gaps`: the number of others; `last`: the last value, which may be one of them."""

    first_step: int
    last_step: int
    lowest: float | None
    highest: float | None
    gaps: int
    last: float


def load_buckets(tx: Transaction, run_id: UUID, metric: str, most: int) -> list[Bucket]:
    """The live observations of a series in at most so many buckets, each of as many steps; empty ones are left out."""
    table, live = observations.c, _select_live(run_id, metric)
    first, last = (live.with_only_columns(end(table.step)).scalar_subquery() for end in (sa.func.min, sa.func.max))
    first_step, last_step = tx.execute(sa.select(first, last)).one()  # each from an end of the index
    if first_step is None:
        return []
    steps = -((first_step - last_step - 1) // most)
    value = sa.type_coerce(table.value, sa.Double)
    finite = sa.case((value.between(-sys.float_info.max, sys.float_info.max), value))
    grouped = live.with_only_columns(
        sa.func.min(table.step).label("first_step"),
        sa.func.max(table.step).label("last_step"),
        sa.func.min(finite).label("lowest"),
        sa.func.max(finite).label("highest"),
        (sa.func.count() - sa.func.count(finite)).label("gaps"),
    )
    buckets = grouped.group_by((table.step - first_step) // steps).subquery()
    query = live.with_only_columns(*buckets.c, table.value).join(buckets, buckets.c.last_step == table.step)
    return [Bucket._make(row) for row in tx.execute(query.order_by(table.step))]


def is_long_series(tx: Transaction, run_id: UUID, metric: str, most: int = FEW) -> bool:
    """Whether a series has more than `most` live observations."""
    query = _select_live(run_id, metric).with_only_columns(observations.c.step)
    return tx.execute(query.order_by(observations.c.step).offset(most).limit(1)).first() is not None


def _select_live(run_id: UUID, metric: str) -> sa.Select[tuple[()]]:
    table = observations.c
    return sa.select().where(table.run_id == run_id, table.metric == metric, table.superseded_by == LIVE)


Series = tuple[UUID, str]
"""A run and the name of one of its metrics."""

Point = tuple[int, float]
"""A step and the value there."""


def load_outlines(tx: Transaction, requested: Collection[Series], most: int) -> dict[Series, list[Point]]:
    """At most so many finite live values of each series, by ascending step: the first of each stretch of steps, and the
    last, so that a long series is not read as a whole."""
    outlines: dict[Series, list[Point]] = defaultdict(list)
    series = [(run_id, metric, 0) for run_id, metric in requested]
    for (run_id, metric, _), (step, value) in read_series(tx, _OUTLINES, series, intervals=most - 1):
        if math.isfinite(value):
            outlines[run_id, metric].append((step, value))
    return outlines


_OF_SERIES = f"""
FROM observations AS o
WHERE {{{{routed}}}}o.run_id = {{series}}.run_id AND o.metric = {{series}}.metric AND o.superseded_by = {LIVE}
"""
_OF_GIVEN, _OF_POINTS = _OF_SERIES.format(series="given"), _OF_SERIES.format(series="points")

_NEXT = "first + ((points.step - first) / stretch + 1) * stretch"

# Walks the index from a value to the first one of the next stretch that has any, or to the last.
_OUTLINES = write_statements(
    f"""
WITH RECURSIVE bounds (number, run_id, metric, first, last) AS (
    SELECT given.number, given.run_id, given.metric,
        (SELECT o.step {_OF_GIVEN} ORDER BY o.step LIMIT 1), (SELECT o.step {_OF_GIVEN} ORDER BY o.step DESC LIMIT 1)
    FROM {{given}}
), points (number, run_id, metric, first, last, stretch, step) AS (
    SELECT number, run_id, metric, first, last, (last - first - 1) / CAST(:intervals AS bigint) + 1, first
    FROM bounds WHERE first IS NOT NULL
    UNION ALL
    SELECT number, run_id, metric, first, last, stretch, (
        SELECT o.step {_OF_POINTS} AND o.step >= CASE WHEN {_NEXT} < last THEN {_NEXT} ELSE last END
        ORDER BY o.step LIMIT 1
    )
    FROM points WHERE step < last
)
SELECT number, step, (SELECT o.value {_OF_POINTS} AND o.step = points.step) AS value FROM points ORDER BY number, step
""",  # noqa: S608
    *(sa.column("step", sa.BigInteger), sa.column("value", Real)),
)
