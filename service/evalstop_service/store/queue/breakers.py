"""Circuit breakers: after consecutive failures an endpoint is left alone for a while, and then tried once.

closed ──(consecutive failures)──> open ──(`open_until`)──> one attempt ──> closed, or open again for twice as long

Deliveries to an open endpoint are not claimed, so they use up no attempts. The worker that makes the one attempt moves
`open_until` to the end of its lease. Workers compete for the endpoint's row, and if one dies, another may try later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.store.database import Transaction
from evalstop_service.store.queue.attempts import FinishedAttempt
from evalstop_service.store.tables import endpoints


@dataclass(frozen=True)
class BreakerLimits:
    """After this many consecutive `failures`, nothing is sent for `first_seconds`.

    Each failed trial doubles the pause up to `longest_seconds`: a receiver that restarts gets its stops after a second
    or two, and one that is gone is hardly tried.
    """

    failures: int = 10
    first_seconds: float = 1.0
    longest_seconds: float = 30.0

    def compute_pause(self, failures: int) -> timedelta:
        """The pause after so many consecutive failures."""
        doublings = min(failures - self.failures, 60)
        return timedelta(seconds=min(self.first_seconds * 2.0**doublings, self.longest_seconds))


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


def record_results(tx: Transaction, tried: Iterable[FinishedAttempt], breaker: BreakerLimits) -> dict[UUID, datetime]:
    """Count consecutive failures; returns the endpoints whose breaker opened, and until when. Their rows are locked.

    Attempts that were under way when the breaker opened may succeed, which closes it, but do not lengthen the pause.
    After a trial that was not sent, another may be claimed at once.
    """
    attempts: dict[UUID, list[FinishedAttempt]] = defaultdict(list)
    for attempt in sorted(tried, key=lambda attempt: attempt.at):
        attempts[attempt.claimed.endpoint_id].append(attempt)
    opened = {}
    for endpoint_id, of_one in attempts.items():
        table = endpoints.c
        row = tx.execute(sa.select(table.failures, table.open_until).where(table.id == endpoint_id)).one()
        failures, open_until, opens = row.failures, row.open_until, False
        for attempt in of_one:
            if not attempt.was_tried:
                open_until = min(open_until, attempt.at) if open_until is not None else None
            elif attempt.went_well:
                failures, open_until, opens = 0, None, False
            elif open_until is None or attempt.is_trial:
                failures += 1
                opens = failures >= breaker.failures
                open_until = attempt.at + breaker.compute_pause(failures) if opens else None
        if opens:
            opened[endpoint_id] = open_until
        tx.execute(sa.update(endpoints).where(table.id == endpoint_id).values(failures=failures, open_until=open_until))
    return opened
