"""Server and worker killed at random under load: no acknowledged observation is lost, and every stop is delivered."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.ingest import CheckpointSaved, Observations
from evalstop_service.projects import api_keys
from evalstop_service.rules.decision_lifecycle import Mode
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation

from tests.acceptance.fake_receiver import FakeReceiver
from tests.acceptance.programs import FAST_DELIVERY, Program
from tests.conftest import ClonePostgres
from tests.faults.retrying_clients import wait_until
from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.project_fixture import lift_stop_limits, set_up_project

pytestmark = pytest.mark.real

SEED = 20260101
TIMEOUT_SECONDS = 60.0


@dataclass
class Installation:
    """The running programs of a service, and its current address."""

    server: Program
    worker: Program
    key: str
    url: str = ""

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


@dataclass
class ReportedRun:
    """What a trainer reported of one run, all of it acknowledged."""

    run_id: str
    batches: list[list[PostedObservation]] = field(default_factory=list)
    checkpoint_steps: list[int] = field(default_factory=list)


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Installation]:
    """`evalstop up`: server and worker in one process, on the embedded database."""
    up = Program(
        tmp_path / "log",
        "up",
        "--json",
        "--port",
        "0",
        EVALSTOP_MAX_MODE="enforce",
        EVALSTOP_DATA_FOLDER=str(tmp_path / "data"),
        **FAST_DELIVERY,
    )
    first = up.start_server()
    database = Database(f"sqlite:///{tmp_path / 'data' / 'evalstop.db'}")
    lift_stop_limits(database)
    database.close()
    yield Installation(up, up, first["key"], first["url"])
    up.kill()


@pytest.fixture
def separate(tmp_path: Path, clone_postgres: ClonePostgres) -> Iterator[Installation]:
    """`evalstop serve` and `evalstop deliver` on one PostgreSQL."""
    url = clone_postgres()
    database = Database(url)
    key = api_keys.create_first_key(database, utc_now(), max_mode=Mode.ENFORCE)
    lift_stop_limits(database)
    database.close()
    assert key is not None
    environment = FAST_DELIVERY | {"EVALSTOP_MAX_MODE": "enforce", "EVALSTOP_DATABASE_URL": url}
    serve = Program(tmp_path / "serve.log", "serve", "--json", "--port", "0", **environment)
    deliver = Program(tmp_path / "deliver.log", "deliver", **environment)
    with ExitStack() as stack:
        stack.callback(serve.kill)
        stack.callback(deliver.kill)
        address = serve.start_server()["url"]
        deliver.start()
        yield Installation(serve, deliver, key, address)


class Trainer(threading.Thread):
    """Reports one run after another until it is told to end, and repeats each request until it is acknowledged."""

    def __init__(self, installation: Installation, rng: random.Random, ending: threading.Event) -> None:
        super().__init__()
        self.reported_runs: list[ReportedRun] = []
        self.acknowledged = 0
        self.failure: BaseException | None = None
        self._installation, self._rng, self._ending = installation, rng, ending
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {installation.key}"}, timeout=10, trust_env=False
        )

    def run(self) -> None:
        try:
            with self._client:
                while not self._ending.is_set():
                    self._report_one_run()
        except BaseException as error:
            self.failure = error

    def _report_one_run(self) -> None:
        run = self._post(
            "/runs", {"name": f"{self.name}-{len(self.reported_runs)}", "mode": "enforce", "policy": "paper"}
        )
        reported = ReportedRun(run["id"])
        self.reported_runs.append(reported)
        peak = self._rng.randint(3, 8)
        for step in range(peak + 5):
            if step % 2 == 0:
                self._post(f"/runs/{reported.run_id}/checkpoints", {"step": step, "uri": f"file:///{step}"})
                reported.checkpoint_steps.append(step)
            gold = step / 10 if step <= peak else (2 * peak - step) / 10
            batch = [
                PostedObservation("proxy", step, step * 1.5),
                PostedObservation("kl", step, step / 3),
                PostedObservation("eval", step, gold + self._rng.gauss(0, 0.01)),
            ]
            document = [{"metric": point.metric, "step": step, "value": point.value} for point in batch]
            self._post(f"/runs/{reported.run_id}/observations", {"observations": document})
            reported.batches.append(batch)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            try:
                response = self._client.post(f"{self._installation.url}/api/v1{path}", json=body)
                if response.status_code in (200, 201):
                    self.acknowledged += 1
                    document: dict[str, Any] = response.json()
                    return document
                assert response.status_code == 503, response.text
            except httpx.TransportError:
                self._installation.check_running()
            assert time.monotonic() < deadline, "the service does not come back"
            time.sleep(0.02)


def kill_processes(
    service: Installation, trainers: list[Trainer], receiver: FakeReceiver, rng: random.Random, kills: int
) -> None:
    """Kill the server during ingestion and the worker during delivery, in turn."""
    for number in range(kills):
        if number % 2:
            wait_for_requests(service, receiver, rng.randint(1, 6))
            service.restart_worker()
        else:
            wait_for_acknowledgements(trainers, rng.randint(3, 25))
            service.restart_server()


def wait_for_requests(service: Installation, receiver: FakeReceiver, more: int) -> None:
    target_count = receiver.received_count + more

    def reached() -> bool:
        service.check_running()
        return receiver.received_count >= target_count

    wait_until(reached, f"{more} more requests are received", TIMEOUT_SECONDS)


def wait_for_acknowledgements(trainers: list[Trainer], more: int) -> None:
    target_count = sum(trainer.acknowledged for trainer in trainers) + more

    def reached() -> bool:
        assert all(trainer.failure is None for trainer in trainers), [trainer.failure for trainer in trainers]
        return sum(trainer.acknowledged for trainer in trainers) >= target_count

    wait_until(reached, f"{more} more requests are acknowledged", TIMEOUT_SECONDS)


def compute_expected_state(database: Database, reported: ReportedRun) -> dict[str, Any]:
    """The state of the run when the same messages are processed without a kill."""
    project = set_up_project(database)
    run = project.open_run()
    for step in reported.checkpoint_steps:
        project.submit(run, CheckpointSaved(step, f"file:///{step}"))
    for batch in reported.batches:
        project.submit(run, Observations(tuple(batch)))
    stored = project.load_run(run)
    decision = project.find_decision(run)
    expected = {
        "verdict": stored.verdict,
        "best_checkpoint": stored.best_checkpoint,
        "raw_maximum": stored.raw_maximum,
        "decided_at": decision and decision.step,
    }
    return dict(msgspec.json.decode(msgspec.json.encode(expected)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("kind", ["embedded", "separate"])
def test_kills_lose_nothing_and_every_stop_is_delivered(
    request: pytest.FixtureRequest, kind: str, kills: int, embedded_database: Database
) -> None:
    """After repeated kills every acknowledged observation is stored, verdicts are as without kills, each stop is
    delivered."""
    service: Installation = request.getfixturevalue(kind)
    rng, ending = random.Random(SEED), threading.Event()
    with (
        FakeReceiver(random.Random(SEED)) as receiver,
        httpx.Client(headers={"Authorization": f"Bearer {service.key}"}, timeout=30, trust_env=False) as client,
    ):
        body = {"url": receiver.url, "event_types": EVERY_EVENT}
        receiver.secret = client.post(f"{service.url}/api/v1/endpoints", json=body).raise_for_status().json()["secret"]
        trainers = [Trainer(service, random.Random(SEED + number), ending) for number in range(2)]
        for trainer in trainers:
            trainer.start()
        try:
            kill_processes(service, trainers, receiver, rng, kills)
        finally:
            ending.set()
            for trainer in trainers:
                trainer.join()
        assert [trainer.failure for trainer in trainers] == [None, None]
        runs = [reported for trainer in trainers for reported in trainer.reported_runs]
        decided = set()
        for reported in runs:
            run = client.get(f"{service.url}/api/v1/runs/{reported.run_id}").raise_for_status().json()
            state = {name: run[name] for name in ("verdict", "best_checkpoint", "raw_maximum")}
            state["decided_at"] = run["decision"] and run["decision"]["step"]
            assert state == compute_expected_state(embedded_database, reported)
            assert fetch_observations(client, service, reported) == {
                (point.metric, point.step): point.value for batch in reported.batches for point in batch
            }
            if run["decision"]:
                decided.add(run["decision"]["id"])
        assert len(decided) >= len(runs) // 2
        assert receiver.wait_for(lambda: decided <= list_delivered_decisions(receiver), TIMEOUT_SECONDS)
        assert list_delivered_decisions(receiver) == decided
        assert receiver.invalid_signatures == 0
        assert all(len(bodies) == 1 for bodies in receiver.bodies.values())


def list_delivered_decisions(receiver: FakeReceiver) -> set[str]:
    return {data["decision"]["id"] for data in receiver.events("run.stop_requested")}


def fetch_observations(
    client: httpx.Client, service: Installation, reported: ReportedRun
) -> dict[tuple[str, int], float]:
    observations: dict[tuple[str, int], float] = {}
    for metric in ("eval", "proxy", "kl"):
        path = f"{service.url}/api/v1/runs/{reported.run_id}/observations"
        answer = client.get(path, params={"metric": metric}).raise_for_status().json()
        assert answer["next_cursor"] is None
        observations |= {(metric, item["step"]): item["value"] for item in answer["items"]}
    return observations
