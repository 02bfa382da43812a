"""Observations: what trainers measured, one live value for each identity."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.clock import in_utc
from evalstop_service.domain.fields import doc
from evalstop_service.store import runs
from evalstop_service.store.database import HAS_CITUS, Transaction
from evalstop_service.store.runs import Run
from evalstop_service.store.tables import LIVE, checkpoints, observations
from evalstop_service.store.tables.columns import Real, columns_of
from evalstop_service.store.tables.runs import StoredObservation as StoredObservation

_CHUNK = 500  # SQLite accepts some thousands of variables in a statement; a plan for each length is not worth having

MAX_STEP = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # all except tabs and line ends


class PostedObservation(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One value of one metric at one step, in the trainer's own unit and direction; it may be NaN or infinite.

    The bounds of its fields are checked when it is decoded from JSON, which has neither NaN nor infinities.
    """

    metric: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
    value: float
    stderr: Annotated[float, msgspec.Meta(ge=0)] | None = None
    time: Annotated[datetime, msgspec.Meta(tz=True)] | None = None

    def __post_init__(self) -> None:
        # Almost every name is printable, which is faster to test than the pattern.
        if not self.metric.isprintable() and _CONTROL.search(self.metric):
            raise ValueError("a metric's name must not contain control characters or unpaired surrogates")
        if self.time is not None and self.time.year in (1, 9999):
            in_utc(self.time)

    @property
    def identity(self) -> tuple[str, int]:
        return self.metric, self.step


@dataclass(frozen=True)
class LatestObservation:
    """A metric's last live observation, and the number of its live observations."""

    metric: Annotated[str, doc("its name")]
    count: Annotated[int, doc("number of observations that count")]
    step: Annotated[int, doc("step of the last observation")]
    value: float
    stderr: float | None


def load_live_values(
    tx: Transaction, run_id: UUID, identities: Collection[tuple[str, int]]
) -> dict[tuple[str, int], float]:
    """The stored value of each of these identities that has a live observation."""
    by_metric: dict[str, list[int]] = defaultdict(list)
    for metric, step in identities:
        by_metric[metric].append(step)
    values: dict[tuple[str, int], float] = {}
    for metric, steps in by_metric.items():
        of_metric = (observations.c.run_id == run_id, observations.c.metric == metric)
        query = sa.select(observations.c.step, observations.c.value)
        query = query.where(*of_metric, observations.c.superseded_by == LIVE)
        for start in range(0, len(steps), _CHUNK):
            rows = tx.execute(query.where(observations.c.step.in_(steps[start : start + _CHUNK])))
            values.update({(metric, step): value for step, value in rows})
    return values


def load_series(
    tx: Transaction, run_id: UUID, metrics: Collection[str], first_step: int = 0
) -> list[PostedObservation]:
    """The live observations of these metrics from this step on, by ascending step."""
    query = (
        sa.select(*_POINT)
        .where(
            observations.c.run_id == run_id,
            observations.c.metric.in_(sorted(metrics)),
            observations.c.step >= first_step,
            observations.c.superseded_by == LIVE,
        )
        .order_by(observations.c.step, observations.c.metric)
    )
    return [PostedObservation(*row) for row in tx.execute(query)]


def load_each_after(tx: Transaction, run_id: UUID, first_steps: Mapping[str, int]) -> list[PostedObservation]:
    """The live observations of these metrics, each from its own step on, by ascending step."""
    points = load_series(tx, run_id, first_steps.keys(), min(first_steps.values()))
    return [point for point in points if point.step >= first_steps[point.metric]]


