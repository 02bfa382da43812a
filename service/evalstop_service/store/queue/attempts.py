"""An attempt of a delivery: what its worker claimed, how it ended, and how long a failing endpoint is left alone.

closed ──(consecutive failures)──> open ──(`open_until`)──> a success: closed; a failure: open for twice as long

Deliveries to an open endpoint are not claimed, so they use up no attempts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.store.database import Transaction
from evalstop_service.store.endpoints import PULL_PREFIX
from evalstop_service.store.tables import UtcTime, deliveries, delivery_attempts, endpoints


@dataclass(frozen=True, slots=True)
class ClaimedDelivery:
    """A delivery that one worker holds until `lease_until`; `attempts` includes this one. It was due at `due_at`.

    `failures`: consecutive failures of its endpoint at the claim. `stop_of`: the decision whose stop it hands over to a
    receiver.
    """

    run_id: UUID
    id: UUID
    event_id: UUID
    endpoint_id: UUID
    attempts: int
    due_at: datetime
    url: str
    body: str
    format: str = "standard"
    failures: int = 0
    stop_of: UUID | None = None
    lease_until: datetime = field(kw_only=True)
    secrets: tuple[str, ...] = field(kw_only=True, default=())

    @property
    def receiver(self) -> str:
        """Who gets it, in words; the rest of a URL may be secret."""
        if self.url.startswith(PULL_PREFIX):
            return f"the receiver {self.url.removeprefix(PULL_PREFIX)}"
        return f"the endpoint at {urlsplit(self.url).hostname}"


@dataclass(frozen=True, slots=True)
class Delivered:
    """The endpoint accepted the event."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A later attempt may succeed: not before `due_at`."""

    due_at: datetime
    error: str


@dataclass(frozen=True, slots=True)
class Dead:
    """A retry would change nothing; `gone`: the endpoint wants no more events."""

    error: str
    gone: bool = False


Result = Delivered | Retry | Dead


@dataclass(frozen=True, slots=True)
class FinishedAttempt:
    """The result of a claimed delivery, and when; `answer`: the start of the response body."""

    claimed: ClaimedDelivery
    result: Result
    at: datetime
    duration_ms: float = 0.0
    status_code: int | None = None
    answer: str | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the endpoint answered that it wants no more events."""
        return isinstance(self.result, Dead) and self.result.gone

    @property
    def went_well(self) -> bool:
        """Whether the endpoint works: it accepted the event, or answered that it never will."""
        answered = self.status_code is not None and self.status_code < 500
        return isinstance(self.result, Delivered) or (isinstance(self.result, Dead) and answered)


@dataclass(frozen=True)
class BreakerLimits:
    """After this many consecutive `failures`, nothing is sent for `first_seconds`.

    A failure after a pause doubles it up to `longest_seconds`: a receiver that restarts gets its stops after a second
    or two, and one that is gone is hardly tried.
    """

    failures: int = 10
    first_seconds: float = 1.0
    longest_seconds: float = 30.0

    def compute_pause(self, failures: int) -> timedelta:
        """The pause after so many consecutive failures."""
        doublings = min(failures - self.failures, 60)
        return timedelta(seconds=min(self.first_seconds * 2.0**doublings, self.longest_seconds))


def record_results(tx: Transaction, tried: Iterable[FinishedAttempt], breaker: BreakerLimits) -> None:
    """Count the consecutive failures of endpoints, whose rows are locked, and open or close their circuit breakers.

    Attempts that were under way when the breaker opened may succeed, which closes it, but do not lengthen the pause.
    """
    attempts: dict[UUID, list[FinishedAttempt]] = defaultdict(list)
    for attempt in sorted(tried, key=lambda attempt: attempt.at):
        attempts[attempt.claimed.endpoint_id].append(attempt)
    table = endpoints.c
    for endpoint_id, of_one in attempts.items():
        query = sa.select(table.failures, table.open_until).where(table.id == endpoint_id)
        failures, open_until = tx.execute(query).one()
        for attempt in of_one:
            if attempt.went_well:
                failures, open_until = 0, None
            elif open_until is None or attempt.at >= open_until:
                failures += 1
                if failures >= breaker.failures:
                    open_until = attempt.at + breaker.compute_pause(failures)
        tx.execute(sa.update(endpoints).where(table.id == endpoint_id).values(failures=failures, open_until=open_until))


def save_results(tx: Transaction, ended: Sequence[FinishedAttempt]) -> dict[UUID, DeliveryState]:
    """Save and log the results of the attempts whose lease is still held; see `leases.settle_deliveries`."""
    number_of = {attempt.claimed.id: attempt.claimed.attempts for attempt in ended}
    present = tx.execute(_PRESENT, {"ids": list(number_of)})
    held = {
        key: state
        for key, state, number in present
        if number == number_of[key] and state in (DeliveryState.WAITING, DeliveryState.CANCELLED)
    }
    rows = [_to_row(attempt) for attempt in ended if held.get(attempt.claimed.id) is DeliveryState.WAITING]
    if rows:
        tx.execute(_SAVE, rows)
        tx.execute(_LOG, [{name: row[name] for name in _LOGGED} for row in rows])
    return held


def _to_row(ended: FinishedAttempt) -> dict[str, Any]:
    """The new state of the delivery's row, and the attempt to log."""
    claimed, result, state, due_at = ended.claimed, ended.result, DeliveryState.WAITING, ended.claimed.due_at
    match result:
        case Delivered():
            state = DeliveryState.DELIVERED
        case Retry():
            due_at = result.due_at
        case Dead():
            state = DeliveryState.DEAD
    return {
        "of_run": claimed.run_id,
        "of_id": claimed.id,
        "number": claimed.attempts,
        "new_state": state,
        "new_due_at": due_at,
        "error": result.error if isinstance(result, Retry | Dead) else None,
        "ended_at": ended.at,
        "duration_ms": ended.duration_ms,
        "status_code": ended.status_code,
        "url": claimed.url,
        "answer": ended.answer,
    }


# Rows are locked in key order, as bulk cancellation locks them.
_PRESENT = (
    sa.select(deliveries.c.id, deliveries.c.state, deliveries.c.attempts)
    .where(deliveries.c.id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(deliveries.c.run_id, deliveries.c.id)
    .with_for_update()
)
_NEW_STATE, _ENDED_AT = sa.bindparam("new_state", type_=sa.Text), sa.bindparam("ended_at", type_=UtcTime)
_ERROR: sa.ColumnElement[Any] = sa.func.coalesce(sa.bindparam("error"), deliveries.c.last_error)
_SAVE = (
    deliveries.update()
    .where(deliveries.c.run_id == sa.bindparam("of_run"), deliveries.c.id == sa.bindparam("of_id"))
    .values(
        state=_NEW_STATE,
        due_at=sa.bindparam("new_due_at"),
        last_error=sa.case((_NEW_STATE != "delivered", _ERROR)),
        settled_at=sa.case((_NEW_STATE != "waiting", _ENDED_AT)),
    )
)
_LOGGED = ("of_run", "of_id", "number", "ended_at", "duration_ms", "status_code", "error", "url", "answer")
_LOG = delivery_attempts.insert().values(run_id=sa.bindparam("of_run"), delivery_id=sa.bindparam("of_id"), at=_ENDED_AT)
