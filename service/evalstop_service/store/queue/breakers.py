"""Circuit breakers: after consecutive failures an endpoint is left alone for a while, and then tried once.

closed ──(consecutive failures)──> open ──(`open_until`)──> one attempt ──> closed, or open again

Deliveries to an open endpoint are not claimed, so they use up no attempts. The worker that makes the one attempt moves
`open_until` to the end of its lease. Workers compete for the endpoint's row, and if one dies, another may try later.
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
    """After this many consecutive `failures`, nothing is sent for `seconds`."""

    failures: int = 10
    seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """One attempt at an endpoint; `well`: the endpoint works, even if it refused the event."""

    endpoint_id: UUID
    at: datetime
    well: bool


def claim_trials(tx: Transaction, open_until_of: Mapping[UUID, datetime], lease_until: datetime) -> set[UUID]:
    """Claim the trial attempts of endpoints whose `open_until_of` has passed; returns those claimed.

    Endpoints that another transaction has locked are skipped, so that no one waits here while holding locks on
    deliveries.
    """
    claimed = set()
    for endpoint_id, open_until in open_until_of.items():
        table = endpoints.c
        free = (
            sa.select(table.id)
            .where(table.id == endpoint_id, table.open_until == open_until)
            .with_for_update(key_share=True, skip_locked=True)
        )
        turn = sa.update(endpoints).where(table.id.in_(free)).values(open_until=lease_until)
        if tx.execute(turn).rowcount:
            claimed.add(endpoint_id)
    return claimed


def record_results(tx: Transaction, tried: Iterable[AttemptResult], breaker: BreakerLimits) -> frozenset[UUID]:
    """Count consecutive failures; returns the endpoints whose breaker opened. Their rows are locked."""
    attempts: dict[UUID, list[AttemptResult]] = {}
    for attempt in sorted(tried, key=lambda attempt: attempt.at):
        attempts.setdefault(attempt.endpoint_id, []).append(attempt)
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
    for attempt in tried:
        failures = 0 if attempt.well else failures + 1
        ever_well |= attempt.well
    return failures, ever_well
