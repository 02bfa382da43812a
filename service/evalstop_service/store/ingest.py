"""What ingestion saves, and how it speaks to the database: the same on both, in the event loop's terms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Protocol, TypeVar
from uuid import UUID

import msgspec

from evalstop_service.rules.run_results import Verdict
from evalstop_service.store.database import Transaction
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

T = TypeVar("T")

FollowUp = Callable[[Transaction, Collection[UUID]], None]
"""Writes, in the transaction of a save, what follows from it for the runs that were saved."""


class RunChange(msgspec.Struct, frozen=True):
    """A run as it was loaded, the run as it is to be, and its new observations.

    Of the row `IngestStore.save` writes what most messages change: `HOT_COLUMNS`. `runs.save_changes` writes the rest.
    """

    before: Run
    run: Run
    points: Sequence[PostedObservation]


class IngestStore(Protocol):
    """The database as ingestion uses it, from one event loop."""

    async def read(self, query: Callable[[Transaction], T]) -> T:
        """What a query gives. Its statements need not see the same moment."""

    async def save(self, changes: Sequence[RunChange], now: datetime, follow_up: FollowUp | None) -> Collection[UUID]:
        """Save the runs whose versions are still what they were, each whole, in one transaction; gives their ids.

        Raises DBAPIError. If its connection was lost, the transaction may have been committed all the same.
        """

    async def close(self) -> None:
        """Close what was opened."""


def changed_json(before: object, after: object) -> str | None:
    """A JSON column as it is to be written. None: it stays as it is, or is to be NULL, which `save_changes` writes."""
    if after is before or after is None:
        return None
    return msgspec.json.encode(after.for_json if isinstance(after, Verdict) else after).decode()
