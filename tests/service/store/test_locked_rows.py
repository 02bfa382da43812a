"""A row is locked and read in one statement, which sees what was committed while it waited for the lock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import pytest
import sqlalchemy as sa
from evalstop_service.domain.confidence_sequences import StageNumbers
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.statuses import Stage
from evalstop_service.store import decisions, projects, rollout_stages, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.rollout_stages import RolloutStage
from evalstop_service.store.tables import decisions as decision_rows
from evalstop_service.store.tables import runs as run_rows
from msgspec import structs

from tests.service.concurrency import wait_for_blocked_process
from tests.service.project_fixture import NOW, ProjectFixture, set_up_project

T = TypeVar("T")


@pytest.fixture
def project(postgres_database: Database) -> ProjectFixture:
    return set_up_project(postgres_database, veto_window_seconds=60.0)


def read_after(change: Callable[[Transaction], object], lock: Callable[[Transaction], T], database: Database) -> T:
    """What a transaction locks that waited for the end of another one, which changed the row."""

    def read() -> T:
        with database.transaction() as tx:
            return lock(tx)

    with ThreadPoolExecutor(1) as thread:
        with database.transaction() as tx:
            change(tx)
            locked = thread.submit(read)
            wait_for_blocked_process(database)
        return locked.result()


def test_locked_run_has_its_new_columns(project: ProjectFixture) -> None:
    """A run that changes while others wait to lock it, by its id or its decision's, is found as it is then."""
    run, decision = project.open_declining_run()

    def change_job(job: str) -> Callable[[Transaction], object]:
        return lambda tx: tx.execute(run_rows.update().where(run_rows.c.id == run.id).values(job=job))

    locked = read_after(change_job("a"), lambda tx: runs.lock_run(tx, project.id, run.id), project.database)
    assert locked.job == "a"
    _, found, _ = read_after(
        change_job("b"), lambda tx: decisions.lock_with_run(tx, project.id, decision.id), project.database
    )
    assert (found.id, found.job) == (run.id, "b")


def test_locked_run_has_its_new_version(project: ProjectFixture) -> None:
    """A run that is saved while another transaction waits to lock it is found in the new version."""
    run = project.open_run()
    locked = read_after(
        lambda tx: runs.save_run(tx, structs.replace(run, version=7)),
        lambda tx: runs.lock_runs(tx, [run.id]),
        project.database,
    )
    assert locked == {run.id: 7}


def test_locked_decision_has_its_new_state(project: ProjectFixture) -> None:
    """A decision that a worker requests while another transaction waits to lock it is read as requested."""
    run, decision = project.open_declining_run()
    locked = read_after(
        lambda tx: decisions.update_decision(tx, decision, replace(decision, state=DecisionState.REQUESTED)),
        lambda tx: decisions.lock_decision(tx, run.id, decision.id),
        project.database,
    )
    assert (decision.state, locked.state) == (DecisionState.PENDING, DecisionState.REQUESTED)


def test_commanded_decision_has_its_new_state(project: ProjectFixture) -> None:
    """A decision that a worker requests while a command waits to lock it with its run is read as requested."""
    run, decision = project.open_declining_run()
    locked, locked_run, _ = read_after(
        lambda tx: decisions.update_decision(tx, decision, replace(decision, state=DecisionState.REQUESTED)),
        lambda tx: decisions.lock_with_run(tx, project.id, decision.id),
        project.database,
    )
    assert (locked_run.id, locked.state) == (run.id, DecisionState.REQUESTED)


def test_command_locks_the_run_before_its_decision(project: ProjectFixture) -> None:
    """A transaction that holds a run can lock its decision while a command waits for both, so they cannot deadlock."""
    run, decision = project.open_declining_run()
    query = sa.select(decision_rows.c.id).where(decision_rows.c.id == decision.id)

    def lock_with_run() -> None:
        with project.database.transaction() as tx:
            decisions.lock_with_run(tx, project.id, decision.id)

    with ThreadPoolExecutor(1) as thread:
        with project.database.transaction() as tx:
            runs.lock_run(tx, project.id, run.id)
            waiting = thread.submit(lock_with_run)
            wait_for_blocked_process(project.database)
            tx.execute(query.with_for_update(nowait=True))
        waiting.result()


def test_locked_project_has_its_new_settings(project: ProjectFixture) -> None:
    """A project that is paused while another transaction waits to lock it is read as paused."""
    locked = read_after(
        lambda tx: projects.update_project(tx, replace(projects.get_project(tx, project.id), paused_at=NOW)),
        lambda tx: projects.lock_project(tx, project.id),
        project.database,
    )
    assert locked.paused_at == NOW


def test_locked_rollout_stage_has_its_new_stage(project: ProjectFixture) -> None:
    """A rollout stage that moves while another transaction waits to lock it is found, in its new stage."""
    stage = RolloutStage(project.id, "paper", Stage.CANARY, 0.9, 0.2, NOW, StageNumbers(), 1)
    with project.database.transaction() as tx:
        rollout_stages.save_stage(tx, stage)
    locked = read_after(
        lambda tx: rollout_stages.save_stage(tx, replace(stage, stage=Stage.SHADOW)),
        lambda tx: rollout_stages.lock_stage(tx, project.id, "paper"),
        project.database,
    )
    assert locked == replace(stage, stage=Stage.SHADOW)
