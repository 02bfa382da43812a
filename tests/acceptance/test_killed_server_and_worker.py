"""Server and worker killed at random: nothing acknowledged is lost, every stop is delivered and escalated once."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands
from evalstop_service.domain.decision_events import Reported
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.ingest import CheckpointSaved, Content, Observations
from evalstop_service.store import decisions, tables
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation

from tests.acceptance.fake_receiver import FakeReceiver, start_fake_receiver
from tests.acceptance.programs import FAST_DELIVERY, Program
from tests.conftest import ClonePostgres
from tests.faults.retrying_clients import (
    RetryingClient,
    Trainer,
    build_batch,
    run_trainers,
    wait_for_batches,
    wait_until,
)
from tests.faults.run_records import (
    create_project_and_key,
    find_run,
    ingest_without_faults,
    load_observations,
    summarize_run,
)
from tests.fixtures.projects import EVERY_EVENT
from tests.service.project_fixture import DECLINING_EVALS, ProjectFixture, set_up_project

pytestmark = pytest.mark.real

SEED = 20260101
TIMEOUT_SECONDS = 60.0
SETTINGS = FAST_DELIVERY | {"EVALSTOP_MAX_MODE": "enforce"}


@dataclass
class Installation:
    """The running programs of a service, its current address, and a project with a key."""

    project: ProjectFixture
    key: str
    server: Program
    worker: Program
    url: str

    def choose_url(self) -> str:
        """The server's address; fails if a program has ended by itself."""
        self.check_running()
        return self.url

    def check_running(self) -> None:
        """Fail if a program has ended by itself."""
        self.server.check_running()
        self.worker.check_running()

    def restart_server(self) -> None:
        self.server.kill()
        self.url = self.server.start_server()["url"]

    def restart_worker(self) -> None:
        if self.worker is self.server:
            self.restart_server()
            return
        self.worker.kill()
        self.worker.start()


@pytest.fixture
def embedded(tmp_path: Path, migrated_file: Path) -> Iterator[Installation]:
    """`evalstop up`: server and worker in one process, on the embedded database."""
    shutil.copyfile(migrated_file, tmp_path / "evalstop.db")
    up = Program(tmp_path / "log", "up", "--json", "--port", "0", EVALSTOP_DATA_FOLDER=str(tmp_path), **SETTINGS)
    with ExitStack() as stack:
        database = Database(f"sqlite:///{tmp_path / 'evalstop.db'}")
        stack.callback(database.close)
        project, key = create_project_and_key(database)
        stack.callback(up.kill)
        yield Installation(project, key, up, up, up.start_server()["url"])


@pytest.fixture
def separate(tmp_path: Path, clone_postgres: ClonePostgres) -> Iterator[Installation]:
    """`evalstop serve` and `evalstop deliver` on one PostgreSQL."""
    environment = SETTINGS | {"EVALSTOP_DATABASE_URL": clone_postgres()}
    serve = Program(tmp_path / "serve.log", "serve", "--json", "--port", "0", **environment)
    deliver = Program(tmp_path / "deliver.log", "deliver", **environment)
    with ExitStack() as stack:
        database = Database(environment["EVALSTOP_DATABASE_URL"])
        stack.callback(database.close)
        project, key = create_project_and_key(database)
        stack.callback(serve.kill)
        stack.callback(deliver.kill)
        address = serve.start_server()["url"]
        deliver.start()
        yield Installation(project, key, serve, deliver, address)


class SweepTrainer(Trainer):
    """Reports one run after another; `messages` holds what was acknowledged of each."""

    def __init__(self, client: RetryingClient, name: str, end: threading.Event, rng: random.Random) -> None:
        super().__init__(client, name, end)
        self.messages: dict[str, list[Content]] = {}
        self._rng = rng

    def report(self) -> None:
        while not self.end.is_set():
            terms = {"name": f"{self.name}-{len(self.messages)}", "mode": "enforce", "policy": "paper"}
            run_id = self.client.post("/runs", terms)["id"]
            acknowledged = self.messages[run_id] = []
            peak = self._rng.randint(3, 8)
            for step in range(peak + 5):
                if step % 2 == 0:
                    self.client.post(f"/runs/{run_id}/checkpoints", {"step": step, "uri": f"file:///{step}"})
                    acknowledged.append(CheckpointSaved(step, f"file:///{step}"))
                score = step / 10 if step <= peak else (2 * peak - step) / 10
                batch = [
                    PostedObservation("proxy", step, step * 1.5),
                    PostedObservation("kl", step, step / 3),
                    PostedObservation("eval", step, score + self._rng.gauss(0, 0.01)),
                ]
                self.client.post(f"/runs/{run_id}/observations", build_batch(batch))
                acknowledged.append(Observations(tuple(batch)))
                self.acknowledged.append(batch)


