"""One metric of a run at a chosen resolution: the lowest, the highest and the last value of each bucket.

Observations well behind the newest are summarized once, 128 live observations a row, when they are first read: a
million of them are then read from 8,000 rows. The summaries of a series cover its beginning without a gap: every live
observation up to the last one summarized. A transaction that adds or supersedes an observation in that range deletes
the summaries from there on, with the run locked; so reads are always exact.

Sparklines are the outlines of many series at once, in a few segments each.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.domain.fields import doc
from evalstop_service.store import runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.tables import LIVE, series_buckets

OBSERVATIONS_A_ROW = 128
OBSERVATIONS_AT_A_TIME = 8192
"""How many observations are summarized at a time; fewer are left, so that slightly late observations undo nothing."""

FEW = 10_000
"""Up to this many observations are read individually."""


@dataclass(slots=True)
class Bucket:
    """Adjacent live observations: `lowest` and `highest` of the finite ones, None when there are none."""

    first_step: Annotated[int, doc("step of its first observation")]
    last_step: Annotated[int, doc("step of its last observation")]
    count: Annotated[int, doc("number of observations, including those that are not finite")]
    lowest: Annotated[float | None, doc("the lowest finite value; null: none")]
    highest: Annotated[float | None, doc("the highest finite value; null: none")]
    last: float
    nan_count: Annotated[int, doc("number of NaN values")]
    infinite_count: Annotated[int, doc("number of infinite values")]


def load_buckets(
    tx: Transaction, run_id: UUID, metric: str, first_step: int, last_step: int, buckets: int
) -> list[Bucket]:
    """The live observations between two steps, both included, in at most `buckets` buckets of about equal count."""
    bounds = {"run_id": run_id, "metric": metric}
    inside = {**bounds, "first_step": first_step, "last_step": last_step}
    count, covered_from, covered_to = tx.execute(_COVERED, inside).one()
    if count <= FEW:
        return _merge_buckets(tx.execute(_ONE_BY_ONE, inside).all(), buckets)
    # Partially covered ends and observations not yet summarized are read individually.
    before = tx.execute(_ONE_BY_ONE, {**bounds, "first_step": first_step, "last_step": covered_from - 1}).all()
    covered = tx.execute(_SUMMARIES, inside).all()
    after = tx.execute(_ONE_BY_ONE, {**bounds, "first_step": covered_to + 1, "last_step": last_step}).all()
    return _merge_buckets([*before, *covered, *after], buckets)


def catch_up_summaries(database: Database, run_id: UUID, metric: str) -> None:
    """Summarize new observations, with the run locked for some ten milliseconds at a time."""
    with database.reading() as tx:
        behind = tx.execute(_IS_BEHIND, {"run_id": run_id, "metric": metric}).first() is not None
    while behind:
        with database.transaction() as tx:
            runs.lock_runs(tx, [run_id])
            behind = summarize_series(tx, run_id, metric)


def is_long_series(tx: Transaction, run_id: UUID, metric: str) -> bool:
    """Whether a series has too many live observations to be read individually."""
    return tx.execute(_IS_LONG, {"run_id": run_id, "metric": metric}).first() is not None


def summarize_series(tx: Transaction, run_id: UUID, metric: str) -> bool:
    """Summarize some of the remaining observations of a locked run; False when there are too few."""
    return tx.execute(_SUMMARIZE, {"run_id": run_id, "metric": metric}).first() is not None


def forget_summaries(tx: Transaction, changes: Iterable[tuple[UUID, str, int]]) -> None:
    """Delete the summaries invalidated by changes at (run, metric, step); the runs are locked."""
    lowest: dict[tuple[UUID, str], int] = {}
    for run_id, metric, step in changes:
        lowest[run_id, metric] = min(step, lowest.get((run_id, metric), step))
    if lowest:
        tx.execute(_FORGET, [{"run": run_id, "name": name, "step": step} for (run_id, name), step in lowest.items()])


def forget_summaries_after(tx: Transaction, run_id: UUID, step: int) -> None:
    """Delete the summaries of all that a run observed after a step."""
    tx.execute(sa.delete(series_buckets).where(series_buckets.c.run_id == run_id, series_buckets.c.last_step > step))


def _merge_buckets(parts: Sequence[Sequence[Any]], buckets: int) -> list[Bucket]:
    """Merge parts in step order into at most this many buckets."""
    total = sum(part[2] for part in parts)
    merged: list[Bucket] = []
    reached = index = 0
    for part in parts:
        first, last, count, lowest, highest, value, nans, infinities = part
        value = math.nan if value is None else value
        index, before = reached * buckets // total, index
        reached += count
        if not merged or index != before:
            merged.append(Bucket(first, last, count, lowest, highest, value, nans, infinities))
            continue
        bucket = merged[-1]
        bucket.last_step = last
        bucket.last = value
        bucket.count += count
        bucket.nan_count += nans
        bucket.infinite_count += infinities
        if lowest is not None:
            bucket.lowest = lowest if bucket.lowest is None or lowest < bucket.lowest else bucket.lowest
            bucket.highest = highest if bucket.highest is None or highest > bucket.highest else bucket.highest
    return merged


def _text(statement: str) -> sa.TextClause:
    return sa.text(statement).bindparams(sa.bindparam("run_id", type_=sa.Uuid()))


_FORGET = sa.delete(series_buckets).where(
    series_buckets.c.run_id == sa.bindparam("run"),
    series_buckets.c.metric == sa.bindparam("name"),
    series_buckets.c.last_step >= sa.bindparam("step"),
)

_IN_SIGHT = """
FROM series_buckets WHERE run_id = :run_id AND metric = :metric AND last_step >= :first_step
    AND first_step >= :first_step AND last_step <= :last_step
