"""kill -9 between the rungs: whatever was handed out comes to an end, and no rung is taken twice."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands
from evalstop_service.ingest import Observations
from evalstop_service.rules.decision_lifecycle import DecisionState, Reported
from evalstop_service.store import decisions, endpoints, projects, tables
from evalstop_service.store.database import Database
from evalstop_service.store.runs import Run

from tests.acceptance.fake_receiver import FakeReceiver
from tests.acceptance.programs import Program
from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.project_fixture import DECLINING_EVALS, ProjectFixture, set_up_project

pytestmark = pytest.mark.real

SEED = 20260102
RUNS = 12
DEADLINE_SECONDS = 150.0
OVER = {DecisionState.CONFIRMED, DecisionState.FAILED}
PACE = {
    "EVALSTOP_DELIVERY_TIMEOUT_SECONDS": "1",
    "EVALSTOP_DELIVERY_LEASE_SECONDS": "1.5",
    "EVALSTOP_DELIVERY_FIRST_PAUSE_SECONDS": "0.05",
    "EVALSTOP_DELIVERY_POLL_SECONDS": "0.02",
}
LADDER = ["pending", "requested", "escalated", "escalated", "failed"]


def create_project_for(database: Database, receiver: FakeReceiver) -> ProjectFixture:
    """A project that is told of everything, where a stop may wait for a moment only."""
    project = set_up_project(database, veto_window_seconds=0.3)
    with database.transaction() as tx:
        project_row = projects.lock_project(tx, project.id)
        projects.update_project(tx, replace(project_row, confirm_seconds=4.0, stops_per_hour=None, stops_share=None))
        endpoint = endpoints.add_endpoint(tx, project.id, url=receiver.url, event_types=EVERY_EVENT, now=utc_now())
    receiver.secret = endpoint.secret
    return project


def confirm(project: ProjectFixture, receiver: FakeReceiver, wanted: set[UUID], end: threading.Event) -> None:
    """Report the end of the wanted decisions as soon as their stops have come, twice each."""
    left = {str(key) for key in wanted}
    while left and not end.wait(0.02):
        for key in left & {data["decision"]["id"] for data in receiver.events("run.stop_requested")}:
            for _ in range(2):
                said = Reported(utc_now(), DecisionState.CONFIRMED, "receiver", "gone", {})
                commands.record_report(project.database, project.id, UUID(key), said)
            left.discard(key)


def kill_until_over(workers: list[Program], project: ProjectFixture, chance: random.Random) -> int:
    """Kill one worker after the other, at any moment after its start; how often, until all decisions are over."""
    kills, deadline = 0, time.monotonic() + DEADLINE_SECONDS
    while True:
        worker = chance.choice(workers)
        worker.kill()
        worker.start()
        kills += 1
        time.sleep(chance.uniform(0.2, 1.5))
        with project.database.reading() as tx:
            if {decision.state for decision in decisions.list_decisions(tx, project.id)} <= OVER:
                return kills
        assert time.monotonic() < deadline, "they do not come to an end"


def states(project: ProjectFixture, run: Run) -> list[str]:
    return [row["state"] for row in project.load_rows(tables.decision_changes, run)]


@pytest.mark.timeout(300)
def test_no_rung_is_taken_twice(database_url: str, tmp_path: Path) -> None:
    """With workers killed at random each stop is confirmed, or asked for again, then harder, then told as failed."""
    database, chance, end = Database(database_url), random.Random(SEED), threading.Event()
    count = 1 if database.embedded else 2
    logs = [tmp_path / f"{number}.log" for number in range(count)]
    workers = [Program(log, "deliver", EVALSTOP_DATABASE_URL=database_url, **PACE) for log in logs]
    with ExitStack() as stack:
        stack.callback(database.close)
        receiver = stack.enter_context(FakeReceiver(random.Random(SEED)))
        project = create_project_for(database, receiver)
        runs = [project.open_run() for _ in range(RUNS)]
        made = [project.submit(run, Observations(tuple(DECLINING_EVALS)), utc_now()).decision for run in runs]
        answered = {one.id for one in made[::3] if one is not None}
        reporter = threading.Thread(target=confirm, args=(project, receiver, answered, end))
        reporter.start()
        stack.callback(reporter.join)
        stack.callback(end.set)
        for worker in workers:
            stack.callback(worker.kill)
            worker.launch()
        assert kill_until_over(workers, project, chance) >= 2
        for run, decision in zip(runs, made, strict=True):
            assert decision is not None
            told = Counter(row["type"] for row in project.load_rows(tables.events, run))
            if decision.id in answered:
                assert (states(project, run)[-1], told["run.stopped"], told["run.stop_failed"]) == ("confirmed", 1, 0)
            else:
                assert states(project, run) == LADDER
                assert (told["run.stop_requested"], told["run.stop_escalated"], told["run.stop_failed"]) == (2, 1, 1)
        failures = RUNS - len(answered)
        assert receiver.wait_for(lambda: len(receiver.events("run.stop_failed")) == failures, DEADLINE_SECONDS)
        assert all(len(bodies) == 1 for bodies in receiver.bodies.values())
        assert not any("Traceback" in log.read_text() for log in logs)