def load_together(
    tx: Transaction, first_steps: Mapping[tuple[UUID, str], int], most: int
) -> dict[UUID, list[PostedObservation] | None]:
    """The live observations of each series (run, metric) from its step on, by run: a metric that has more than `most`
    makes it None. They come without their times, in the order of the series, each by ascending step."""
    points: dict[tuple[UUID, str], list[PostedObservation]] = {series: [] for series in first_steps}
    series = [(run_id, metric, step) for (run_id, metric), step in first_steps.items()]
    for (run_id, metric, _), row in read_series(tx, _SERIES, series, most=most + 1):
        points[run_id, metric].append(PostedObservation(metric, *row))
    together: dict[UUID, list[PostedObservation] | None] = {}
    for (run_id, _), of_metric in points.items():
        earlier = together.get(run_id, [])
        together[run_id] = None if earlier is None or len(of_metric) > most else [*earlier, *of_metric]
    return together


def load_last_steps(tx: Transaction, runs: Collection[Run], until: int = MAX_STEP) -> dict[UUID, dict[str, int]]:
    """The highest live step of each metric of these runs, at most `until`; a run without any has an empty dict."""
    ends = [(run.id, "", min(until, run.last_step)) for run in runs if run.last_step is not None]
    last_steps: dict[UUID, dict[str, int]] = {run.id: {} for run in runs}
    for (run_id, _, _), (metric, step) in read_series(tx, _LAST_STEPS, ends):
        last_steps[run_id][metric] = step
    return last_steps


def list_latest(tx: Transaction, run: Run) -> list[LatestObservation]:
    """Each metric of a run, by name."""
    ended = [] if run.last_step is None else [(run.id, "", run.last_step)]
    return [LatestObservation(*row) for _, row in read_series(tx, _LATEST, ended)]


def list_newest(tx: Transaction, run_id: UUID, metric: str, limit: int) -> list[StoredObservation]:
    """The live observations of a metric at its highest steps, the highest first."""
    query = _select_stored(run_id, metric).order_by(observations.c.step.desc())
    return [StoredObservation(*row) for row in tx.execute(query.limit(limit))]


def list_observations(
    tx: Transaction, run_id: UUID, metric: str, *, after: int | None = None, limit: int = 1000
) -> list[StoredObservation]:
    """The live observations of a metric by ascending step, after this one."""
    query = _select_stored(run_id, metric).where(observations.c.step > (-1 if after is None else after))
    return [StoredObservation(*row) for row in tx.execute(query.order_by(observations.c.step).limit(limit))]


def _select_stored(run_id: UUID, metric: str) -> sa.Select[Any]:
    return sa.select(*columns_of(observations, StoredObservation)).where(
        observations.c.run_id == run_id, observations.c.metric == metric, observations.c.superseded_by == LIVE
    )


def has_observations(tx: Transaction, run_id: UUID, attempt: int) -> bool:
    """Whether this attempt has any observation."""
    query = sa.exists().where(observations.c.run_id == run_id, observations.c.attempt == attempt)
    return tx.execute(sa.select(query)).scalar_one()


def count_finite(tx: Transaction, run_id: UUID, metric: str, attempt: int) -> int:
    """How many finite values of a metric this attempt observed, including superseded ones."""
    of_attempt = (observations.c.run_id == run_id, observations.c.metric == metric, observations.c.attempt == attempt)
    query = sa.select(sa.func.count()).where(*of_attempt, sa.func.abs(observations.c.value) <= sys.float_info.max)
    return tx.execute(query).scalar_one()


def supersede(tx: Transaction, run_id: UUID, after_step: int, by_attempt: int) -> int:
    """Mark the live checkpoints and observations after a step as superseded; returns the number of observations."""
    marked = 0
    for table in (checkpoints, observations):
        is_after = (table.c.run_id == run_id, table.c.step > after_step, table.c.superseded_by == LIVE)
        marked = tx.execute(table.update().where(*is_after).values(superseded_by=by_attempt)).rowcount
    return marked


def replace_series(
    tx: Transaction, run: Run, metric: str, first_step: int, points: Sequence[PostedObservation], now: datetime
) -> None:
    """Replace a metric's live observations from this step on. Those before the run's last resume belong to an earlier
    attempt."""
    tx.execute(
        sa.delete(observations).where(
            observations.c.run_id == run.id,
            observations.c.metric == metric,
            observations.c.step >= first_step,
            observations.c.superseded_by == LIVE,
        )
    )
    add_observations(tx, run, points, now, runs.get_resumed_step(tx, run))


