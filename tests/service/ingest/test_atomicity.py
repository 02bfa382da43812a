"""A batch is stored as a whole or not at all, and each of its observations once, also under concurrency."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from evalstop_service.errors import NotFound
from evalstop_service.ingest import Message, Observations, Receipt
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation

from tests.service.concurrency import run_concurrently, wait_for_blocked_process
from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture, evals, set_up_project, submit_message


def test_failed_decision_rolls_back_the_batch(project: ProjectFixture) -> None:
    """When the decision cannot be stored, neither are the observations and events of the batch."""
    run = project.open_run()
    project.post_observations(run, DECLINING_EVALS[:-1])
    with project.database.transaction() as tx:  # a real constraint refuses a second decision of the project
        tx.exec_driver_sql("CREATE UNIQUE INDEX one_decision ON decisions (project_id)")
    other = project.open_run()
    assert project.post_observations(other, DECLINING_EVALS).decision is not None
    before = (project.load_rows(tables.observations, run), project.load_rows(tables.events, run), project.load_run(run))
    with pytest.raises(sa.exc.IntegrityError):
        project.post_observations(run, DECLINING_EVALS[-1:])
    assert (
        project.load_rows(tables.observations, run),
        project.load_rows(tables.events, run),
        project.load_run(run),
    ) == before
    assert project.find_decision(run) is None
    with project.database.transaction() as tx:
        tx.exec_driver_sql("DROP INDEX one_decision")
    assert project.post_observations(run, DECLINING_EVALS[-1:]).decision is not None


def test_failed_event_rolls_back_the_decision(project: ProjectFixture) -> None:
    """When the event cannot be stored, neither are the decision and the observations."""
    run = project.open_run()
    with project.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE events RENAME TO renamed_events")
    with pytest.raises(sa.exc.DBAPIError):
        project.post_observations(run, DECLINING_EVALS)
    with project.database.transaction() as tx:
        tx.exec_driver_sql("ALTER TABLE renamed_events RENAME TO events")
    assert project.find_decision(run) is None
    assert project.load_rows(tables.observations, run) == []
    assert project.post_observations(run, DECLINING_EVALS).accepted == len(DECLINING_EVALS)
    assert len(project.load_events(run, "run.stop_requested")) == 1


def test_lost_connection_rolls_back_the_batch(postgres_database: Database) -> None:
    """When the connection is cut within a transaction, nothing of it is stored, and the retry stores all."""
    project = set_up_project(postgres_database)
    run = project.open_run()
    with ThreadPoolExecutor(1) as thread:
        with postgres_database.transaction() as tx:  # blocks the insertion of the event, late in the transaction
            tx.exec_driver_sql("LOCK TABLE events IN ACCESS EXCLUSIVE MODE")
            receipt = thread.submit(project.post_observations, run, DECLINING_EVALS)
            first_process = wait_for_blocked_process(postgres_database)
            tx.exec_driver_sql(f"SELECT pg_terminate_backend({first_process})")
            while wait_for_blocked_process(postgres_database) == first_process:
                pass
            assert project.load_rows(tables.observations, run) == []
        assert receipt.result(30).accepted == len(DECLINING_EVALS)
    assert len(project.load_rows(tables.decisions, run)) == 1


def test_concurrent_batches_decide_once(project: ProjectFixture) -> None:
    """Batches posted to one run from several threads lose nothing, count nothing twice, and decide once."""
    run = project.open_run()
    observations = [PostedObservation("eval", step, 1.0 - step / 100) for step in range(48)]
    receipts = []

    def post(number: int) -> None:
        for start in range(0, 48, 8):
            batch = observations[start : start + 8]
            receipts.append(project.post_observations(run, batch if number % 2 else batch[::-1]))

    failures = run_concurrently(*(lambda number=number: post(number) for number in range(6)))
    assert failures == []
    assert sum(receipt.accepted for receipt in receipts) == 48
    assert sum(receipt.duplicates for receipt in receipts) == 48 * 5
    assert len(project.load_rows(tables.observations, run)) == 48
    assert len(project.load_rows(tables.decisions, run)) == 1
    assert len(project.load_events(run, "run.stop_requested")) == 1
    reference = project.open_run()
    project.post_observations(reference, observations)
    assert project.load_run(run).verdict == project.load_run(reference).verdict


def test_run_of_another_project_is_not_found(project: ProjectFixture) -> None:
    """A run cannot be reached from another project."""
    run = project.open_run()
    other_project = set_up_project(project.database)
    with pytest.raises(NotFound):
        other_project.post_observations(run, evals(0.1))
    assert project.load_rows(tables.observations, run) == []


def test_unknown_run_is_not_found(project: ProjectFixture) -> None:
    """Observations of a run that was never opened are refused with a hint to create one."""
    with pytest.raises(NotFound, match="create one"):
        submit_message(project.database, project.id, new_id(), Observations(tuple(evals(0.1))), NOW)


def test_repeated_observation_is_a_duplicate(project: ProjectFixture) -> None:
    """An observation sent again, within a batch or in a later one, is a duplicate and stored once."""
    run = project.open_run()
    receipt = project.post_observations(run, [*evals(0.1, 0.2), *evals(0.1)])
    assert (receipt.accepted, receipt.duplicates, receipt.conflicts) == (2, 1, ())
    receipt = project.post_observations(run, evals(0.1, 0.2, 0.3))
    assert (receipt.accepted, receipt.duplicates, receipt.conflicts) == (1, 2, ())
    assert len(project.load_rows(tables.observations, run)) == 3


@pytest.mark.parametrize("other", [0.2, math.nan, math.inf])
def test_first_value_is_kept(project: ProjectFixture, other: float) -> None:
    """Another value of a stored observation is a conflict that names the stored value, which is kept."""
    run = project.open_run()
    receipt = project.post_observations(run, [*evals(0.1), PostedObservation("eval", 0, other)])
    assert (receipt.accepted, receipt.duplicates) == (1, 0)
    assert [item.stored_value for item in receipt.conflicts] == [0.1]
    again = project.post_observations(run, [PostedObservation("eval", 0, other)])
    assert (again.accepted, again.duplicates, len(again.conflicts)) == (0, 0, 1)
    assert [row["value"] for row in project.load_rows(tables.observations, run)] == [0.1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_value_is_a_duplicate_of_itself(project: ProjectFixture, value: float) -> None:
    """NaN repeats NaN, and an infinity itself; a number in its place is a conflict."""
    run = project.open_run()
    assert project.post_observations(run, [PostedObservation("eval", 0, value)] * 2).duplicates == 1
    assert project.post_observations(run, [PostedObservation("eval", 0, value)]).duplicates == 1
    assert len(project.post_observations(run, [PostedObservation("eval", 0, 1.0)]).conflicts) == 1


def test_repeat_within_one_commit_is_looked_up(project: ProjectFixture, caplog: pytest.LogCaptureFixture) -> None:
    """It waits until the first one is saved; neither fails."""
    run = project.open_run()
    receipts = project.submit_all([Message(project.id, run.id, Observations(tuple(evals(0.1)))) for _ in range(2)])
    assert [(item.accepted, item.duplicates) for item in receipts if isinstance(item, Receipt)] == [(1, 0), (0, 1)]
    assert caplog.records == []


def test_late_observation_leaves_the_last_step(project: ProjectFixture) -> None:
    """The last step of a run is the highest that it has reported, of any metric."""
    run = project.open_run()
    project.post_observations(run, evals(0.1, start=5))
    for late in (evals(0.1, start=2), [PostedObservation("loss", 3, 0.1)]):
        assert project.post_observations(run, late).run.last_step == 5


def test_duplicates_do_not_count_as_declines(project: ProjectFixture) -> None:
    """A client that sends each eval three times is not stopped for it."""
    run = project.open_run()
    for observation in evals(0.5, 0.4, 0.3):
        for _ in range(3):
            receipt = project.post_observations(run, [observation])
    assert receipt.run.verdict.verdict == "suspect"
    assert receipt.decision is None
