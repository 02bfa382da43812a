"""Several workers on one outbox: each delivery in the hands of one, and none lost with a worker."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter

from evalstop_service.store.database import Database
from evalstop_service.store.queue import deliveries
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.delivery.worker import DeliveryWorker, WorkerLimits

from tests.service.webhooks.delivery.fakes import (
    DEADLINE_SECONDS,
    EPOCH,
    LOOPBACK,
    FakeEndpoint,
    Reply,
    Scene,
    announce,
    deliver_until,
    reach,
    settled,
    states,
    take,
    utc_now,
)
from tests.service.webhooks.delivery.killing import worker_processes


def test_killed_while_sending(database: Database, database_url: str, scene: Scene) -> None:
    """What a worker was sending when it was killed is sent again by another, under the same id."""
    with FakeEndpoint(Reply()) as fake:
        fake.behavior = lambda _request, number: Reply(200, after=fake.released if number == 0 else None)
        scene.endpoint(database, fake.url)
        announce(database, scene)
        with worker_processes(database_url, 1, lease_seconds=3.0) as workers:
            workers.wait_for(lambda: len(fake.received) == 1)
        asyncio.run(deliver_until(settled(database, scene), database))
        with database.reading() as tx:
            (delivery,) = scene.all(tx)
            log = deliveries.list_attempts(tx, delivery)
    assert (delivery.state, delivery.attempts) == ("delivered", 2)
    assert [one.number for one in log] == [2], "the killed attempt left no record, and the other its own"
    assert len(fake.received) == 2
    assert len(set(fake.ids())) == 1


def test_workers_share(database: Database, scene: Scene) -> None:
    """Two workers on one outbox deliver everything, and no event twice while leases hold."""
    with FakeEndpoint(Reply(200)) as fake:
        scene.endpoint(database, fake.url)
        announce(database, scene, 60)

        async def both() -> None:
            await asyncio.gather(*(deliver_until(settled(database, scene), database) for _ in range(2)))

        asyncio.run(both())
    assert len(fake.received) == 60
    assert set(Counter(fake.ids()).values()) == {1}
    assert states(database, scene) == {"delivered": 60}


def test_claims_are_disjoint(database: Database, scene: Scene) -> None:
    """Workers that claim at the very same time never hold the same delivery."""
    scene.endpoint(database, "http://x.example")
    announce(database, scene, 120)
    workers = 4
    together = threading.Barrier(workers)
    claimed: list[str] = []
    failures: list[BaseException] = []

    def claim() -> None:
        try:
            for _ in range(10):
                together.wait(DEADLINE_SECONDS)
                with database.transaction() as tx:
                    got = take(tx, EPOCH, 60, 4, per_endpoint=16)
                claimed.extend(str(one.id) for one in got)
        except BaseException as error:
            failures.append(error)
            together.abort()

    threads = [threading.Thread(target=claim) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert claimed
    assert len(claimed) == len(set(claimed))


def test_gives_back_what_it_has_not_begun(database: Database, scene: Scene) -> None:
    """A worker that is told to stop leaves what it claimed ahead of time to others at once, not after its lease."""
    with FakeEndpoint(Reply(200)) as fake:
        fake.behavior = lambda _request, number: Reply(200, after=fake.released if number >= 2 else None)
        scene.endpoint(database, fake.url)
        announce(database, scene, 12)
        limits = WorkerLimits(concurrency=2, per_endpoint=2, ahead=6, poll_seconds=0.02, lease_seconds=600)

        async def run() -> None:
            stop = asyncio.Event()
            async with Sender(timeout_seconds=60, address_policy=LOOPBACK) as sender:
                worker = DeliveryWorker(database, sender, clock=utc_now, chance=random.Random(1), limits=limits)
                running = asyncio.create_task(worker.run(stop))
                await reach(lambda: attempts_begun(database, scene) >= 10, running)
                stop.set()
                await reach(lambda: waiting_now(database, scene) >= 8, running)
                fake.released.set()
                await asyncio.wait_for(running, DEADLINE_SECONDS)

        asyncio.run(run())
        begun = len(fake.received)
        assert begun < 12
        asyncio.run(deliver_until(settled(database, scene), database))
        assert len(fake.received) == len(set(fake.ids())) == 12


def attempts_begun(database: Database, scene: Scene) -> int:
    with database.reading() as tx:
        return sum(one.attempts for one in scene.all(tx))


def waiting_now(database: Database, scene: Scene) -> int:
    """How many may be claimed at this moment."""
    with database.reading() as tx:
        return sum(one.state == "waiting" and one.due_at <= utc_now() for one in scene.all(tx))
