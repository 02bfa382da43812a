"""Group commit: what waits goes together, each is answered for itself, and no more may wait than was allowed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace

import pytest
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.errors import Behind, Closed, Conflict, NotFound, Overloaded
from evalstop_service.ingest import (
    CheckpointSaved,
    Committer,
    Content,
    Limits,
    Message,
    Observations,
    Receipt,
    Resumed,
    RunCache,
    running_in_thread,
)
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import policies, projects, runs, tables
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.problems import problem_of

from tests.faults.run_records import count_deadlocks
from tests.service.committers import run_on_loop
from tests.service.project_fixture import (
    DECLINING_EVALS,
    NOW,
    ProjectFixture,
    evals,
    set_up_project,
    wait_for_blocked_process,
)

DEADLINE_SECONDS = 30.0


@pytest.fixture
def service_metrics() -> ServiceMetrics:
    return ServiceMetrics()


@pytest.fixture
def committer(project: ProjectFixture, service_metrics: ServiceMetrics) -> Iterator[Committer]:
    committer = Committer(project.database, RunCache(), utc_now, service_metrics, Limits(waiting=50))
    running = AsyncExitStack()
    run_on_loop(running.enter_async_context(committer.run()))
    yield committer
    run_on_loop(running.aclose())


def posting(project: ProjectFixture, run: Run, *values: float, start: int = 0) -> Message:
    return Message(project.id, run.id, Observations(tuple(evals(*values, start=start))))


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


def test_what_waits_goes_together(
    project: ProjectFixture, committer: Committer, service_metrics: ServiceMetrics
) -> None:
    """Posts that arrive while the only writer is held up are committed together, and each gets its own receipt."""
    first, others = project.open_run(), [project.open_run() for _ in range(9)]
    with ThreadPoolExecutor(10) as threads:
        with project.database.transaction() as tx:
            if not project.database.embedded:
                tx.exec_driver_sql("LOCK TABLE runs IN ACCESS EXCLUSIVE MODE")
            answers = [
                threads.submit(committer.submit_and_wait, posting(project, run, 0.1, 0.2)) for run in (first, *others)
            ]
            wait_until(committer, 20)
        receipts = [answer.result(DEADLINE_SECONDS) for answer in answers]
    assert [receipt.accepted for receipt in receipts] == [2] * 10
    assert [receipt.run.id for receipt in receipts] == [run.id for run in (first, *others)]
    assert sample(service_metrics, "evalstop_commit_requests_sum") == 10
    assert sample(service_metrics, "evalstop_commit_requests_count") <= 4


def test_one_refusal_is_one_answer(project: ProjectFixture, committer: Committer) -> None:
    """In a group, an unknown run and a checkpoint that moved are refused; their neighbors are taken."""
    run = project.open_run()
    committer.submit_and_wait(Message(project.id, run.id, CheckpointSaved(1, "file:///1")))

    async def together() -> Sequence[Receipt | BaseException]:
        return await asyncio.gather(
            committer.submit(Message(project.id, new_id(), Observations(tuple(evals(0.1))))),
            committer.submit(Message(project.id, run.id, CheckpointSaved(1, "file:///elsewhere"))),
            committer.submit(Message(new_id(), run.id, Observations(tuple(evals(0.1))))),
            committer.submit(posting(project, run, 0.5)),
            return_exceptions=True,
        )

    unknown, moved, foreign, taken = run_on_loop(together())
    assert isinstance(unknown, NotFound)
    assert isinstance(moved, Conflict)
    assert isinstance(foreign, NotFound)
    assert isinstance(taken, Receipt)
    assert taken.accepted == 1


def test_a_policy_of_a_later_release_refuses_for_now(project: ProjectFixture, committer: Committer) -> None:
    """After a way back to this release a run whose policy it cannot read is to be sent again; its neighbor is taken."""
    behind, run = project.open_run(policy="paper"), project.open_run(policy="cautious")
    with project.database.transaction() as tx:
        of_it = tables.policies.c.id == behind.policy_id
        tx.execute(tables.policies.update().where(of_it).values(document={"name": "paper", "members": "later"}))

    async def together() -> Sequence[Receipt | BaseException]:
        arrivals = [posting(project, item, 0.5) for item in (behind, run)]
        return await asyncio.gather(*map(committer.submit, arrivals), return_exceptions=True)

    refused, taken = run_on_loop(together())
    assert isinstance(refused, Behind)
    assert problem_of(refused).status == 503
    assert isinstance(taken, Receipt)
    assert taken.accepted == 1
    assert project.load_rows(tables.observations, behind) == []


def test_a_stored_policy_that_would_be_refused_now_is_still_read(project: ProjectFixture, committer: Committer) -> None:
    """Runs go on under a policy that was stored before thresholds out of reach were refused."""
    member = {"detector": "posterior", "stop_at": 1.7}
    with project.database.transaction() as tx:
        project_row = projects.get_project(tx, project.id)
        policies.add_policy(tx, project_row, "old", {"name": "old", "members": [member]}, NOW)
    run = project.open_run(policy="old")

    async def submit() -> Receipt:
        return await committer.submit(posting(project, run, 0.5))

    assert run_on_loop(submit()).accepted == 1


def test_one_fault_is_one_answer(project: ProjectFixture, committer: Committer) -> None:
    """A request that breaks the transaction of its group fails alone; the others are stored."""
    good, bad = project.open_run(), project.open_run()
    with project.database.transaction() as tx:  # a constraint that one run violates
        if project.database.embedded:
            tx.exec_driver_sql(
                "CREATE TRIGGER spoiler BEFORE INSERT ON observations WHEN NEW.value = 666"
                " BEGIN SELECT RAISE(ABORT, 'spoiled'); END"
            )
        else:
            tx.exec_driver_sql("ALTER TABLE observations ADD CONSTRAINT spoiler CHECK (value <> 666)")

    async def together() -> Sequence[Receipt | BaseException]:
        return await asyncio.gather(
            committer.submit(posting(project, good, 0.1)),
            committer.submit(posting(project, bad, 666.0)),
            committer.submit(posting(project, project.open_run(), 0.3)),
            return_exceptions=True,
        )

    first, failed, third = run_on_loop(together())
    assert isinstance(first, Receipt)
    assert isinstance(third, Receipt)
    assert isinstance(failed, sa.exc.IntegrityError)
    assert len(project.load_rows(tables.observations, good)) == 1
    assert project.load_rows(tables.observations, bad) == []


def test_no_more_waits_than_may(project: ProjectFixture, committer: Committer, service_metrics: ServiceMetrics) -> None:
    """While the database is held up, what exceeds the limit is refused; what was admitted is stored after all."""
    run = project.open_run()
    with ThreadPoolExecutor(10) as threads:
        with project.database.transaction() as tx:
            tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == run.id).with_for_update())
            admitted = [
                threads.submit(committer.submit_and_wait, posting(project, run, *[0.1] * 10, start=10 * batch))
                for batch in range(5)
            ]
            wait_until(committer, 50)
            with pytest.raises(Overloaded):
                committer.submit_and_wait(posting(project, run, 0.1, start=50))
        assert sum(answer.result(DEADLINE_SECONDS).accepted for answer in admitted) == 50
    assert service_metrics.registry.get_sample_value("evalstop_refused_requests_total", {"reason": "overloaded"}) == 1
    assert committer.submit_and_wait(posting(project, run, 0.1, start=50)).accepted == 1


def test_a_batch_larger_than_the_limit_is_taken_alone(project: ProjectFixture, committer: Committer) -> None:
    """A limit below the size of one batch does not refuse it for ever."""
    assert committer.submit_and_wait(posting(project, project.open_run(), *[0.1] * 200)).accepted == 200


def test_closing_commits_what_waits(project: ProjectFixture, service_metrics: ServiceMetrics) -> None:
    """Closing answers everything that was admitted, and refuses what comes after."""
    committer = Committer(project.database, RunCache(), utc_now, service_metrics)
    run = project.open_run()
    with ThreadPoolExecutor(5) as threads, ExitStack() as running:
        running.enter_context(running_in_thread(committer))
        with project.database.transaction() as tx:
            tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == run.id).with_for_update())
            posts = [posting(project, run, 0.1, start=step) for step in range(4)]
            answers = [threads.submit(committer.submit_and_wait, post) for post in posts]
            wait_until(committer, 4)
            closing = threads.submit(running.close)
        closing.result(DEADLINE_SECONDS)
    assert [answer.result(DEADLINE_SECONDS).accepted for answer in answers] == [1, 1, 1, 1]
    with pytest.raises(Closed):
        committer.submit_and_wait(posting(project, run, 0.1, start=9))
    assert len(project.load_rows(tables.observations, run)) == 4


def test_a_run_is_taken_in_order(project: ProjectFixture, committer: Committer) -> None:
    """What one caller posts one after another is taken in that order, however many commits there are."""
    run = project.open_run(policy="paper")

    async def one_by_one() -> list[int]:
        posts = [committer.submit(posting(project, run, 1.0 - step / 100, start=step)) for step in range(40)]
        return [receipt.run.last_step or 0 for receipt in await asyncio.gather(*posts)]

    assert run_on_loop(one_by_one()) == list(range(40))


def test_a_client_that_left(project: ProjectFixture, committer: Committer) -> None:
    """Whoever stops waiting costs nobody else an answer, and the points stay stored."""
    run, other = project.open_run(), project.open_run()

    async def leave() -> Receipt:
        leaving = asyncio.ensure_future(committer.submit(posting(project, run, 0.1)))
        staying = asyncio.ensure_future(committer.submit(posting(project, other, 0.2)))
        await asyncio.sleep(0)
        leaving.cancel()
        return await staying

    assert run_on_loop(leave()).accepted == 1
    assert committer.submit_and_wait(posting(project, run, 0.1)).duplicates == 1


@pytest.mark.parametrize(
    "content", [Observations(tuple(evals(0.5, start=0))), Observations((PostedObservation("kl", 0, 1.0),))]
)
def test_what_a_cut_commit_stored_is_a_duplicate(postgres_database: Database, content: Observations) -> None:
    """A process whose run was saved behind its back, as by its own commit that it did not hear of, counts repeats."""
    project = set_up_project(postgres_database)
    run, other = project.open_run(), replace(project, cache=RunCache())
    project.post_observations(run, [PostedObservation("loss", 0, 1.0)])
    other.submit(run, content)
    assert project.submit(run, content).duplicates == 1
    assert project.post_observations(run, evals(0.4, start=1)).accepted == 1


def test_order_is_kept_among_kinds(project: ProjectFixture) -> None:
    """Messages of one run that arrive together are taken in order, of whatever kind they are."""
    run = project.open_run(policy="watch-all-roles")
    project.post_observations(run, evals(0.1))
    contents: list[Content] = [
        Observations(tuple(evals(0.2, start=1))),
        CheckpointSaved(1, "file:///1"),
        Observations(tuple(evals(0.3, start=2))),
        Resumed(1),
        Observations(tuple(evals(0.4, start=2))),
    ]
    answers = project.submit_all([Message(project.id, run.id, item) for item in contents])
    assert [answer.run.attempt for answer in answers if isinstance(answer, Receipt)] == [1, 1, 1, 2, 2]
    live = [row for row in project.load_rows(tables.observations, run) if row["superseded_by"] == 0]
    assert [(row["step"], row["value"]) for row in live] == [(0, 0.1), (1, 0.2), (2, 0.4)]


def test_what_comes_after_a_verdict_waits_for_it(project: ProjectFixture) -> None:
    """Two evals that arrive together, of which the first calls for a stop, lead to one decision."""
    run = project.open_run(policy="paper", mode="enforce")
    project.post_observations(run, DECLINING_EVALS[:-1])
    points = [*DECLINING_EVALS[-1:], *evals(0.1, start=9)]
    for answer in project.submit_all([Message(project.id, run.id, Observations((point,))) for point in points]):
        assert isinstance(answer, Receipt)
        assert answer.decision == project.find_decision(run) is not None
    assert len(project.load_rows(tables.decisions, run)) == 1


def test_a_stale_cache_costs_one_try(project: ProjectFixture) -> None:
    """A run that another process saved is loaded and applied again; then it is checked before it is used."""
    run, other = project.open_run(policy="paper"), replace(project, cache=RunCache())

    def mistaken() -> float:
        return project.read_counter("evalstop_loaded_runs_total", result="mistaken")

    project.post_observations(run, evals(0.1))
    other.post_observations(run, evals(0.2, start=1))
    assert project.post_observations(run, evals(0.3, start=2)).accepted == 1
    assert mistaken() == 1
    other.post_observations(run, evals(0.35, start=3))
    assert project.post_observations(run, evals(0.4, start=4)).accepted == 1
    assert mistaken() == 1
    assert [row["step"] for row in project.load_rows(tables.observations, run)] == [0, 1, 2, 3, 4]
    cold = replace(project, cache=RunCache())
    assert cold.post_observations(run, evals(0.5, start=5)).run.verdict == project.load_run(run).verdict


@pytest.mark.parametrize("uri", ["file:///2", "file:///2-again"])
def test_what_saves_nothing_is_not_answered_from_a_stale_cache(project: ProjectFixture, uri: str) -> None:
    """A checkpoint that another process's resume has superseded is saved anew, wherever it lies, and not refused."""
    run, other = project.open_run(policy="paper"), replace(project, cache=RunCache())
    project.post_observations(run, [*evals(0.1), *evals(0.2, start=1), *evals(0.3, start=2)])
    assert project.submit(run, CheckpointSaved(2, "file:///2")).created
    other.submit(run, Resumed(1))
    other.post_observations(run, evals(0.4, start=2))
    assert project.submit(run, CheckpointSaved(2, uri)).created
    assert not project.submit(run, CheckpointSaved(2, uri)).created
    best = project.post_observations(run, evals(0.1, start=3)).run.best_checkpoint
    assert best is not None
    assert (best.step, best.uri) == (2, uri)


def test_a_deadlock_is_tried_again(postgres_database: Database) -> None:
    """A commit that PostgreSQL breaks off to end a deadlock is tried again, and nobody is told of it."""
    project = set_up_project(postgres_database)
    low, high = sorted((project.open_run(), project.open_run()), key=lambda run: run.id)
    for run in (low, high):
        project.post_observations(run, evals(0.1))
    messages = [posting(project, run, 0.2, start=1) for run in (low, high)]
    with ThreadPoolExecutor(1) as thread:
        with postgres_database.transaction() as tx:
            tx.exec_driver_sql("SET LOCAL deadlock_timeout TO '1h'")  # the other one looks first, and gives way
            runs.lock_runs(tx, [high.id])
            answers = thread.submit(project.submit_all, messages)
            wait_for_blocked_process(postgres_database)
            runs.lock_runs(tx, [low.id])
        receipts = answers.result(DEADLINE_SECONDS)
    assert [receipt.accepted for receipt in receipts if isinstance(receipt, Receipt)] == [1, 1]
    assert count_deadlocks(postgres_database) == 1
