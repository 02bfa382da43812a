"""The database clock that workers go by, and the repair of due times after the clock was set back."""

from __future__ import annotations

import asyncio
import threading
from datetime import datetime, timedelta
from functools import partial

from evalstop_service.clock import Clock, utc_now
from evalstop_service.store.database import Database
from evalstop_service.store.queue import pull
from evalstop_service.store.queue.attempts import Delivered
from evalstop_service.store.queue.deliveries import Delivery
from evalstop_service.webhooks.delivery.database_clock import ClockSkewRepair, DatabaseClock
from evalstop_service.webhooks.delivery.worker import WorkerLimits
from evalstop_service.webhooks.retry import Backoff

from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.webhooks.delivery.fakes import (
    EPOCH,
    FakeEndpoint,
    Reply,
    SeededProject,
    claim_deliveries,
    run_worker,
    seed_project,
    settle_delivery,
    wait_until,
)

HOUR = timedelta(hours=1)


def test_clock_advances_between_two_readings() -> None:
    """Between two readings of the database's clock, time advances by the monotonic clock."""
    database_clock = DatabaseClock()
    assert not database_clock.set_time(EPOCH, 100.0)
    assert database_clock.now(102.5) == EPOCH + timedelta(seconds=2.5)
    assert not database_clock.set_time(EPOCH + timedelta(seconds=9.5), 110.0), "a small drift is not a setback"
    assert database_clock.now(110.0) == EPOCH + timedelta(seconds=9.5)


def test_clock_skew_is_detected_once() -> None:
    """A clock that shows less time than has passed was set back; one that shows more was not."""
    database_clock = DatabaseClock()
    database_clock.set_time(EPOCH, 0.0)
    assert database_clock.set_time(EPOCH - HOUR, 1.0)
    assert not database_clock.set_time(EPOCH - HOUR + timedelta(seconds=1), 2.0), "a setback is reported once"
    assert not database_clock.set_time(EPOCH + HOUR, 3.0)


def test_repair_waits_for_leases(database: Database, project: SeededProject) -> None:
    """After a setback, untried deliveries are due at once, retried ones only after every lease has ended."""
    project.add_endpoint(database, "http://x.example")
    later = EPOCH + HOUR
    with database.transaction() as tx:
        project.add_event_of_new_run(tx, now=later)
        (claimed,) = claim_deliveries(tx, later, 60, 1)
        project.add_event_of_new_run(tx, now=later)
    repair = ClockSkewRepair(longest_seconds=900, lease_seconds=60)
    assert repair.is_due(False, 10.0)
    assert repair.repair_due_times(database, EPOCH, 10.0)
    with database.transaction() as tx:
        assert len(claim_deliveries(tx, EPOCH, 60, 9)) == 1
    assert not repair.is_due(False, 50.0)
    assert repair.is_due(True, 50.0)
    assert not repair.repair_due_times(database, EPOCH, 50.0), "a worker may still hold the lease"
    assert repair.repair_due_times(database, EPOCH, 70.0)
    with database.transaction() as tx:
        assert claimed.id in {delivery.id for delivery in claim_deliveries(tx, EPOCH, 60, 9)}
        assert not settle_delivery(tx, claimed, Delivered())


def test_long_lease_of_a_receiver_is_not_misdated(database: Database, project: SeededProject) -> None:
    """An event that a receiver has fetched for ten minutes is not given out again, however short workers' pauses."""
    with database.transaction() as tx:
        endpoint = pull.add_pull_endpoint(tx, project.id, name="receiver", event_types=EVERY_EVENT, now=EPOCH)
        project.add_event_of_new_run(tx, now=EPOCH)
        (claimed,) = pull.claim_deliveries(tx, endpoint, EPOCH, pull.MAX_LEASE_SECONDS, 1)
    repair = ClockSkewRepair(longest_seconds=60, lease_seconds=60)
    for seconds in (1, 62, 123):
        assert not repair.repair_due_times(database, EPOCH + timedelta(seconds=seconds), float(seconds))
    with database.transaction() as tx:
        assert pull.claim_deliveries(tx, endpoint, claimed.lease_until - timedelta(seconds=1), 60, 1) == []


class FakeClock:
    """The real time plus an offset that tests change."""

    def __init__(self) -> None:
        self._offset = timedelta(0)

    def __call__(self) -> datetime:
        return utc_now() + self._offset

    def set_back(self, by: timedelta) -> None:
        self._offset -= by


def test_clock_skew_neither_stalls_nor_repeats_deliveries(database: Database, project: SeededProject) -> None:
    """When the clock goes back an hour, waiting, running and retried deliveries all arrive, and no attempt runs
    twice."""
    clock = FakeClock()
    first_try = threading.Event()

    def behavior(_request: object, number: int) -> Reply:
        if number == 0:  # still running when the clock is set back
            first_try.set()
            return Reply(200, after=fake.released)
        return Reply(503 if number == 1 else 200)

    with FakeEndpoint(behavior) as fake:
        project.add_endpoint(database, fake.url)

        def add_event() -> None:
            with database.transaction() as tx:
                project.add_event_of_new_run(tx, now=clock())

        async def run() -> None:
            limits = WorkerLimits(concurrency=2, per_endpoint=2, ahead=0, poll_seconds=0.05, lease_seconds=3.0)
            backoff = Backoff(first_seconds=0.4, cap_seconds=1.0)
            add_event()
            add_event()
            async with run_worker(
                database, timeout_seconds=2.5, clock=clock, backoff=backoff, limits=limits
            ) as running:
                await wait_until(lambda: len(fake.received) == 2, running)
                add_event()  # dated by the clock before the setback
                clock.set_back(HOUR)
                add_event()
                fake.released.set()
                await wait_until(
                    lambda: "waiting" not in {delivery.state for delivery in list_deliveries(database, project)},
                    running,
                )

        asyncio.run(run())
    listed = list_deliveries(database, project)
    assert {delivery.state for delivery in listed} == {"delivered"}
    assert sorted(delivery.attempts for delivery in listed) == [1, 1, 1, 2], (
        "only the delivery that got a 503 was tried again"
    )
    assert len(fake.received) == 5


def test_worker_clocks_do_not_matter(postgres_database: Database) -> None:
    """A worker whose clock is an hour off claims no leased delivery early and no due one late."""
    database = postgres_database
    project = seed_project(database)
    with FakeEndpoint(Reply(200)) as fake:
        project.add_endpoint(database, fake.url)
        for offset in (HOUR, -HOUR):
            with database.transaction() as tx:
                project.add_event_of_new_run(tx, now=utc_now())
                (claimed,) = claim_deliveries(tx, utc_now(), 600, 1)
                project.add_event_of_new_run(tx, now=utc_now())
            asyncio.run(deliver_one_event(database, partial(read_shifted_clock, offset), fake))
            listed = {delivery.id: delivery for delivery in list_deliveries(database, project)}
            assert (listed[claimed.id].state, listed[claimed.id].attempts) == ("waiting", 1)


def read_shifted_clock(offset: timedelta) -> datetime:
    return utc_now() + offset


async def deliver_one_event(database: Database, clock: Clock, fake: FakeEndpoint) -> None:
    before = len(fake.received)
    limits = WorkerLimits(poll_seconds=0.02)
    async with run_worker(database, timeout_seconds=5, clock=clock, limits=limits) as running:
        await wait_until(lambda: len(fake.received) == before + 1, running)


def list_deliveries(database: Database, project: SeededProject) -> list[Delivery]:
    with database.reading() as tx:
        return project.list_deliveries(tx)
