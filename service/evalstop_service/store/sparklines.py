"""Sparklines: the outlines of many series at once, in a few segments each."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import LIVE

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
    if not requested:
        return segments
    series = list(requested)
    parameters: dict[str, Any] = {"stretches": stretches}
    if tx.dialect.name == "postgresql":
        parameters |= {"run_ids": [run_id for run_id, _ in series], "metrics": [metric for _, metric in series]}
    else:
        parameters["series"] = msgspec.json.encode([(run_id.hex, metric) for run_id, metric in series]).decode()
    for number, *segment in tx.execute(_SEGMENTS[tx.dialect.name], parameters):
        segments[series[number - 1]].append(Segment(*segment))
    return segments


_OF_SERIES = f"""
FROM observations AS o
WHERE o.run_id = {{series}}.run_id AND o.metric = {{series}}.metric AND o.superseded_by = {LIVE}
"""
_FIRST_OF_GIVEN = f"(SELECT o.step {_OF_SERIES.format(series='given')} ORDER BY o.step LIMIT 1"
_OF_BOUNDS = _OF_SERIES.format(series="bounds")
_AFTER_PLACE = f"""
{_OF_BOUNDS} AND o.step >= bounds.first + (bounds.last - bounds.first) * places.place / (:stretches - 1)
ORDER BY o.step LIMIT 1
"""
_IS_FINITE = f"BETWEEN {-sys.float_info.max!r} AND {sys.float_info.max!r}"

# Short series are grouped by stretch. Of long ones the first value at or after each of many steps is looked up.
_QUERY = f"""
WITH RECURSIVE bounds (number, run_id, metric, first, last, is_long) AS (
    SELECT given.number, given.run_id, given.metric, {_FIRST_OF_GIVEN}),
        (SELECT o.step {_OF_SERIES.format(series="given")} ORDER BY o.step DESC LIMIT 1),
        {_FIRST_OF_GIVEN} OFFSET {OUTLINED}) IS NOT NULL
    FROM {{given}}
), places (place) AS (
    SELECT 0 UNION ALL SELECT place + 1 FROM places WHERE place + 1 < :stretches
)
SELECT bounds.number, max(o.step) AS step, min(o.value), max(o.value)
FROM bounds CROSS JOIN observations AS o
WHERE NOT bounds.is_long AND o.run_id = bounds.run_id AND o.metric = bounds.metric AND o.superseded_by = {LIVE}
    AND o.value {_IS_FINITE}
GROUP BY bounds.number, (o.step - bounds.first) * :stretches / (bounds.last - bounds.first + 1)
UNION ALL
SELECT number, step, value, value FROM (
    SELECT DISTINCT bounds.number, (SELECT o.step {_AFTER_PLACE}) AS step, (SELECT o.value {_AFTER_PLACE}) AS value
    FROM bounds CROSS JOIN places WHERE bounds.is_long
) AS samples
WHERE value {_IS_FINITE}
ORDER BY 1, 2
"""  # noqa: S608

_COLUMNS = [sa.column("number", sa.BigInteger), sa.column("step", sa.BigInteger)]
_COLUMNS += [sa.column("lowest", sa.Double), sa.column("highest", sa.Double)]
_STRETCHES = sa.bindparam("stretches", type_=sa.BigInteger)
_SEGMENTS = {
    "postgresql": sa.text(
        _QUERY.format(given="unnest(:run_ids, :metrics) WITH ORDINALITY AS given (run_id, metric, number)")
    )
    .bindparams(
        _STRETCHES,
        sa.bindparam("run_ids", type_=postgresql.ARRAY(sa.Uuid)),
        sa.bindparam("metrics", type_=postgresql.ARRAY(sa.Text)),
    )
    .columns(*_COLUMNS),
    "sqlite": sa.text(
        _QUERY.format(
            given="(SELECT key + 1 AS number, json_extract(value, '$[0]') AS run_id,"
            " json_extract(value, '$[1]') AS metric FROM json_each(:series)) AS given"
        )
    )
    .bindparams(_STRETCHES)
    .columns(*_COLUMNS),
}
