"""Circuit breakers of endpoints: open after failures, tried again after a pause, closed by a success."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.store import endpoints, tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.queue import leases
from evalstop_service.store.queue.attempts import (
    BreakerLimits,
    ClaimedDelivery,
    Dead,
    Delivered,
    FinishedAttempt,
    Result,
    Retry,
)

from tests.service.webhooks.delivery.fakes import EPOCH, SeededProject, claim_deliveries

BREAKER = BreakerLimits(failures=3, first_seconds=30)


def settle_attempt(
    tx: Transaction, claimed: ClaimedDelivery, result: Result, seconds: float = 0, code: int | None = 500
) -> bool:
    """Settle one attempt; return whether its endpoint is paused afterwards."""
    at = EPOCH + timedelta(seconds=seconds)
    settled = leases.settle_deliveries(tx, [FinishedAttempt(claimed, result, at, 1.0, code)], BREAKER)
    assert settled == {claimed.id: DeliveryState.WAITING}
    return find_pause(tx, claimed) > at


def find_pause(tx: Transaction, claimed: ClaimedDelivery) -> datetime:
    """Until when the endpoint of a delivery is paused; EPOCH: it is not."""
    query = sa.select(tables.endpoints.c.open_until).where(tables.endpoints.c.id == claimed.endpoint_id)
    return tx.execute(query).scalar_one() or EPOCH


def retry_at(seconds: float) -> Retry:
    return Retry(EPOCH + timedelta(seconds=seconds), "HTTP 500")


def add_endpoint_with_open_breaker(tx: Transaction, project: SeededProject, waiting: int = 5) -> endpoints.Endpoint:
    """Add an endpoint whose breaker is open until second 30 after three failures, with waiting deliveries."""
    endpoint = endpoints.add_endpoint(tx, project.id, url="http://x.example", event_types=["*"], now=EPOCH)
    for number in range(3 + waiting):
        project.add_event_of_new_run(tx, number)
    assert [settle_attempt(tx, delivery, retry_at(1)) for delivery in claim_deliveries(tx, EPOCH, 10, 3)] == [
        False,
        False,
        True,
    ]
    return endpoint


def test_open_breaker_stops_claims(database: Database, project: SeededProject) -> None:
    """While a breaker is open its endpoint's deliveries are not claimed and use no attempt; others are."""
    with database.transaction() as tx:
        endpoint = add_endpoint_with_open_breaker(tx, project)
        soon = EPOCH + timedelta(seconds=29)
        assert claim_deliveries(tx, soon, 10, 8) == []
        assert sum(delivery.attempts for delivery in project.list_deliveries(tx)) == 3
        reloaded = endpoints.load_endpoint(tx, project.id, endpoint.id)
        assert (reloaded.failures, reloaded.open_until) == (3, EPOCH + timedelta(seconds=30))
        other = add_second_endpoint(tx, project)
        project.add_event_of_new_run(tx, 9, now=soon)
        assert [delivery.endpoint_id for delivery in claim_deliveries(tx, soon, 10, 8)] == [other.id]


def add_second_endpoint(tx: Transaction, project: SeededProject) -> endpoints.Endpoint:
    return endpoints.add_endpoint(tx, project.id, url="http://y.example", event_types=["*"], now=EPOCH)


def test_success_closes_the_breaker(database: Database, project: SeededProject) -> None:
    """After the pause deliveries are claimed again; the first that succeeds closes the breaker."""
    with database.transaction() as tx:
        endpoint = add_endpoint_with_open_breaker(tx, project)
        later = EPOCH + timedelta(seconds=31)
        first, *_ = claim_deliveries(tx, later, 10, 8)
        assert not settle_attempt(tx, first, Delivered(), 32, 200)
        reloaded = endpoints.load_endpoint(tx, project.id, endpoint.id)
        assert (reloaded.failures, reloaded.open_until) == (0, None)


def test_failure_opens_the_breaker_again(database: Database, project: SeededProject) -> None:
    """Of the deliveries that fail together after the pause, the first opens the breaker for twice as long."""
    breaker = BreakerLimits(failures=3, first_seconds=30, longest_seconds=600)
    with database.transaction() as tx:
        endpoint = add_endpoint_with_open_breaker(tx, project)
        claimed = claim_deliveries(tx, EPOCH + timedelta(seconds=31), 10, 8)
        ends = [EPOCH + timedelta(seconds=32 + number) for number in range(len(claimed))]
        attempts = [
            FinishedAttempt(delivery, retry_at(60), at, 1.0, 500) for delivery, at in zip(claimed, ends, strict=True)
        ]
        leases.settle_deliveries(tx, attempts, breaker)
        reloaded = endpoints.load_endpoint(tx, project.id, endpoint.id)
        assert len(claimed) == 8
        assert (reloaded.failures, reloaded.open_until) == (4, ends[0] + timedelta(seconds=60))