def add_observations(
    tx: Transaction, run: Run, points: Sequence[PostedObservation], now: datetime, resumed_from: int | None = None
) -> None:
    """Store new observations of a run; observations up to the resumed step belong to the previous attempt."""
    rows = [
        {
            "run_id": run.id,
            "metric": point.metric,
            "step": point.step,
            "superseded_by": LIVE,
            "value": point.value,
            "stderr": point.stderr,
            "attempt": run.attempt if resumed_from is None or point.step > resumed_from else run.attempt - 1,
            "observed_at": point.time,
            "received_at": now,
        }
        for point in points
    ]
    if rows:
        tx.execute(observations.insert(), rows)


_KEY = (observations.c.metric, observations.c.step, observations.c.superseded_by)


def list_exported(
    tx: Transaction, run_id: UUID, *, after: tuple[str, int, int] | None, limit: int
) -> Sequence[Sequence[Any]]:
    """All observations by `_KEY`, as they are stored: a value that is NULL is NaN.

    The database writes the times, as RFC 3339: Python would take three times as long for a row.
    """
    table = observations.c
    times = (_write_time(tx, column) for column in (table.observed_at, table.received_at))
    numbers = (sa.type_coerce(table.value, sa.Double), table.stderr)
    query = sa.select(table.metric, table.step, *numbers, *times, table.attempt, sa.func.nullif(table.superseded_by, 0))
    query = query.where(table.run_id == run_id)
    query = query if after is None else query.where(sa.tuple_(*_KEY) > sa.tuple_(*map(sa.literal, after)))
    return tx.execute(query.order_by(*_KEY).limit(limit)).all()


