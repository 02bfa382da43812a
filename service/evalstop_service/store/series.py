"""A metric of a run as charts draw it: a long one in buckets, and the outlines of many at once, as sparklines."""

from __future__ import annotations

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


def is_long_series(tx: Transaction, run_id: UUID, metric: str) -> bool:
    """Whether a series has too many live observations to be read individually."""
    query = _select_live(run_id, metric).with_only_columns(observations.c.step)
    return tx.execute(query.order_by(observations.c.step).offset(FEW).limit(1)).first() is not None


def _select_live(run_id: UUID, metric: str) -> sa.Select[tuple[()]]:
    table = observations.c
    return sa.select().where(table.run_id == run_id, table.metric == metric, table.superseded_by == LIVE)


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
    segments: dict[Series, list[Segment]] = defaultdict(list)
    series = [(run_id, metric, 0) for run_id, metric in requested]
    for (run_id, metric, _), segment in read_series(tx, _SEGMENTS, series, stretches=stretches):
        segments[run_id, metric].append(Segment(*segment))
    return segments


def load_last_values(tx: Transaction, requested: Collection[Series]) -> dict[Series, tuple[int, float]]:
    """The last live step and value of each series that has any."""
    rows = read_series(tx, _LAST_VALUES, [(run_id, metric, 0) for run_id, metric in requested])
    return {(run_id, metric): (step, value) for (run_id, metric, _), (step, value) in rows if step is not None}


_POINTS = f"""observations AS o
WHERE {{{{routed}}}}o.run_id = {{series}}.run_id AND o.metric = {{series}}.metric AND o.superseded_by = {LIVE}
"""
_OF_SERIES = f"FROM {_POINTS}"
_FIRST_OF_GIVEN = f"(SELECT o.step {_OF_SERIES.format(series='given')} ORDER BY o.step LIMIT 1"
_OF_BOUNDS = _OF_SERIES.format(series="bounds")
_AFTER_PLACE = f"""
{_OF_BOUNDS} AND o.step >= bounds.first + (bounds.last - bounds.first) * places.place / (CAST(:stretches AS bigint) - 1)
ORDER BY o.step LIMIT 1
"""
_IS_FINITE = f"BETWEEN {-sys.float_info.max!r} AND {sys.float_info.max!r}"

# Short series are grouped by stretch. Of long ones the first value at or after each of many steps is looked up.
_SEGMENTS_OF = f"""
WITH RECURSIVE bounds (number, run_id, metric, first, last, is_long) AS (
    SELECT given.number, given.run_id, given.metric, {_FIRST_OF_GIVEN}),
        (SELECT o.step {_OF_SERIES.format(series="given")} ORDER BY o.step DESC LIMIT 1),
        {_FIRST_OF_GIVEN} OFFSET {OUTLINED}) IS NOT NULL
    FROM {{given}}
), places (place) AS (
    SELECT 0 UNION ALL SELECT place + 1 FROM places WHERE place + 1 < CAST(:stretches AS bigint)
)
SELECT bounds.number, max(o.step) AS step, min(o.value), max(o.value)
FROM bounds CROSS JOIN %s NOT bounds.is_long AND o.value {_IS_FINITE}
GROUP BY bounds.number, (o.step - bounds.first) * CAST(:stretches AS bigint) / (bounds.last - bounds.first + 1)
UNION ALL
SELECT number, step, value, value FROM (
    SELECT DISTINCT bounds.number, (SELECT o.step {_AFTER_PLACE}) AS step, (SELECT o.value {_AFTER_PLACE}) AS value
    FROM bounds CROSS JOIN places WHERE bounds.is_long
) AS samples
WHERE value {_IS_FINITE}
ORDER BY 1, 2
"""  # noqa: S608

# On PostgreSQL LATERAL with OFFSET: it expects too many observations of each metric, and may read all for a join.
_SEGMENTS = write_statements(
    _SEGMENTS_OF % f"LATERAL (SELECT o.step, o.value {_OF_BOUNDS} OFFSET 0) AS o WHERE",
    *(sa.column("step", sa.BigInteger), sa.column("lowest", sa.Double), sa.column("highest", sa.Double)),
    on_sqlite=_SEGMENTS_OF % f"{_POINTS.format(series='bounds')} AND",
)

_LAST = f"{_OF_SERIES.format(series='given')} ORDER BY o.step DESC LIMIT 1)"
_LAST_VALUES = write_statements(
    f"SELECT number, (SELECT o.step {_LAST} AS step, (SELECT o.value {_LAST} AS value FROM {{given}}",  # noqa: S608
    *(sa.column("step", sa.BigInteger), sa.column("value", Real)),
)
