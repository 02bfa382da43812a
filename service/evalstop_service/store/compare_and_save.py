"""Points of many runs, and what they changed of the runs, saved at one stroke if the runs are still as remembered.

On PostgreSQL alone, where every further statement is a trip there and back: one statement locks the runs, compares
their stamps and writes, and is a transaction of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import msgspec

from evalstop_service.store import observations, runs
from evalstop_service.store.observations import New
from evalstop_service.store.runs import Run, Stamp


@dataclass(frozen=True, slots=True)
class Stroke:
    """What `runs.save_many` and `observations.add_many` would write of runs whose stamps are still these.

    `points` lie past the last steps of their metrics, so that no summary covers them.
    """

    stamps: Mapping[UUID, Stamp]
    changed: Sequence[Run]
    points: Sequence[New]
    now: datetime

    @property
    def parameters(self) -> list[bytes]:
        """Of `COMPARE_AND_SAVE`, as texts."""
        return [
            msgspec.json.encode([(run_id, *stamp) for run_id, stamp in self.stamps.items()]),
            msgspec.json.encode([runs.moving(run) for run in self.changed]),
            observations.recordset(self.points),
            self.now.isoformat().encode(),
        ]


# A row that somebody holds is waited for and compared as it is then. Rows are locked by ascending id, as everywhere.
COMPARE_AND_SAVE = f"""
WITH expected AS (
    SELECT (stamp ->> 0)::uuid AS id, (stamp ->> 1)::integer AS version, (stamp ->> 2)::timestamptz AS updated_at
    FROM json_array_elements($1::json) AS stamp
), held AS MATERIALIZED (
    SELECT runs.id FROM runs JOIN expected USING (id, version, updated_at) ORDER BY runs.id FOR UPDATE OF runs
), verdict AS MATERIALIZED (
    SELECT count(*) = json_array_length($1::json) AS stands FROM held
), added AS (
    {observations.INSERT_RECORDS.format(points="$3", now="$4")} WHERE (SELECT stands FROM verdict)
), moved AS (
    {runs.MOVE} FROM json_to_recordset($2::json) AS new ({runs.MOVING_TYPES})
    WHERE runs.id = new.id AND (SELECT stands FROM verdict)
)
SELECT stands FROM verdict
"""  # noqa: S608 - of constants alone
