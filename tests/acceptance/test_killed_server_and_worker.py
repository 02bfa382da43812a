"""Server and worker killed at random under load: no acknowledged observation is lost, and every stop is delivered."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from evalstop_service.ingest import CheckpointSaved, Content, Observations
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
from tests.service.project_fixture import ProjectFixture

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
