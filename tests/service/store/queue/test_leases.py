"""Leases of deliveries, and circuit breakers of their endpoints: what a worker can do with them, and after them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.statuses import DeliveryState
from evalstop_service.store import endpoints, tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.queue import leases, outbox
from evalstop_service.store.queue.attempts import (
    BreakerLimits,
    ClaimedDelivery,
    Dead,
    Delivered,
    FinishedAttempt,
    Result,
    Retry,
)
from evalstop_service.store.tables import deliveries as delivery_table
from evalstop_service.store.tables import events

from tests.service.concurrency import wait_for_blocked_process
from tests.service.webhooks.delivery.fakes import EPOCH, SeededProject, claim_deliveries, seed_project, settle_delivery


@pytest.mark.parametrize(
    "late_result", [Delivered(), Dead("HTTP 400"), Retry(EPOCH, "HTTP 500"), Dead("gone", gone=True)]
)
def test_lost_lease_settles_nothing(database: Database, project: SeededProject, late_result: Result) -> None:
    """A worker whose lease was taken over can neither settle the delivery nor disable its endpoint."""
    endpoint = project.add_endpoint(database, "http://x.example")
    later = EPOCH + timedelta(seconds=11)
    with database.transaction() as tx:
        project.add_event(tx)
        (lost,) = claim_deliveries(tx, EPOCH, 10, 1)
        assert claim_deliveries(tx, later - timedelta(seconds=2), 10, 1) == []
        (reclaimed,) = claim_deliveries(tx, later, 10, 1)
        assert not settle_delivery(tx, lost, late_result, later)
        (delivery,) = project.list_deliveries(tx)
        assert (delivery.state, delivery.due_at, delivery.attempts) == ("waiting", reclaimed.lease_until, 2)
        assert outbox.list_attempts(tx, delivery) == []
        assert endpoints.find_endpoint(tx, project.id, endpoint.id) == endpoint
        assert settle_delivery(tx, reclaimed, Delivered(), later)
        assert not settle_delivery(tx, lost, Dead("HTTP 400"), later)
        assert project.list_deliveries(tx)[0].state == "delivered"


def test_deliveries_of_one_run_are_settled_apart(database: Database, project: SeededProject) -> None:
    """What one endpoint answered is not recorded for another that has the same event, and was cancelled meanwhile."""
    for url in ("http://x.example", "http://y.example"):
        project.add_endpoint(database, url)
    with database.transaction() as tx:
        project.add_event(tx)
        (cancelled,), (held,) = claim_deliveries(tx, EPOCH, 10, 1), claim_deliveries(tx, EPOCH, 10, 1)
        is_cancelled = delivery_table.c.id == cancelled.id
        tx.execute(sa.update(delivery_table).where(is_cancelled).values(state="cancelled"))
        leases.settle_deliveries(tx, [FinishedAttempt(claimed, Delivered(), EPOCH) for claimed in (cancelled, held)])
        states = {delivery.id: delivery.state for delivery in project.list_deliveries(tx)}
    assert states == {cancelled.id: "cancelled", held.id: "delivered"}


def test_batch_settles_each_attempt(database: Database, project: SeededProject) -> None:
    """A batch records each result as if settled alone; lost leases and cancelled deliveries are reported and
    skipped."""
    endpoint = project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        for number in range(6):
            project.add_event_of_new_run(tx, number)
        delivered, retried, dead, lost, cancelled = claim_deliveries(tx, EPOCH, 10, 5)
        tx.execute(sa.update(delivery_table).where(delivery_table.c.id == lost.id).values(attempts=2))
        tx.execute(sa.update(delivery_table).where(delivery_table.c.id == cancelled.id).values(state="cancelled"))
        at = EPOCH + timedelta(seconds=1)
        later = EPOCH + timedelta(minutes=1)
        settled = leases.settle_deliveries(
            tx,
            [
                FinishedAttempt(delivered, Delivered(), at, 1.5, 204),
                FinishedAttempt(retried, Retry(later, "HTTP 503"), at, 2.5, 503),
                FinishedAttempt(dead, Dead("HTTP 400"), at, 3.5, 400),
                FinishedAttempt(lost, Delivered(), at, 1.0, 200),
                FinishedAttempt(cancelled, Delivered(), at, 1.0, 200),
            ],
        )
        held = dict.fromkeys((delivered.id, retried.id, dead.id), DeliveryState.WAITING)
        assert settled == held | {cancelled.id: DeliveryState.CANCELLED}
        stored = {delivery.id: delivery for delivery in project.list_deliveries(tx)}
        assert [
            (stored[delivery.id].state, stored[delivery.id].last_error) for delivery in (delivered, retried, dead, lost)
        ] == [
            ("delivered", None),
            ("waiting", "HTTP 503"),
            ("dead", "HTTP 400"),
            ("waiting", None),
        ]
        assert stored[retried.id].due_at == later
        attempt_logs = [
            [(a.number, a.status_code) for a in outbox.list_attempts(tx, stored[delivery.id])]
            for delivery in stored.values()
        ]
        assert sorted(attempt_logs) == [[], [], [], [(1, 204)], [(1, 400)], [(1, 503)]]
        assert endpoints.find_endpoint(tx, project.id, endpoint.id) == endpoint


def test_stop_claimed_while_its_cancellation_waits_is_cancelled(postgres_database: Database) -> None:
    """A stop that a worker claims while its cancellation waits for the row is cancelled, and not sent again."""
    database = postgres_database
    project = seed_project(database)
    project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        decision = project.insert_decision(tx)
        project.add_event(tx, event_type=EventType("run.stop_requested"), decision_id=decision.id)

    def cancel() -> int:
        with database.transaction() as tx:
            return outbox.cancel_stop(tx, project.run_id, decision.id, EPOCH, "vetoed")

    with ThreadPoolExecutor(1) as threads:
        with database.transaction() as tx:
            assert len(claim_deliveries(tx, EPOCH, 60, 1)) == 1
            cancelling = threads.submit(cancel)
            wait_for_blocked_process(database)
        assert cancelling.result(30) == 1
    with database.transaction() as tx:
        assert claim_deliveries(tx, EPOCH + timedelta(hours=1), 60, 1) == []


@pytest.mark.parametrize("name", ["settle", "delete", "cancel"])
def test_deliveries_are_locked_in_one_order(postgres_database: Database, name: str) -> None:
    """Batch changes lock deliveries in the order of ids, so they cannot deadlock."""
    database = postgres_database
    project = seed_project(database)
    endpoint = project.add_endpoint(database, "http://x.example")
    with database.transaction() as tx:
        decision = project.insert_decision(tx)
        for number in range(20):
            project.add_event(tx, number, decision_id=decision.id)
        tx.execute(sa.update(events).values(type="run.stop_requested"))  # as if the stop had been requested 20 times
        claimed = sorted(claim_deliveries(tx, EPOCH, 60, 20), key=lambda delivery: delivery.id)
        for number, delivery in enumerate(reversed(claimed)):  # so that no index happens to have the order of the ids
            tx.execute(
                sa.update(delivery_table)
                .where(delivery_table.c.id == delivery.id)
                .values(due_at=EPOCH + timedelta(seconds=number))
            )
    ends = [FinishedAttempt(delivery, Delivered(), EPOCH) for delivery in reversed(claimed)]
    calls: dict[str, Callable[[Transaction], object]] = {
        "settle": partial(leases.settle_deliveries, ended=ends),
        "delete": partial(endpoints.delete_endpoint, project_id=project.id, endpoint_id=endpoint.id, now=EPOCH),
        "cancel": partial(
            outbox.cancel_stop, run_id=project.run_id, decision_id=decision.id, now=EPOCH, reason="vetoed"
        ),
    }

    def run_call() -> None:
        with database.transaction() as tx:
            calls[name](tx)

    def lock_delivery(tx: Transaction, delivery: ClaimedDelivery) -> object:
        return tx.execute(
            sa.select(delivery_table.c.id).where(delivery_table.c.id == delivery.id).with_for_update(nowait=True)
        ).all()

    with ThreadPoolExecutor(1) as threads, database.transaction() as tx:
        lock_delivery(tx, claimed[0])
        blocked_call = threads.submit(run_call)
        wait_for_blocked_process(database)
        lock_delivery(tx, claimed[-1])
        tx.commit()
        blocked_call.result(30)


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