"""

_COVERED = _text(f"SELECT coalesce(sum(count), 0), min(first_step), max(last_step) {_IN_SIGHT}")

_COLUMNS = "first_step, last_step, count, lowest, highest, last, nan_count, infinite_count"

_SUMMARIES = _text(f"SELECT {_COLUMNS} {_IN_SIGHT} ORDER BY last_step")

_FINITE = f"CASE WHEN value BETWEEN {-sys.float_info.max!r} AND {sys.float_info.max!r} THEN value END"

_SERIES = "FROM observations WHERE run_id = :run_id AND metric = :metric AND superseded_by = 0"

_OBSERVATIONS = f"""
SELECT step AS first_step, step AS last_step, 1 AS count, {_FINITE} AS lowest, {_FINITE} AS highest, value AS last,
    CASE WHEN value IS NULL THEN 1 ELSE 0 END AS nan_count,
    CASE WHEN value IS NOT NULL AND {_FINITE} IS NULL THEN 1 ELSE 0 END AS infinite_count
{_SERIES}
"""

_ONE_BY_ONE = _text(f"{_OBSERVATIONS} AND step >= :first_step AND step <= :last_step ORDER BY step")

_NOT_COVERED = """
step > (SELECT coalesce(max(last_step), -1) FROM series_buckets WHERE run_id = :run_id AND metric = :metric)
"""

_BEHIND = f"SELECT 1 {_SERIES} AND {_NOT_COVERED} ORDER BY step LIMIT 1 OFFSET {OBSERVATIONS_AT_A_TIME - 1}"

_IS_BEHIND = _text(_BEHIND)

_IS_LONG = _text(f"SELECT 1 {_SERIES} ORDER BY step LIMIT 1 OFFSET {FEW}")

_SUMMARIZE = _text(f"""
INSERT INTO series_buckets (run_id, metric, {_COLUMNS})
SELECT :run_id, :metric, min(step), max(step), count(*), min(finite), max(finite),
    max(CASE WHEN place % {OBSERVATIONS_A_ROW} = {OBSERVATIONS_A_ROW - 1} THEN value END),
    count(*) - count(value), count(value) - count(finite)
FROM (
    SELECT step, value, {_FINITE} AS finite, row_number() OVER (ORDER BY step) - 1 AS place
    {_SERIES} AND {_NOT_COVERED} ORDER BY step LIMIT {OBSERVATIONS_AT_A_TIME}
) AS numbered
WHERE EXISTS ({_BEHIND}) GROUP BY place / {OBSERVATIONS_A_ROW}
RETURNING 1
""")  # noqa: S608


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
    given = msgspec.json.encode([(run_id.hex, metric) for run_id, metric in series]).decode()
    parameters = {"stretches": stretches, "series": given}
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

_SEGMENT_COLUMNS = [sa.column("number", sa.BigInteger), sa.column("step", sa.BigInteger)]
_SEGMENT_COLUMNS += [sa.column("lowest", sa.Double), sa.column("highest", sa.Double)]
_STRETCHES = sa.bindparam("stretches", type_=sa.BigInteger)
_GIVEN = {
    "postgresql": "(SELECT number, CAST(item ->> 0 AS uuid) AS run_id, item ->> 1 AS metric"
    " FROM json_array_elements(CAST(:series AS json)) WITH ORDINALITY AS items (item, number)) AS given",
    "sqlite": "(SELECT key + 1 AS number, json_extract(value, '$[0]') AS run_id, json_extract(value, '$[1]') AS metric"
    " FROM json_each(:series)) AS given",
}
_SEGMENTS = {
    dialect: sa.text(_QUERY.format(given=given)).bindparams(_STRETCHES).columns(*_SEGMENT_COLUMNS)
    for dialect, given in _GIVEN.items()
}