def _write_time(tx: Transaction, column: sa.ColumnElement[datetime]) -> sa.ColumnElement[str]:
    text: Any = sa.func.replace(sa.type_coerce(column, sa.Text), " ", "T").concat("Z")
    if tx.dialect.name == "postgresql":
        text = sa.func.to_char(sa.func.timezone("UTC", column), 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
    return sa.func.replace(text, ".000000Z", "Z")


_POINT = [observations.c[name] for name in ("metric", "step", "value", "stderr", "observed_at")]

Series = tuple[UUID, str, int]
"""A run, one of its metrics, and a step."""


def read_series(
    tx: Transaction, statements: Mapping[str, sa.TextualSelect], series: Sequence[Series], **parameters: Any
) -> Iterator[tuple[Series, Sequence[Any]]]:
    """The rows of a statement of `write_statements`, each with its series.

    Citus routes a statement that is more than a plain join only if it is about one run: others take all at once.
    """
    database, together = tx.dialect.name, [series] if series else []
    if tx.info.get(HAS_CITUS):
        database, together = "citus", [list(group) for _, group in groupby(series, itemgetter(0))]
    for asked in together:
        given = msgspec.json.encode([(run_id.hex, metric, step) for run_id, metric, step in asked]).decode()
        parameters |= {"given": given, "run_id": str(asked[0][0])}
        for number, *row in tx.execute(statements[database], parameters):
            yield asked[number - 1], row


def write_statements(
    query: str, *columns: sa.ColumnClause[Any], on_sqlite: str | None = None
) -> dict[str, sa.TextualSelect]:
    """A query for each database, on the rows `{given}` (number, run_id, metric, step) of `read_series`.

    Its columns follow the number of the series. `{routed}` begins each condition on the observations of a series.
    """
    of_postgresql = (
        "(SELECT number, CAST(item ->> 0 AS uuid) AS run_id, item ->> 1 AS metric, CAST(item ->> 2 AS bigint) AS step"
        " FROM json_array_elements(CAST(:given AS json)) WITH ORDINALITY AS items (item, number)) AS given"
    )
    of_sqlite = (
        "(SELECT key + 1 AS number, json_extract(value, '$[0]') AS run_id, json_extract(value, '$[1]') AS metric,"
        " json_extract(value, '$[2]') AS step FROM json_each(:given)) AS given"
    )
    texts = {
        "postgresql": query.format(given=of_postgresql, routed=""),
        "sqlite": (on_sqlite or query).format(given=of_sqlite, routed=""),
        "citus": query.format(given=of_postgresql, routed="o.run_id = CAST(:run_id AS uuid) AND "),
    }
    number = sa.column("number", sa.BigInteger)
    return {database: sa.text(text).columns(number, *columns) for database, text in texts.items()}


_METRIC, _STEP = sa.column("metric", sa.Text), sa.column("step", sa.BigInteger)
_VALUE, _STDERR = sa.column("value", Real), sa.column("stderr", sa.Double)

_OF_SERIES = f"""
{{routed}}o.run_id = given.run_id AND o.metric = given.metric AND o.step >= given.step AND o.superseded_by = {LIVE}
"""

# On PostgreSQL LATERAL, so that each series is read through the index, and no further than wanted.
_SERIES = write_statements(
    f"""
SELECT given.number, points.* FROM {{given}} CROSS JOIN LATERAL (
    SELECT o.step, o.value, o.stderr FROM observations AS o WHERE {_OF_SERIES} ORDER BY o.step LIMIT :most
) AS points ORDER BY given.number, points.step
""",  # noqa: S608
    *(_STEP, _VALUE, _STDERR),
    on_sqlite=f"""
SELECT number, step, value, stderr FROM (
    SELECT given.number, o.step, o.value, o.stderr,
        row_number() OVER (PARTITION BY given.number ORDER BY o.step) AS place
    FROM {{given}} CROSS JOIN observations AS o WHERE {_OF_SERIES}
) WHERE place <= :most ORDER BY number, step
""",  # noqa: S608
)

# Walk the index from one metric of a run to the next, and to the last live step of each. Observations past the
# run's last step are superseded, and there may be very many.
_ENDS = f"""
WITH RECURSIVE found (number, run_id, last_step, metric) AS (
    SELECT number, run_id, step, (SELECT min(o.metric) FROM observations AS o WHERE {{routed}}o.run_id = given.run_id)
    FROM {{given}}
    UNION ALL
    SELECT number, run_id, last_step, (
        SELECT min(o.metric) FROM observations AS o
        WHERE {{routed}}o.run_id = found.run_id AND o.metric > found.metric
    )
    FROM found WHERE metric IS NOT NULL
), ended (number, run_id, metric, step) AS (
    SELECT number, run_id, metric, (
        SELECT o.step FROM observations AS o
        WHERE {{routed}}o.run_id = found.run_id AND o.metric = found.metric
            AND o.step <= found.last_step AND o.superseded_by = {LIVE}
        ORDER BY o.step DESC LIMIT 1
    )
    FROM found WHERE metric IS NOT NULL
)
"""  # noqa: S608

_LAST_STEPS = write_statements(
    f"{_ENDS} SELECT number, metric, step FROM ended WHERE step IS NOT NULL",  # noqa: S608
    *(_METRIC, _STEP),
)

_OF_ENDED = f"""
FROM observations AS o
WHERE {{routed}}o.run_id = ended.run_id AND o.metric = ended.metric AND o.superseded_by = {LIVE}
"""

# Subqueries, not a join: PostgreSQL expects too many observations of each metric, and may then read them all.
_LATEST = write_statements(
    f"""{_ENDS}
SELECT ended.number, ended.metric, (SELECT count(*) {_OF_ENDED}), ended.step,
    (SELECT o.value {_OF_ENDED} AND o.step = ended.step), (SELECT o.stderr {_OF_ENDED} AND o.step = ended.step)
FROM ended WHERE ended.step IS NOT NULL
ORDER BY ended.metric
""",  # noqa: S608
    *(_METRIC, sa.column("count", sa.BigInteger), _STEP, _VALUE, _STDERR),
)
