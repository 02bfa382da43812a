"""The circuit breaker of an endpoint, through rows: open after failures, one attempt, closed when it goes well."""

from __future__ import annotations

from datetime import timedelta

from evalstop_service.store import endpoints
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.queue import leases, queues
from evalstop_service.store.queue.attempts import ClaimedDelivery, Dead, Delivered, FinishedAttempt, Result, Retry
from evalstop_service.store.queue.breakers import BreakerLimits

from tests.service.webhooks.delivery.fakes import EPOCH, Scene, a_scene, take

BREAKER = BreakerLimits(failures=3, seconds=30)


def end(tx: Transaction, claimed: ClaimedDelivery, result: Result, seconds: float = 0, code: int | None = 500) -> bool:
    """Settle one attempt; whether its endpoint is open since."""
    at = EPOCH + timedelta(seconds=seconds)
    settled = leases.settle_deliveries(tx, [FinishedAttempt(claimed, result, at, 1.0, code)], BREAKER)
    assert settled.kept == {claimed.id}
    return claimed.endpoint_id in settled.opened


def retry(seconds: float) -> Retry:
    return Retry(EPOCH + timedelta(seconds=seconds), "HTTP 500")


def broken(tx: Transaction, scene: Scene, waiting: int = 5) -> endpoints.Endpoint:
    """An endpoint that has failed three times, with so many other deliveries waiting for it; it is open for 30 s."""
    endpoint = endpoints.add_endpoint(tx, scene.project_id, url="http://x.example", event_types=["*"], now=EPOCH)
    for number in range(3 + waiting):
        scene.apart(tx, number)
    assert [end(tx, one, retry(1)) for one in take(tx, EPOCH, 10, 3)] == [False, False, True]
    return endpoint


def test_open_endpoints_are_left_alone(database: Database, scene: Scene) -> None:
    """After so many failures nothing is claimed for a while, no attempt is spent, and others are served."""
    with database.transaction() as tx:
        endpoint = broken(tx, scene)
        soon = EPOCH + timedelta(seconds=29)
        assert take(tx, soon, 10, 8) == []
        assert queues.find_next_due(tx, soon) == EPOCH + timedelta(seconds=30)
        assert sum(one.attempts for one in scene.all(tx)) == 3
        found = endpoints.find_endpoint(tx, scene.project_id, endpoint.id)
        assert found is not None
        assert (found.failures, found.open_until) == (3, EPOCH + timedelta(seconds=30))
        other = scene_endpoint(tx, scene)
        scene.apart(tx, 9, now=soon)
        assert [one.endpoint_id for one in take(tx, soon, 10, 8)] == [other.id]


def scene_endpoint(tx: Transaction, scene: Scene) -> endpoints.Endpoint:
    return endpoints.add_endpoint(tx, scene.project_id, url="http://y.example", event_types=["*"], now=EPOCH)


def test_one_attempt_then_closed(database: Database, scene: Scene) -> None:
    """After the pause one attempt is made and no other; when it goes well, everything that waits follows."""
    with database.transaction() as tx:
        endpoint = broken(tx, scene)
        later = EPOCH + timedelta(seconds=31)
        (probe,) = take(tx, later, 10, 8)
        assert take(tx, later, 10, 8) == [], "one attempt at a time"
        assert not end(tx, probe, Delivered(), 32, 200)
        found = endpoints.find_endpoint(tx, scene.project_id, endpoint.id)
        assert found is not None
        assert (found.failures, found.open_until) == (0, None)
        assert len(take(tx, later, 10, 8)) == 7


def test_one_attempt_then_open_again(database: Database, scene: Scene) -> None:
    """When the one attempt fails, it is left alone for as long again."""
    with database.transaction() as tx:
        broken(tx, scene)
        (probe,) = take(tx, EPOCH + timedelta(seconds=31), 10, 8)
        assert end(tx, probe, retry(60), 32)
        assert take(tx, EPOCH + timedelta(seconds=61), 10, 8) == []
        assert len(take(tx, EPOCH + timedelta(seconds=63), 10, 8)) == 1


def test_a_dead_worker_leaves_the_attempt_to_another(database: Database, scene: Scene) -> None:
    """Who took the one attempt and died holds it no longer than its lease."""
    with database.transaction() as tx:
        broken(tx, scene)
        assert len(take(tx, EPOCH + timedelta(seconds=31), 10, 8)) == 1
        assert take(tx, EPOCH + timedelta(seconds=40), 10, 8) == []
        assert len(take(tx, EPOCH + timedelta(seconds=42), 10, 8)) == 1


def test_a_refusal_is_no_failure(database: Database, scene: Scene) -> None:
    """An endpoint that refuses events works; what went well in between starts the count anew."""
    with database.transaction() as tx:
        scene_endpoint(tx, scene)
        for number in range(8):
            scene.apart(tx, number)
        results: list[tuple[Result, int | None]] = []
        results += [
            (retry(1), 500),
            (retry(1), None),
            (Dead("HTTP 400"), 400),
            (retry(1), 500),
            (retry(1), 503),
        ]
        results += [(Delivered(), 200), (retry(1), 500), (retry(1), 500)]
        for result, code in results:
            (claimed,) = take(tx, EPOCH, 10, 1)
            assert not end(tx, claimed, result, 0, code)


def test_a_mended_endpoint_is_tried_at_once(database: Database, scene: Scene) -> None:
    """With a new URL, or enabled by hand, an endpoint is not waited for."""
    with database.transaction() as tx:
        endpoint = broken(tx, scene)
        assert take(tx, EPOCH + timedelta(seconds=2), 10, 8) == []
        endpoints.update_endpoint(tx, scene.project_id, endpoint.id, url="http://new.example")
        assert len(take(tx, EPOCH + timedelta(seconds=2), 10, 8)) == 8


def test_two_workers_make_one_attempt(postgres_database: Database) -> None:
    """Of two workers that find the pause over at the same moment one makes the attempt; the other spends none."""
    database = postgres_database
    scene = a_scene(database)
    with database.transaction() as tx:
        broken(tx, scene)
    later = EPOCH + timedelta(seconds=31)
    with database.transaction() as one, database.transaction() as other:
        other.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
        assert len(leases.claim_deliveries(one, later, 10, 8, 8)) == 1
        assert leases.claim_deliveries(other, later, 10, 8, 8) == []
    with database.reading() as tx:
        assert sum(one.attempts for one in scene.all(tx)) == 4
