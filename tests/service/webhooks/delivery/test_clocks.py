"""The time between two looks, and a clock that was set back."""

from __future__ import annotations

import asyncio
import random
import threading
from datetime import datetime, timedelta
from functools import partial

from evalstop_service.clock import Clock
from evalstop_service.store.database import Database
from evalstop_service.store.queue.attempts import Delivered
from evalstop_service.store.queue.deliveries import Delivery
from evalstop_service.webhooks.delivery.clock_skew import ClockSkewRepair
from evalstop_service.webhooks.delivery.database_clock import DatabaseClock
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.delivery.worker import DeliveryWorker, WorkerLimits
from evalstop_service.webhooks.retry import Backoff

from tests.service.webhooks.delivery.fakes import (
    DEADLINE_SECONDS,
    EPOCH,
    LOOPBACK,
    FakeEndpoint,
    Reply,
    Scene,
    a_scene,
    reach,
    settle,
    take,
    utc_now,
)

HOUR = timedelta(hours=1)


def test_goes_on_between_two_looks() -> None:
    """Between two looks time passes as the steady clock says."""
    keeper = DatabaseClock()
    assert not keeper.set_time(EPOCH, 100.0)
    assert keeper.now(102.5) == EPOCH + timedelta(seconds=2.5)
    assert not keeper.set_time(EPOCH + timedelta(seconds=9.5), 110.0), "clocks drift apart a little"
    assert keeper.now(110.0) == EPOCH + timedelta(seconds=9.5)


def test_notices_a_clock_set_back() -> None:
    """A clock that says less than has passed was set back; one that says more was not."""
    keeper = DatabaseClock()
    keeper.set_time(EPOCH, 0.0)
    assert keeper.set_time(EPOCH - HOUR, 1.0)
    assert not keeper.set_time(EPOCH - HOUR + timedelta(seconds=1), 2.0), "it is noticed once"
    assert not keeper.set_time(EPOCH + HOUR, 3.0)


def test_waits_for_leases_before_it_mends(database: Database, scene: Scene) -> None:
    """After a setback what was never tried is due at once, what was tried only once no worker can hold it any more."""
    scene.endpoint(database, "http://x.example")
    later = EPOCH + HOUR
    with database.transaction() as tx:
        scene.apart(tx, now=later)
        (held,) = take(tx, later, 60, 1)
        scene.apart(tx, now=later)
    setback = ClockSkewRepair(longest_seconds=900, lease_seconds=60)
    assert setback.is_due(False, 10.0)
    assert setback.repair_due_times(database, EPOCH, 10.0)
    with database.transaction() as tx:
        assert len(take(tx, EPOCH, 60, 9)) == 1
    assert not setback.is_due(False, 50.0)
    assert setback.is_due(True, 50.0)
    assert not setback.repair_due_times(database, EPOCH, 50.0), "a worker may hold it yet"
    assert setback.repair_due_times(database, EPOCH, 70.0)
    with database.transaction() as tx:
        assert held.id in {one.id for one in take(tx, EPOCH, 60, 9)}
        assert not settle(tx, held, Delivered())


class FakeClock:
    """Tells the time, and can be set."""

    def __init__(self) -> None:
        self._off = timedelta(0)

    def __call__(self) -> datetime:
        return utc_now() + self._off

    def set_back(self, by: timedelta) -> None:
        self._off -= by


def test_a_clock_set_back_stalls_and_repeats_nothing(database: Database, scene: Scene) -> None:
    """While the clock goes back an hour, what waits, what is under way and what is to be retried all arrive, each event
    under way once."""
    clock = FakeClock()
    first_try = threading.Event()

    def behavior(_request: object, number: int) -> Reply:
        if number == 0:  # under way while the clock is set back
            first_try.set()
            return Reply(200, after=fake.released)
        return Reply(503 if number == 1 else 200)

    with FakeEndpoint(behavior) as fake:
        scene.endpoint(database, fake.url)

        def announce() -> None:
            with database.transaction() as tx:
                scene.apart(tx, now=clock())

        async def run() -> None:
            stop = asyncio.Event()
            async with Sender(timeout_seconds=2.5, address_policy=LOOPBACK) as sender:
                worker = DeliveryWorker(
                    database,
                    sender,
                    clock=clock,
                    chance=random.Random(1),
                    backoff=Backoff(first_seconds=0.4, cap_seconds=1.0),
                    limits=WorkerLimits(concurrency=2, per_endpoint=2, ahead=0, poll_seconds=0.05, lease_seconds=3.0),
                )
                announce()
                announce()
                running = asyncio.create_task(worker.run(stop))
                await reach(lambda: len(fake.received) == 2, running)
                announce()  # by the clock of before
                clock.set_back(HOUR)
                announce()
                fake.released.set()
                await reach(lambda: "waiting" not in {one.state for one in all_of(database, scene)}, running)
                stop.set()
                await asyncio.wait_for(running, DEADLINE_SECONDS)

        asyncio.run(run())
    found = all_of(database, scene)
    assert {one.state for one in found} == {"delivered"}
    assert sorted(one.attempts for one in found) == [1, 1, 1, 2], "one had to be retried, and no other was repeated"
    assert len(fake.received) == 5


def test_clocks_of_machines_do_not_matter(postgres_database: Database) -> None:
    """A worker whose clock is an hour ahead leaves alone what another holds, and is not late where it is behind."""
    database = postgres_database
    scene = a_scene(database)
    with FakeEndpoint(Reply(200)) as fake:
        scene.endpoint(database, fake.url)
        for off in (HOUR, -HOUR):
            with database.transaction() as tx:
                scene.apart(tx, now=utc_now())
                (held,) = take(tx, utc_now(), 600, 1)
                scene.apart(tx, now=utc_now())
            asyncio.run(deliver_one(database, partial(told_off_by, off), fake))
            found = {one.id: one for one in all_of(database, scene)}
            assert (found[held.id].state, found[held.id].attempts) == ("waiting", 1)


def told_off_by(off: timedelta) -> datetime:
    return utc_now() + off


async def deliver_one(database: Database, clock: Clock, fake: FakeEndpoint) -> None:
    stop = asyncio.Event()
    before = len(fake.received)
    async with Sender(timeout_seconds=5, address_policy=LOOPBACK) as sender:
        worker = DeliveryWorker(
            database, sender, clock=clock, chance=random.Random(1), limits=WorkerLimits(poll_seconds=0.02)
        )
        running = asyncio.create_task(worker.run(stop))
        await reach(lambda: len(fake.received) == before + 1, running)
        stop.set()
        await asyncio.wait_for(running, DEADLINE_SECONDS)


def all_of(database: Database, scene: Scene) -> list[Delivery]:
    with database.reading() as tx:
        return scene.all(tx)
