"""Workers killed during escalation: every stop request reaches an end, and no step is taken twice."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands
from evalstop_service.domain.decision_events import Reported
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.ingest import Observations
from evalstop_service.store import decisions, tables
from evalstop_service.store.database import Database

from tests.acceptance.fake_receiver import FakeReceiver, start_fake_receiver
from tests.acceptance.programs import FAST_DELIVERY, Program
from tests.service.project_fixture import DECLINING_EVALS, ProjectFixture, set_up_project

pytestmark = [pytest.mark.real, pytest.mark.nightly]

SEED = 20260102
RUNS = 12
TIMEOUT_SECONDS = 150.0
FINAL_STATES = {DecisionState.CONFIRMED, DecisionState.FAILED}
ESCALATION_STATES = ["requested", "escalated", "escalated", "failed"]


def create_project(database: Database, receiver: FakeReceiver) -> ProjectFixture:
    """A project that sends every event to the receiver, without a veto window, which only servers end, and with a short
    confirmation time."""
    project = set_up_project(database, veto_window_seconds=0.0)
    project.change_settings(confirm_seconds=4.0, stops_per_hour=None)
    receiver.secret = project.add_endpoint(url=receiver.url).secret
    return project


def report_confirmations(
    project: ProjectFixture, receiver: FakeReceiver, decision_ids: set[UUID], ending: threading.Event
) -> None:
    """Report these decisions as confirmed, twice each, once their stop requests have arrived."""
    remaining = {str(decision_id) for decision_id in decision_ids}
    while remaining and not ending.wait(0.02):
        for decision_id in remaining & {data["decision"]["id"] for data in receiver.events("run.stop_requested")}:
            for _ in range(2):
                report = Reported(utc_now(), DecisionState.CONFIRMED, "receiver", "gone", {})
                commands.record_report(project.database, project.id, UUID(decision_id), report)
            remaining.discard(decision_id)


def kill_until_final(workers: list[Program], project: ProjectFixture, rng: random.Random) -> int:
    """Kill and restart random workers until all decisions are final; returns the number of kills."""
    kills, deadline = 0, time.monotonic() + TIMEOUT_SECONDS
    while True:
        worker = rng.choice(workers)
        worker.kill()
        worker.start()
        kills += 1
        time.sleep(rng.uniform(0.2, 1.5))
        for each in workers:
            each.check_running()
        with project.database.reading() as tx:
            if {decision.state for decision in decisions.list_decisions(tx, project.id)} <= FINAL_STATES:
                return kills
        assert time.monotonic() < deadline, "some decisions do not reach a final state"


def test_killed_workers_escalate_each_stop_once(database_url: str, tmp_path: Path) -> None:
    """Each stop is confirmed, or requested, escalated and reported as failed, once each, although workers are
    killed."""
    database, rng, ending = Database(database_url), random.Random(SEED), threading.Event()
    count = 1 if database.embedded else 2
    logs = [tmp_path / f"{number}.log" for number in range(count)]
    workers = [Program(log, "deliver", EVALSTOP_DATABASE_URL=database_url, **FAST_DELIVERY) for log in logs]
    with ExitStack() as stack:
        stack.callback(database.close)
        receiver = stack.enter_context(start_fake_receiver(random.Random(SEED)))
        project = create_project(database, receiver)
        runs = [project.open_run() for _ in range(RUNS)]
        decisions_made = [project.submit(run, Observations(tuple(DECLINING_EVALS)), utc_now()).decision for run in runs]
        confirmed_ids = {decision.id for decision in decisions_made[::3] if decision is not None}
        threads = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(ending.set)
        reporter = threads.submit(report_confirmations, project, receiver, confirmed_ids, ending)
        for worker in workers:
            stack.callback(worker.kill)
            worker.launch()
        assert kill_until_final(workers, project, rng) >= 2
        reporter.result(TIMEOUT_SECONDS)
        for run, decision in zip(runs, decisions_made, strict=True):
            assert decision is not None
            event_counts = Counter(row["type"] for row in project.load_rows(tables.events, run))
            if decision.id in confirmed_ids:
                assert (
                    project.load_decision_states(run)[-1],
                    event_counts["run.stopped"],
                    event_counts["run.stop_failed"],
                ) == ("confirmed", 1, 0)
            else:
                assert project.load_decision_states(run) == ESCALATION_STATES
                assert (
                    event_counts["run.stop_requested"],
                    event_counts["run.stop_escalated"],
                    event_counts["run.stop_failed"],
                ) == (2, 1, 1)
        failures = RUNS - len(confirmed_ids)
        assert receiver.wait_for(lambda: len(receiver.events("run.stop_failed")) == failures, TIMEOUT_SECONDS)
        assert all(len(bodies) == 1 for bodies in receiver.bodies.values())
        assert not any("Traceback" in log.read_text() for log in logs)
