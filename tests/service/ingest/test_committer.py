"""Group commit: what waits goes together, each is answered for itself, and no more may wait than was allowed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.errors import Behind, Closed, Conflict, NotFound, Overloaded
from evalstop_service.ingest import Arrival, Committer, Limits, LiveRuns, Points, Receipt, Saved
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import policies, projects, tables
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.runs import Run
from evalstop_service.web.problems import problem_of

from tests.service.scenes import Scene, evals, set_up

DEADLINE_SECONDS = 30.0

SLOW: dict[str, Any] = {
    "name": "slow",
    "members": [{"detector": "k_decline"}, *({"detector": "bocpd", "id": f"b{number}"} for number in range(8))],
}
"""A policy whose detectors take so long that other threads have their turn meanwhile."""


@pytest.fixture
def service_metrics() -> ServiceMetrics:
    return ServiceMetrics()


@pytest.fixture
def committer(scene: Scene, service_metrics: ServiceMetrics) -> Iterator[Committer]:
    committer = Committer(scene.database, LiveRuns(), utc_now, service_metrics, Limits(flushers=2, waiting=50))
    yield committer
    committer.close()


def posting(scene: Scene, run: Run, *values: float, start: int = 0) -> Arrival:
    return Arrival(scene.project_id, run.id, Points(tuple(evals(*values, start=start))))


def sample(service_metrics: ServiceMetrics, name: str) -> float:
    value = service_metrics.registry.get_sample_value(name)
    assert value is not None
    return value


def wait_until(committer: Committer, count: int) -> None:
    """Wait until so many observations are on their way."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while committer.waiting != count:
        assert time.monotonic() < deadline, f"{committer.waiting} wait, not {count}"
        time.sleep(0.002)


async def knock(committer: Committer, arrival: Arrival) -> None:
    """Offer what there is no room for, until it is refused for another reason."""
    while True:
        with suppress(Overloaded):
            await committer.soon(arrival)


def test_what_waits_goes_together(scene: Scene, committer: Committer, service_metrics: ServiceMetrics) -> None:
    """Posts that arrive while the only writer is held up are committed together, and each gets its own receipt."""
    first, others = scene.open(), [scene.open() for _ in range(9)]
    with ThreadPoolExecutor(10) as threads:
        with scene.database.transaction() as tx:
            if not scene.database.embedded:
                tx.exec_driver_sql("LOCK TABLE runs IN ACCESS EXCLUSIVE MODE")
            answers = [threads.submit(committer.take, posting(scene, run, 0.1, 0.2)) for run in (first, *others)]
            wait_until(committer, 20)
        receipts = [answer.result(DEADLINE_SECONDS) for answer in answers]
    assert [receipt.accepted for receipt in receipts] == [2] * 10
    assert [receipt.run.id for receipt in receipts] == [run.id for run in (first, *others)]
    assert sample(service_metrics, "evalstop_commit_requests_sum") == 10
    assert sample(service_metrics, "evalstop_commit_requests_count") <= 4


def test_one_refusal_is_one_answer(scene: Scene, committer: Committer) -> None:
    """In a group, an unknown run and a checkpoint that moved are refused; their neighbors are taken."""
    run = scene.open()
    committer.take(Arrival(scene.project_id, run.id, Saved(1, "file:///1")))

    async def together() -> Sequence[Receipt | BaseException]:
        return await asyncio.gather(
            committer.soon(Arrival(scene.project_id, new_id(), Points(tuple(evals(0.1))))),
            committer.soon(Arrival(scene.project_id, run.id, Saved(1, "file:///elsewhere"))),
            committer.soon(Arrival(new_id(), run.id, Points(tuple(evals(0.1))))),
            committer.soon(posting(scene, run, 0.5)),
            return_exceptions=True,
        )

    unknown, moved, foreign, taken = asyncio.run(together())
    assert isinstance(unknown, NotFound)
    assert isinstance(moved, Conflict)
    assert isinstance(foreign, NotFound)
    assert isinstance(taken, Receipt)
    assert taken.accepted == 1


def test_a_policy_of_a_later_release_refuses_for_now(scene: Scene, committer: Committer) -> None:
    """After a way back to this release a run whose policy it cannot read is to be sent again; its neighbor is taken."""
    behind, run = scene.open(policy="paper"), scene.open(policy="cautious")
    with scene.database.transaction() as tx:
        of_it = tables.policies.c.id == behind.policy_id
        tx.execute(tables.policies.update().where(of_it).values(document={"name": "paper", "members": "later"}))

    async def together() -> Sequence[Receipt | BaseException]:
        arrivals = [posting(scene, item, 0.5) for item in (behind, run)]
        return await asyncio.gather(*map(committer.soon, arrivals), return_exceptions=True)

    refused, taken = asyncio.run(together())
    assert isinstance(refused, Behind)
    assert problem_of(refused).status == 503
    assert isinstance(taken, Receipt)
    assert taken.accepted == 1
    assert scene.rows(tables.observations, behind) == []


def test_one_fault_is_one_answer(scene: Scene, committer: Committer) -> None:
    """A request that breaks the transaction of its group fails alone; the others are stored."""
    good, bad = scene.open(), scene.open()
    with scene.database.transaction() as tx:  # a constraint that one run violates
        if scene.database.embedded:
            tx.exec_driver_sql(
                "CREATE TRIGGER spoiler BEFORE INSERT ON observations WHEN NEW.value = 666"
                " BEGIN SELECT RAISE(ABORT, 'spoiled'); END"
            )
        else:
            tx.exec_driver_sql("ALTER TABLE observations ADD CONSTRAINT spoiler CHECK (value <> 666)")

    async def together() -> Sequence[Receipt | BaseException]:
        return await asyncio.gather(
            committer.soon(posting(scene, good, 0.1)),
            committer.soon(posting(scene, bad, 666.0)),
            committer.soon(posting(scene, scene.open(), 0.3)),
            return_exceptions=True,
        )

    first, failed, third = asyncio.run(together())
    assert isinstance(first, Receipt)
    assert isinstance(third, Receipt)
    assert isinstance(failed, sa.exc.IntegrityError)
    assert len(scene.rows(tables.observations, good)) == 1
    assert scene.rows(tables.observations, bad) == []


