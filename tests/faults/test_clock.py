"""A system clock that steps back an hour or stands still: the service orders changes by counters, not by time."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import sqlalchemy as sa
from evalstop_service.clock import Clock
from evalstop_service.ingest import Committer, Content, Message, Observations, Resumed, RunCache, running_in_thread
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import run_details, tables
from evalstop_service.store.database import Database

from tests.faults.retrying_clients import create_observations
from tests.faults.run_records import (
    ingest_without_faults,
    load_history,
    load_observations,
    summarize_run,
)
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
