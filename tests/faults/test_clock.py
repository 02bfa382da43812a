"""A system clock that steps back an hour or stands still: the service orders changes by counters, not by time."""

from __future__ import annotations

import itertools
import shutil
import struct
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from evalstop_service.clock import Clock
from evalstop_service.ingest import Committer, Content, Message, Observations, Resumed, RunCache, running_in_thread
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import run_details, tables
from evalstop_service.store.database import Database

from tests.faults.retrying_clients import RetryingClient, build_batch, create_observations
from tests.faults.run_records import (
    assert_nothing_lost,
    create_project_and_key,
    find_run,
    ingest_without_faults,
    load_history,
    load_observations,
    summarize_run,
)
from tests.faults.servers import start_replica
from tests.faults.wrong_clock import build_clock_library
from tests.service.project_fixture import NOW, set_up_project

pytestmark = [pytest.mark.real, pytest.mark.nightly]

STEPS = 80
HOUR = timedelta(hours=1)


def create_stepping_clock() -> Clock:
    """A clock that steps back an hour at every third reading and stands still in between."""
    readings = itertools.count()
    return lambda: NOW - HOUR * (next(readings) // 3)


def test_clock_steps_in_two_processes_change_nothing(database: Database, embedded_database: Database) -> None:
    """Two processes whose clock keeps stepping back store the same run and verdicts as one with a correct clock."""
    project, clock = set_up_project(database), create_stepping_clock()
    run = project.open_run(policy="paper", mode="enforce")
    processes = [Committer(database, RunCache(), clock, ServiceMetrics()) for _ in range(2)]
    middle, steps = STEPS // 2, [Observations(tuple(create_observations(step))) for step in range(STEPS)]
    messages: list[Content] = [*steps[:middle], Resumed(middle - 10), *steps[middle - 9 :]]
    versions = []
    with running_in_thread(processes[0]), running_in_thread(processes[1]):
        for number, message in enumerate(messages):
            receipt = processes[number % 2].submit_and_wait(Message(project.id, run.id, message))
            versions.append((receipt.run.version, receipt.run.updated_at))
    other, expected = ingest_without_faults(embedded_database, messages)
    assert len({version for version, _ in versions}) == len(versions)
    assert versions == sorted(versions, key=lambda version: version[0])
    assert summarize_run(project.load_run(run)) == summarize_run(expected)
    assert load_observations(project, run) == load_observations(other, expected)
    assert load_history(project, run) == load_history(other, expected)
    with database.reading() as tx:
        verdict_names = [change.verdict for change in run_details.list_verdicts(tx, run.id)]
        times = list(tx.execute(sa.select(tables.verdicts.c.at).order_by(tables.verdicts.c.sequence)).scalars())
    assert times == sorted(times, reverse=True)
    assert verdict_names == [verdict for _, verdict in load_history(other, expected)["verdicts"]][::-1]


@pytest.mark.nightly
def test_clock_step_during_posts_changes_nothing(
    tmp_path: Path, migrated_file: Path, embedded_database: Database
) -> None:
    """A service whose clock steps back an hour between posts stores the same run and verdicts as without the step."""
    library, file = build_clock_library(tmp_path)
    shutil.copyfile(migrated_file, tmp_path / "evalstop.db")
    database = Database(f"sqlite:///{tmp_path / 'evalstop.db'}")
    project, key = create_project_and_key(database)
    with (
        start_replica(tmp_path, f"sqlite:///{tmp_path / 'evalstop.db'}", LD_PRELOAD=str(library)) as service,
        RetryingClient(key, lambda: service.url) as client,
    ):
        run_id = client.post("/runs", {"name": "clock-step", "policy": "paper", "mode": "enforce"})["id"]
        for step in range(STEPS):
            if step in (33, 60):  # just before the verdict changes, and long after
                with file.open("r+b") as offset:
                    offset.write(struct.pack("l", int(HOUR.total_seconds()) * (1 + step // 60)))
            assert client.post(f"/runs/{run_id}/observations", build_batch(create_observations(step)))["accepted"] == 3
        assert (client.refusals, client.connection_errors) == ([], 0)
    run = find_run(project, run_id)
    with database.reading() as tx:
        verdict_names = [change.verdict.verdict for change in run_details.list_verdicts(tx, run.id)]
    assert run.updated_at < run.created_at - HOUR
    assert verdict_names == ["stop", "suspect"]
    assert_nothing_lost(project, run_id, [create_observations(step) for step in range(STEPS)], embedded_database)
    database.close()