def test_no_more_waits_than_may(scene: Scene, committer: Committer, service_metrics: ServiceMetrics) -> None:
    """While the database is held up, what exceeds the limit is refused; what was admitted is stored after all."""
    run = scene.open()
    with ThreadPoolExecutor(10) as threads:
        with scene.database.transaction() as tx:
            tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == run.id).with_for_update())
            admitted = [
                threads.submit(committer.take, posting(scene, run, *[0.1] * 10, start=10 * batch)) for batch in range(5)
            ]
            wait_until(committer, 50)
            with pytest.raises(Overloaded):
                committer.take(posting(scene, run, 0.1, start=50))
        assert sum(answer.result(DEADLINE_SECONDS).accepted for answer in admitted) == 50
    assert service_metrics.registry.get_sample_value("evalstop_refused_requests_total", {"reason": "overloaded"}) == 1
    assert committer.take(posting(scene, run, 0.1, start=50)).accepted == 1


def test_a_batch_larger_than_the_limit_is_taken_alone(scene: Scene, committer: Committer) -> None:
    """A limit below the size of one batch does not refuse it for ever."""
    assert committer.take(posting(scene, scene.open(), *[0.1] * 200)).accepted == 200


def test_closing_commits_what_waits(scene: Scene, service_metrics: ServiceMetrics) -> None:
    """Closing answers everything that was admitted, and refuses what comes after."""
    committer = Committer(scene.database, LiveRuns(), utc_now, service_metrics, Limits(flushers=1))
    run = scene.open()
    with ThreadPoolExecutor(4) as threads:
        with scene.database.transaction() as tx:
            tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == run.id).with_for_update())
            answers = [threads.submit(committer.take, posting(scene, run, 0.1, start=step)) for step in range(4)]
            wait_until(committer, 4)
            closing = threading.Thread(target=committer.close)
            closing.start()
        closing.join(DEADLINE_SECONDS)
    assert [answer.result(DEADLINE_SECONDS).accepted for answer in answers] == [1, 1, 1, 1]
    with pytest.raises(Closed):
        committer.take(posting(scene, run, 0.1, start=9))
    assert len(scene.rows(tables.observations, run)) == 4


def test_a_call_for_a_flusher_does_not_reach_whoever_closes(postgres_database: Database) -> None:
    """A verdict that turns while the committer closes is stored: what it takes is seen by a flusher, and all ends."""
    scene = set_up(postgres_database)
    with postgres_database.transaction() as tx:
        policies.add_policy(tx, projects.get_project(tx, scene.project_id), "slow", SLOW, utc_now())

    async def round_trip() -> None:
        committer = Committer(scene.database, LiveRuns(), utc_now, ServiceMetrics(), Limits(flushers=1, waiting=100))
        before, turning = scene.open(), scene.open(policy="slow")
        async with committer.at_home():
            for run in (before, turning):  # by the flusher, which is idle then, and the runs are remembered
                await committer.soon(posting(scene, run, 1.0))
            with scene.database.transaction() as tx:
                tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == before.id).with_for_update())
                held_up = asyncio.create_task(committer.soon(posting(scene, before, 0.5, start=1)))
                while committer.waiting < 1:
                    await asyncio.sleep(0)
                falling = [1.0 - step / 200 for step in range(1, 100)]
                waiting = asyncio.create_task(committer.soon(posting(scene, turning, *falling, start=1)))
                while committer.waiting < 100:
                    await asyncio.sleep(0)
                closing = threading.Thread(target=committer.close, daemon=True)
                closing.start()
                with pytest.raises(Closed):  # from then on the one that closes waits
                    await knock(committer, posting(scene, before, 0.4, start=2))
            assert (await held_up).accepted == 1
            receipt = await asyncio.wait_for(waiting, DEADLINE_SECONDS)
            assert receipt.run.verdict["verdict"] != "continue"

    for _ in range(5):
        asyncio.run(round_trip())


def test_a_run_is_taken_in_order(scene: Scene, committer: Committer) -> None:
    """What one caller posts one after another is taken in that order, however many flushers there are."""
    run = scene.open(policy="paper")

    async def one_by_one() -> list[int]:
        posts = [committer.soon(posting(scene, run, 1.0 - step / 100, start=step)) for step in range(40)]
        return [receipt.run.last_step or 0 for receipt in await asyncio.gather(*posts)]

    assert asyncio.run(one_by_one()) == list(range(40))


def test_a_client_that_left(scene: Scene, committer: Committer) -> None:
    """Whoever stops waiting costs nobody else an answer, and the points stay stored."""
    run, other = scene.open(), scene.open()

    async def leave() -> Receipt:
        leaving = asyncio.ensure_future(committer.soon(posting(scene, run, 0.1)))
        staying = asyncio.ensure_future(committer.soon(posting(scene, other, 0.2)))
        await asyncio.sleep(0)
        leaving.cancel()
        return await staying

    assert asyncio.run(leave()).accepted == 1
    assert committer.take(posting(scene, run, 0.1)).duplicates == 1
