"""Points of many runs, and what they changed of the runs, saved at one stroke if the runs are still as remembered.

On PostgreSQL alone, where every further statement is a trip there and back: one statement locks the runs, compares
their stamps and writes, and is a transaction of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from evalstop_service.store import observations, runs
from evalstop_service.store.observations import NewObservation
from evalstop_service.store.runs import Run, Stamp


@dataclass(frozen=True, slots=True)
class Stroke:
    """What `runs.save_many` and `observations.add_many` would write, if all runs still have their stamps.

    `moves`: each run with the stamp that it had before. `points` lie past the last steps of their metrics, so that no
    summary covers them.
    """

    moves: Sequence[tuple[Stamp, Run]]
    points: Sequence[NewObservation]
    now: datetime

    @property
    def parameters(self) -> list[bytes]:
        """Of `COMPARE_AND_SAVE`, as texts."""
        moves = [{"was": was, "was_at": was_at} | runs.changed_columns(run) for (was, was_at), run in self.moves]
        return [msgspec.json.encode(moves), observations.encode_records(self.points), self.now.isoformat().encode()]


# A row that somebody holds is waited for and compared as it is then. Rows are locked by ascending id, as everywhere.
COMPARE_AND_SAVE = f"""
WITH new AS MATERIALIZED (
    SELECT * FROM json_to_recordset($1::json) AS new (was integer, was_at timestamptz, {runs.MOVING_TYPES})
), held AS MATERIALIZED (
    SELECT runs.id FROM new JOIN runs ON runs.id = new.id AND runs.version = was AND runs.updated_at = was_at
    ORDER BY runs.id FOR UPDATE OF runs
), verdict AS MATERIALIZED (
    SELECT (SELECT count(*) FROM held) = (SELECT count(*) FROM new) AS stands
), added AS (
    {observations.INSERT_RECORDS.format(points="$2", now="$3")} WHERE (SELECT stands FROM verdict)
), moved AS (
    {runs.MOVE} FROM new WHERE runs.id = new.id AND (SELECT stands FROM verdict)
)
SELECT stands FROM verdict
"""  # noqa: S608 - of constants alone