def kill_processes(
    service: Installation, trainers: list[SweepTrainer], receiver: FakeReceiver, rng: random.Random, kills: int
) -> None:
    """Kill the server during ingestion and the worker during delivery, in turn."""
    for number in range(kills):
        if number % 2:
            wait_for_requests(service, receiver, rng.randint(1, 6))
            service.restart_worker()
        else:
            wait_for_batches(trainers, rng.randint(2, 16))
            service.restart_server()


def wait_for_requests(service: Installation, receiver: FakeReceiver, more: int) -> None:
    target_count = receiver.received_count + more

    def reached() -> bool:
        service.check_running()
        return receiver.received_count >= target_count

    wait_until(reached, f"{more} more requests are received", TIMEOUT_SECONDS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("kind", [pytest.param("embedded", marks=pytest.mark.nightly), "separate"])
def test_kills_lose_nothing_and_every_stop_is_delivered(
    request: pytest.FixtureRequest, kind: str, kills: int, embedded_database: Database
) -> None:
    """After repeated kills every acknowledged observation is stored, verdicts are as without kills, each stop is
    delivered."""
    service: Installation = request.getfixturevalue(kind)
    project, end = service.project, threading.Event()
    with start_fake_receiver(random.Random(SEED)) as receiver:
        with RetryingClient(service.key, service.choose_url) as client:
            receiver.secret = client.post("/endpoints", {"url": receiver.url, "event_types": EVERY_EVENT})["secret"]
        trainers = [
            SweepTrainer(
                RetryingClient(service.key, service.choose_url), f"trainer-{number}", end, random.Random(SEED + number)
            )
            for number in range(2)
        ]
        with run_trainers(trainers, end):
            kill_processes(service, trainers, receiver, random.Random(SEED), kills)
        reported = {run_id: messages for trainer in trainers for run_id, messages in trainer.messages.items()}
        decided = set()
        for run_id, messages in reported.items():
            run = find_run(project, run_id)
            other, expected = ingest_without_faults(embedded_database, messages)
            assert summarize_run(run) == summarize_run(expected)
            assert load_observations(project, run) == load_observations(other, expected)
            decision, expected_decision = project.find_decision(run), other.find_decision(expected)
            assert (decision and decision.step) == (expected_decision and expected_decision.step)
            if decision is not None:
                decided.add(str(decision.id))
        assert len(decided) >= len(reported) // 2
        assert receiver.wait_for(lambda: decided <= list_delivered_decisions(receiver), TIMEOUT_SECONDS)
        assert list_delivered_decisions(receiver) == decided
        assert receiver.invalid_signatures == 0
        assert all(len(bodies) == 1 for bodies in receiver.bodies.values())


def list_delivered_decisions(receiver: FakeReceiver) -> set[str]:
    return {data["decision"]["id"] for data in receiver.events("run.stop_requested")}


KILLS_SEED = 20260102
RUNS = 12
FINAL_SECONDS = 150.0
FINAL_STATES = {DecisionState.CONFIRMED, DecisionState.FAILED}
ESCALATION_STATES = ["requested", "escalated", "escalated", "failed"]


def create_project(database: Database, receiver: FakeReceiver) -> ProjectFixture:
    """A project that sends every event to the receiver, without a veto window, which only servers end, and with a short
    confirmation time."""
    project = set_up_project(database, veto_window_seconds=0.0)
    project.change_settings(confirm_seconds=4.0, stops_per_hour=None, stops_share=None)
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
    kills, deadline = 0, time.monotonic() + FINAL_SECONDS
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


@pytest.mark.nightly
def test_killed_workers_escalate_each_stop_once(database_url: str, tmp_path: Path) -> None:
    """Each stop is confirmed, or requested, escalated and reported as failed, once each, although workers are
    killed."""
    database, rng, ending = Database(database_url), random.Random(KILLS_SEED), threading.Event()
    count = 1 if database.embedded else 2
    logs = [tmp_path / f"{number}.log" for number in range(count)]
    workers = [Program(log, "deliver", EVALSTOP_DATABASE_URL=database_url, **FAST_DELIVERY) for log in logs]
    with ExitStack() as stack:
        stack.callback(database.close)
        receiver = stack.enter_context(start_fake_receiver(random.Random(KILLS_SEED)))
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
        reporter.result(FINAL_SECONDS)
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
        assert receiver.wait_for(lambda: len(receiver.events("run.stop_failed")) == failures, FINAL_SECONDS)
        assert all(len(bodies) == 1 for bodies in receiver.bodies.values())
        assert not any("Traceback" in log.read_text() for log in logs)
