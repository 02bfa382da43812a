"""Circuit breakers: an endpoint that fails time after time is left alone for a while, and then tried once.

closed ──(so many failures, one after the other)──> open ──(`open_until`)──> one attempt ──> closed, or open again

What waits for an open endpoint is not claimed, so no attempt of it is spent. Whoever makes the one attempt moves
`open_until` to the end of its lease: workers meet in the endpoint's row, and one that dies leaves the turn to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import endpoints


@dataclass(frozen=True)
class BreakerLimits:
    """After `failures` one after the other, nothing is sent for `seconds`."""

    failures: int = 10
    seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """One attempt at an endpoint; `well`: it answered like one that works, be it with a refusal of the event."""

    endpoint_id: UUID
    at: datetime
    well: bool


def claim_trials(tx: Transaction, seen: Mapping[UUID, datetime], lease_until: datetime) -> set[UUID]:
    """Of endpoints whose `open_until` was `seen` to be over: those that are this worker's to try, and nobody else's.

    An endpoint that another transaction has locked is passed over, so that nobody waits here with deliveries locked.
    """
    mine = set()
    for endpoint_id, open_until in seen.items():
        table = endpoints.c
        free = (
            sa.select(table.id)
            .where(table.id == endpoint_id, table.open_until == open_until)
            .with_for_update(key_share=True, skip_locked=True)
        )
        turn = sa.update(endpoints).where(table.id.in_(free)).values(open_until=lease_until)
        if tx.execute(turn).rowcount:
            mine.add(endpoint_id)
    return mine


def record_results(tx: Transaction, tried: Iterable[AttemptResult], breaker: BreakerLimits) -> frozenset[UUID]:
    """Count what failed one after the other; returns the endpoints that are open since. Their rows are locked."""
    attempts: dict[UUID, list[AttemptResult]] = {}
    for one in sorted(tried, key=lambda one: one.at):
        attempts.setdefault(one.endpoint_id, []).append(one)
    opened = set()
    for endpoint_id, of_one in attempts.items():
        failures, ever_well = _since_it_went_well(of_one)
        if not ever_well:
            query = sa.select(endpoints.c.failures).where(endpoints.c.id == endpoint_id)
            failures += tx.execute(query).scalar_one()
        opens = failures >= breaker.failures
        until = of_one[-1].at + timedelta(seconds=breaker.seconds) if opens else None
        if opens:
            opened.add(endpoint_id)
        tx.execute(
            sa.update(endpoints).where(endpoints.c.id == endpoint_id).values(failures=failures, open_until=until)
        )
    return frozenset(opened)


def _since_it_went_well(tried: Sequence[AttemptResult]) -> tuple[int, bool]:
    failures, ever_well = 0, False
    for one in tried:
        failures = 0 if one.well else failures + 1
        ever_well |= one.well
    return failures, ever_well