def test_each_endpoint_has_its_own_breaker(database: Database, project: SeededProject) -> None:
    """Failures count for one endpoint, in the order of its attempts."""
    with database.transaction() as tx:
        failing, other = (
            endpoints.add_endpoint(tx, project.id, url=f"http://{name}.example", event_types=["*"], now=EPOCH)
            for name in ("x", "y")
        )
        for number in range(8):
            project.add_event_of_new_run(tx, number)
        claimed = claim_deliveries(tx, EPOCH, 10, 10)
        of_failing = [delivery for delivery in claimed if delivery.endpoint_id == failing.id]
        of_other = [delivery for delivery in claimed if delivery.endpoint_id == other.id]

        def count_failures() -> list[int]:
            found = (endpoints.find_endpoint(tx, project.id, endpoint.id) for endpoint in (failing, other))
            return [endpoint.failures for endpoint in found if endpoint is not None]

        for delivery in of_failing[:3]:
            settle_attempt(tx, delivery, retry_at(100))
        assert count_failures() == [3, 0]
        late, early = (EPOCH + timedelta(seconds=seconds) for seconds in (2, 1))
        attempts = [
            FinishedAttempt(of_other[0], Delivered(), late, 1.0, 200),
            FinishedAttempt(of_other[1], retry_at(100), early, 1.0, 500),
        ]
        leases.settle_deliveries(tx, attempts, BREAKER)
        assert count_failures() == [3, 0]


def test_pause_doubles_with_each_failure(database: Database, project: SeededProject) -> None:
    """The first pause is short; a failure after it doubles it, up to the longest."""
    breaker = BreakerLimits(failures=3, first_seconds=1, longest_seconds=5)
    with database.transaction() as tx:
        add_second_endpoint(tx, project)
        for number in range(6):
            project.add_event_of_new_run(tx, number)
        pauses, at = [], EPOCH
        for _ in range(6):
            (claimed,) = claim_deliveries(tx, at, 10, 1)
            attempt = FinishedAttempt(claimed, retry_at(1000), at, 1.0, 500)
            leases.settle_deliveries(tx, [attempt], breaker)
            until = max(at, find_pause(tx, claimed))
            pauses.append((until - at).total_seconds())
            at = until
    assert pauses == [0, 0, 1, 2, 4, 5]


def test_attempts_under_way_do_not_lengthen_the_pause(database: Database, project: SeededProject) -> None:
    """What was sent before the breaker opened and fails during the pause neither counts nor lengthens it."""
    with database.transaction() as tx:
        endpoint = add_second_endpoint(tx, project)
        for number in range(8):
            project.add_event_of_new_run(tx, number)
        claimed = claim_deliveries(tx, EPOCH, 10, 10)
        results = [settle_attempt(tx, delivery, retry_at(1), number) for number, delivery in enumerate(claimed)]
        reloaded = endpoints.find_endpoint(tx, project.id, endpoint.id)
    assert results == [False, False] + [True] * 6
    assert reloaded is not None
    assert (reloaded.failures, reloaded.open_until) == (3, EPOCH + timedelta(seconds=2 + 30))


def test_attempt_of_a_cancelled_delivery_counts(database: Database, project: SeededProject) -> None:
    """An attempt shows whether the endpoint works even if its delivery was cancelled meanwhile, as by an escalation."""
    with database.transaction() as tx:
        endpoint = add_endpoint_with_open_breaker(tx, project)
        found = []
        for result, code, seconds in ((retry_at(60), 500, 32.0), (Delivered(), 200, 93.0)):
            at = EPOCH + timedelta(seconds=seconds)
            (probe,) = claim_deliveries(tx, at, 10, 1)
            cancelled = tables.deliveries.update().where(tables.deliveries.c.id == probe.id)
            tx.execute(cancelled.values(state=DeliveryState.CANCELLED))
            settled = leases.settle_deliveries(tx, [FinishedAttempt(probe, result, at, 1.0, code)], BREAKER)
            assert settled == {probe.id: DeliveryState.CANCELLED}
            reloaded = endpoints.load_endpoint(tx, project.id, endpoint.id)
            found.append((reloaded.failures, reloaded.open_until))
    assert found == [(4, EPOCH + timedelta(seconds=32 + 30)), (0, None)]


def test_rejected_event_is_not_a_failure(database: Database, project: SeededProject) -> None:
    """An endpoint that rejects events works: rejections and successes reset the count of failures."""
    with database.transaction() as tx:
        add_second_endpoint(tx, project)
        for number in range(8):
            project.add_event_of_new_run(tx, number)
        results: list[tuple[Result, int | None]] = []
        results += [
            (retry_at(1), 500),
            (retry_at(1), None),
            (Dead("HTTP 400"), 400),
            (retry_at(1), 500),
            (retry_at(1), 503),
        ]
        results += [(Delivered(), 200), (retry_at(1), 500), (retry_at(1), 500)]
        for result, code in results:
            (claimed,) = claim_deliveries(tx, EPOCH, 10, 1)
            assert not settle_attempt(tx, claimed, result, 0, code)


@pytest.mark.parametrize("changes", [{"url": "http://new.example"}, {"enabled": True}])
def test_updated_endpoint_is_tried_at_once(database: Database, project: SeededProject, changes: dict[str, Any]) -> None:
    """A new URL, or enabling the endpoint, closes the breaker and ends pauses before retries, but no veto window."""
    with database.transaction() as tx:
        endpoint = add_endpoint_with_open_breaker(tx, project)
        for delivery in claim_deliveries(tx, EPOCH + timedelta(seconds=31), 10, 8):
            settle_attempt(tx, delivery, retry_at(900), 31)
        window_ends = EPOCH + timedelta(seconds=60)
        project.add_event_of_new_run(tx, 20, due_at=window_ends)
        assert claim_deliveries(tx, EPOCH + timedelta(seconds=32), 20, 20) == []
        endpoints.update_endpoint(tx, project.id, endpoint.id, **changes)
        assert len(claim_deliveries(tx, EPOCH + timedelta(seconds=32), 20, 20)) == 8
