"""Group commit: waiting messages are committed together, each gets its own answer, and the queue is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace

import pytest
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.errors import Conflict, NotFound, Overloaded
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
from evalstop_service.ingest.committer import LARGE_GROUP
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import runs, tables
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.faults.run_records import count_deadlocks
from tests.service.committers import run_on_loop
from tests.service.concurrency import wait_for_blocked_process, wait_until
from tests.service.project_fixture import DECLINING_EVALS, ProjectFixture, evals, set_up_project

DEADLINE_SECONDS = 60.0


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


def build_message(project: ProjectFixture, run: Run, *values: float, start: int = 0) -> Message:
    return Message(project.id, run.id, Observations(tuple(evals(*values, start=start))))


def test_waiting_posts_are_committed_together(
    project: ProjectFixture, committer: Committer, service_metrics: ServiceMetrics
) -> None:
    """Posts that arrive while the writer is blocked share a commit, and each gets its own receipt."""
    first, others = project.open_run(), [project.open_run() for _ in range(9)]
    with ThreadPoolExecutor(10) as threads:
        with project.database.transaction() as tx:
            if not project.database.embedded:
                tx.exec_driver_sql("LOCK TABLE runs IN ACCESS EXCLUSIVE MODE")
            answers = [
                threads.submit(committer.submit_and_wait, build_message(project, run, 0.1, 0.2))
                for run in (first, *others)
            ]
            wait_until(lambda: committer.waiting == 20)
        receipts = [answer.result(DEADLINE_SECONDS) for answer in answers]
    assert [receipt.accepted for receipt in receipts] == [2] * 10
    assert [receipt.run.id for receipt in receipts] == [run.id for run in (first, *others)]
    samples = {sample.name: sample.value for family in service_metrics.registry.collect() for sample in family.samples}
    assert samples["evalstop_commit_requests_sum"] == 10
    assert samples["evalstop_commit_requests_count"] <= 4


def test_refused_messages_do_not_affect_the_group(project: ProjectFixture) -> None:
    """In a group, an unknown run and a moved checkpoint are refused; the other messages are accepted."""
    run = project.open_run()
    project.submit(run, CheckpointSaved(1, "file:///1"))
    unknown, moved, foreign, accepted = project.submit_all(
        [
            Message(project.id, new_id(), Observations(tuple(evals(0.1)))),
            Message(project.id, run.id, CheckpointSaved(1, "file:///elsewhere")),
            Message(new_id(), run.id, Observations(tuple(evals(0.1)))),
            build_message(project, run, 0.5),
        ]
    )
    assert isinstance(unknown, NotFound)
    assert isinstance(moved, Conflict)
    assert isinstance(foreign, NotFound)
    assert isinstance(accepted, Receipt)
    assert accepted.accepted == 1


def test_failing_message_does_not_affect_the_group(project: ProjectFixture) -> None:
    """A message that breaks the transaction of its group fails alone; the others are stored."""
    valid, invalid = project.open_run(), project.open_run()
    with project.database.transaction() as tx:  # a constraint that one message violates
        if project.database.embedded:
            tx.exec_driver_sql(
                "CREATE TRIGGER spoiler BEFORE INSERT ON observations WHEN NEW.value = 666"
                " BEGIN SELECT RAISE(ABORT, 'refused'); END"
            )
        else:
            tx.exec_driver_sql("ALTER TABLE observations ADD CONSTRAINT spoiler CHECK (value <> 666)")
    posts = ((valid, 0.1), (invalid, 666.0), (project.open_run(), 0.3))
    first, failed, third = project.submit_all([build_message(project, run, value) for run, value in posts])
    assert isinstance(first, Receipt)
    assert isinstance(third, Receipt)
    assert isinstance(failed, sa.exc.IntegrityError)
    assert len(project.load_rows(tables.observations, valid)) == 1
    assert project.load_rows(tables.observations, invalid) == []


def test_messages_beyond_the_limit_are_refused(
    project: ProjectFixture, committer: Committer, service_metrics: ServiceMetrics
) -> None:
    """While the database is blocked, messages beyond the limit are refused; admitted ones are stored later."""
    run = project.open_run()
    with ThreadPoolExecutor(10) as threads:
        with project.database.transaction() as tx:
            tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == run.id).with_for_update())
            admitted = [
                threads.submit(committer.submit_and_wait, build_message(project, run, *[0.1] * 10, start=10 * batch))
                for batch in range(5)
            ]
            wait_until(lambda: committer.waiting == 50)
            with pytest.raises(Overloaded):
                committer.submit_and_wait(build_message(project, run, 0.1, start=50))
        assert sum(answer.result(DEADLINE_SECONDS).accepted for answer in admitted) == 50
    assert service_metrics.registry.get_sample_value("evalstop_refused_requests_total", {"reason": "overloaded"}) == 1
    assert committer.submit_and_wait(build_message(project, run, 0.1, start=50)).accepted == 1


def test_batch_larger_than_the_limit_is_accepted_alone(project: ProjectFixture, committer: Committer) -> None:
    """A batch larger than the limit is accepted when nothing else waits."""
    assert committer.submit_and_wait(build_message(project, project.open_run(), *[0.1] * 200)).accepted == 200


def test_many_waiting_observations_start_a_second_commit(
    postgres_database: Database, service_metrics: ServiceMetrics
) -> None:
    """Few observations wait for the commit before them; once there are many, they are committed beside it."""
    project = set_up_project(postgres_database)
    held, few, many = (project.open_run() for _ in range(3))
    committer = Committer(
        postgres_database, RunCache(), utc_now, service_metrics, Limits(slow_seconds=DEADLINE_SECONDS)
    )

    async def submit_all(release: Callable[[], None]) -> Sequence[Receipt]:
        async with committer.run():
            blocked = committer.submit(build_message(project, held, 0.1))
            await asyncio.sleep(0.05)
            waiting = committer.submit(build_message(project, few, 0.1))
            try:
                done, _ = await asyncio.wait([waiting], timeout=0.2)
                assert not done
                large = committer.submit(build_message(project, many, *[0.1] * LARGE_GROUP))
                receipts = await asyncio.wait_for(asyncio.gather(waiting, large), DEADLINE_SECONDS / 2)
                assert not blocked.done()
            finally:
                release()
            return [await blocked, *receipts]

    with postgres_database.engine.connect() as connection:
        connection.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == held.id).with_for_update())
        receipts = asyncio.run(submit_all(connection.rollback))
    assert [receipt.accepted for receipt in receipts] == [1, 1, LARGE_GROUP]


def test_closing_commits_waiting_messages(project: ProjectFixture, service_metrics: ServiceMetrics) -> None:
    """Closing answers every admitted message and refuses later ones."""
    committer = Committer(project.database, RunCache(), utc_now, service_metrics)
    run = project.open_run()
    with ThreadPoolExecutor(5) as threads, ExitStack() as running:
        running.enter_context(running_in_thread(committer))
        with project.database.transaction() as tx:
            tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == run.id).with_for_update())
            posts = [build_message(project, run, 0.1, start=step) for step in range(4)]
            answers = [threads.submit(committer.submit_and_wait, post) for post in posts]
            wait_until(lambda: committer.waiting == 4)
            closing = threads.submit(running.close)
        closing.result(DEADLINE_SECONDS)
    assert [answer.result(DEADLINE_SECONDS).accepted for answer in answers] == [1, 1, 1, 1]
    with pytest.raises(Overloaded):
        committer.submit_and_wait(build_message(project, run, 0.1, start=9))
    assert len(project.load_rows(tables.observations, run)) == 4


def test_messages_of_a_run_are_applied_in_order(project: ProjectFixture, committer: Committer) -> None:
    """Messages that one caller submits one after another are applied in that order over many commits."""
    run = project.open_run(policy="paper")

    async def submit_one_by_one() -> list[int]:
        posts = [committer.submit(build_message(project, run, 1.0 - step / 100, start=step)) for step in range(40)]
        return [receipt.run.last_step or 0 for receipt in await asyncio.gather(*posts)]

    assert run_on_loop(submit_one_by_one()) == list(range(40))


def test_cancelled_client_loses_no_observations(project: ProjectFixture, committer: Committer) -> None:
    """A client that stops waiting delays no other answer, and its observations are stored."""
    run, other = project.open_run(), project.open_run()

    async def submit_and_cancel() -> Receipt:
        cancelled = asyncio.ensure_future(committer.submit(build_message(project, run, 0.1)))
        remaining = asyncio.ensure_future(committer.submit(build_message(project, other, 0.2)))
        await asyncio.sleep(0)
        cancelled.cancel()
        return await remaining

    assert run_on_loop(submit_and_cancel()).accepted == 1
    assert committer.submit_and_wait(build_message(project, run, 0.1)).duplicates == 1


@pytest.mark.parametrize(
    "content", [Observations(tuple(evals(0.5, start=0))), Observations((PostedObservation("kl", 0, 1.0),))]
)
def test_observations_of_an_unacknowledged_commit_are_duplicates(
    postgres_database: Database, content: Observations
) -> None:
    """Observations stored by another process, or by a commit whose answer was lost, count as duplicates."""
    project = set_up_project(postgres_database)
    run, other = project.open_run(), replace(project, cache=RunCache())
    project.post_observations(run, [PostedObservation("loss", 0, 1.0)])
    other.submit(run, content)
    assert project.submit(run, content).duplicates == 1
    assert project.post_observations(run, evals(0.4, start=1)).accepted == 1


def test_messages_of_different_kinds_keep_their_order(project: ProjectFixture) -> None:
    """Messages of one run submitted together are applied in order, whatever their kinds."""
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


def test_second_eval_of_a_batch_sees_the_first_decision(project: ProjectFixture) -> None:
    """Of two evals submitted together, the first of which stops the run, only one decision comes."""
    run = project.open_run(policy="paper", mode="enforce")
    project.post_observations(run, DECLINING_EVALS[:-1])
    observations = [*DECLINING_EVALS[-1:], *evals(0.1, start=9)]
    for answer in project.submit_all(
        [Message(project.id, run.id, Observations((observation,))) for observation in observations]
    ):
        assert isinstance(answer, Receipt)
        assert answer.decision == project.find_decision(run) is not None
    assert len(project.load_rows(tables.decisions, run)) == 1


def test_stale_cache_is_retried_once(project: ProjectFixture) -> None:
    """A run that another process saved is reloaded and applied again; afterwards it is checked before use."""
    run, other = project.open_run(policy="paper"), replace(project, cache=RunCache())

    def count_mistaken() -> float:
        return project.read_counter("evalstop_loaded_runs_total", result="mistaken")

    project.post_observations(run, evals(0.1))
    other.post_observations(run, evals(0.2, start=1))
    before = count_mistaken()
    assert project.post_observations(run, evals(0.3, start=2)).accepted == 1
    assert count_mistaken() == before + 1
    other.post_observations(run, evals(0.35, start=3))
    assert project.post_observations(run, evals(0.4, start=4)).accepted == 1
    assert count_mistaken() == before + 1
    assert [row["step"] for row in project.load_rows(tables.observations, run)] == [0, 1, 2, 3, 4]
    cold = replace(project, cache=RunCache())
    assert cold.post_observations(run, evals(0.5, start=5)).run.verdict == project.load_run(run).verdict


@pytest.mark.parametrize("uri", ["file:///2", "file:///2-again"])
def test_superseded_checkpoint_is_saved_again(project: ProjectFixture, uri: str) -> None:
    """A checkpoint that another process's resume superseded is stored again, even under another URI."""
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


