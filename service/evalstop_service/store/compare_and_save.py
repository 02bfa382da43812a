"""Points of many runs, and what they changed of the runs, saved at one stroke if the runs are still as remembered.

On PostgreSQL alone, where every further statement is a trip there and back: one statement locks the runs, compares
their stamps and writes, and is a transaction of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from evalstop_service.store import observations, runs
from evalstop_service.store.observations import New
from evalstop_service.store.runs import Run, Stamp


def compare_and_save(
    connection: Any, stamps: Mapping[UUID, Stamp], changed: Sequence[Run], points: Sequence[New], now: datetime
) -> bool:
    """Write what `runs.save_many` and `observations.add_many` would; False, and nothing, if any stamp is another.

    `connection`: that of `Database.statement`. `points` lie past the last steps of their metrics, so that no summary
    covers them.
    """
    expected = msgspec.json.encode([(run_id, *stamp) for run_id, stamp in stamps.items()]).decode()
    values = {
        "expected": expected,
        "changed": msgspec.json.encode([runs.moving(run) for run in changed]).decode(),
        "points": observations.recordset(points),
        "now": now,
        "count": len(stamps),
    }
    saved: bool = connection.execute(_COMPARE_AND_SAVE, values, prepare=True).fetchone()[0]
    return saved


# A row that somebody holds is waited for and compared as it is then. Rows are locked by ascending id, as everywhere.
_COMPARE_AND_SAVE = f"""
WITH expected AS (
    SELECT (stamp ->> 0)::uuid AS id, (stamp ->> 1)::integer AS version, (stamp ->> 2)::timestamptz AS updated_at
    FROM json_array_elements(%(expected)t::json) AS stamp
), held AS MATERIALIZED (
    SELECT runs.id FROM runs JOIN expected USING (id, version, updated_at) ORDER BY runs.id FOR UPDATE OF runs
), verdict AS MATERIALIZED (
    SELECT count(*) = %(count)s AS stands FROM held
), added AS (
    {observations.INSERT_RECORDS} WHERE (SELECT stands FROM verdict)
), moved AS (
    {runs.MOVE} FROM json_to_recordset(%(changed)t::json) AS new ({runs.MOVING_TYPES})
    WHERE runs.id = new.id AND (SELECT stands FROM verdict)
)
SELECT stands FROM verdict
"""  # noqa: S608 - of constants alone