def test_deadlock_is_retried(postgres_database: Database) -> None:
    """A commit that PostgreSQL aborts to end a deadlock is retried without an error to the caller."""
    project = set_up_project(postgres_database)
    first, second = project.open_run(), project.open_run()
    for run in (first, second):
        project.post_observations(run, evals(0.1))
    counted = count_deadlocks(postgres_database)  # earlier tests may have used this database
    # A commit locks its runs in the order in which PostgreSQL finds them. In one of these two it holds `other` when it
    # waits for `held`.
    for start, held, other in ((1, first, second), (2, second, first)):
        messages = [build_message(project, run, 0.2, start=start) for run in (first, second)]
        with ThreadPoolExecutor(1) as thread:
            with postgres_database.transaction() as tx:
                # So the other transaction detects the deadlock and is aborted.
                tx.exec_driver_sql("SET LOCAL deadlock_timeout TO '1h'")
                runs.lock_runs(tx, [held.id])
                answers = thread.submit(project.submit_all, messages)
                wait_for_blocked_process(postgres_database)
                runs.lock_runs(tx, [other.id])
            receipts = answers.result(DEADLINE_SECONDS)
        assert [receipt.accepted for receipt in receipts if isinstance(receipt, Receipt)] == [1, 1]
    wait_until(lambda: count_deadlocks(postgres_database) > counted)  # PostgreSQL counts up to ten seconds later
