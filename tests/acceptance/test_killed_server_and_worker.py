"""kill -9 at random, amid ingestion and amid delivery: nothing acknowledged is lost, every stop is delivered."""

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
from tests.acceptance.programs import Program
from tests.conftest import ClonePostgres
from tests.fixtures.subscriptions import EVERY_EVENT
from tests.service.project_fixture import lift_stop_limits, set_up_project

pytestmark = pytest.mark.real

SEED = 20260101
DEADLINE_SECONDS = 60.0

PACE = {
    "EVALSTOP_MAX_MODE": "enforce",
    "EVALSTOP_DELIVERY_TIMEOUT_SECONDS": "1",
    "EVALSTOP_DELIVERY_LEASE_SECONDS": "1.5",
    "EVALSTOP_DELIVERY_FIRST_PAUSE_SECONDS": "0.05",
    "EVALSTOP_DELIVERY_POLL_SECONDS": "0.02",
}
"""Quick enough that what a killed worker held is taken over within the test."""


@dataclass
class Installation:
    """Where the service is reached at the moment, and its programs."""

    server: Program
    worker: Program
    key: str
    url: str = ""

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
class Told:
    """A run as its trainer told it, in batches that were all acknowledged."""

    run_id: str
    batches: list[list[PostedObservation]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Installation]:
    """`evalstop up`, everything in one process on the embedded database."""
    up = Program(tmp_path / "log", "up", "--json", "--port", "0", EVALSTOP_DATA_FOLDER=str(tmp_path / "data"), **PACE)
    first = up.start_server()
    database = Database(f"sqlite:///{tmp_path / 'data' / 'evalstop.db'}")
    lift_stop_limits(database)
    database.close()
    yield Installation(up, up, first["key"], first["url"])
    up.kill()


@pytest.fixture
def apart(tmp_path: Path, clone_postgres: ClonePostgres) -> Iterator[Installation]:
    """`evalstop serve` and `evalstop deliver` on one PostgreSQL."""
    url = clone_postgres()
    database = Database(url)
    key = api_keys.create_first_key(database, utc_now(), max_mode=Mode.ENFORCE)
    lift_stop_limits(database)
    database.close()
    assert key is not None
    environment = PACE | {"EVALSTOP_DATABASE_URL": url}
    serve = Program(tmp_path / "serve.log", "serve", "--json", "--port", "0", **environment)
    deliver = Program(tmp_path / "deliver.log", "deliver", **environment)
    with ExitStack() as stack:
        stack.callback(serve.kill)
        stack.callback(deliver.kill)
        address = serve.start_server()["url"]
        deliver.start()
        yield Installation(serve, deliver, key, address)


class Trainer(threading.Thread):
    """Tells one run after the other until it is told to end; what fails is sent again until it is acknowledged."""

    def __init__(self, installation: Installation, chance: random.Random, end: threading.Event) -> None:
        super().__init__()
        self.told: list[Told] = []
        self.acknowledged = 0
        self.failure: BaseException | None = None
        self._installation, self._chance, self._end = installation, chance, end
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {installation.key}"}, timeout=10, trust_env=False
        )

    def run(self) -> None:
        try:
            with self._client:
                while not self._end.is_set():
                    self._tell_one_run()
        except BaseException as error:
            self.failure = error

    def _tell_one_run(self) -> None:
        run = self._post("/runs", {"name": f"{self.name}-{len(self.told)}", "mode": "enforce", "policy": "paper"})
        told = Told(run["id"])
        self.told.append(told)
        peak = self._chance.randint(3, 8)
        for step in range(peak + 5):
            if step % 2 == 0:
                self._post(f"/runs/{told.run_id}/checkpoints", {"step": step, "uri": f"file:///{step}"})
                told.saved.append(step)
            gold = step / 10 if step <= peak else (2 * peak - step) / 10
            batch = [
                PostedObservation("proxy", step, step * 1.5),
                PostedObservation("kl", step, step / 3),
                PostedObservation("eval", step, gold + self._chance.gauss(0, 0.01)),
            ]
            document = [{"metric": point.metric, "step": step, "value": point.value} for point in batch]
            self._post(f"/runs/{told.run_id}/observations", {"observations": document})
            told.batches.append(batch)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                response = self._client.post(f"{self._installation.url}/api/v1{path}", json=body)
                if response.status_code in (200, 201):
                    self.acknowledged += 1
                    document: dict[str, Any] = response.json()
                    return document
                assert response.status_code == 503, response.text
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, "the service stays away"
            time.sleep(0.02)


def disturb(
    service: Installation, trainers: list[Trainer], receiver: FakeReceiver, chance: random.Random, kills: int
) -> None:
    """Kill so many times, by turns in the midst of ingestion and in the midst of a delivery."""
    for number in range(kills):
        if number % 2:
            goal = receiver.arrived + chance.randint(1, 6)
            assert receiver.wait_for(lambda goal=goal: receiver.arrived >= goal, DEADLINE_SECONDS)  # type: ignore[misc]
            service.restart_worker()
        else:
            wait_for_acknowledgements(trainers, chance.randint(3, 25))
            service.restart_server()


def wait_for_acknowledgements(trainers: list[Trainer], more: int) -> None:
    goal = sum(trainer.acknowledged for trainer in trainers) + more
    deadline = time.monotonic() + DEADLINE_SECONDS
    while sum(trainer.acknowledged for trainer in trainers) < goal:
        assert time.monotonic() < deadline
        assert all(trainer.failure is None for trainer in trainers), [trainer.failure for trainer in trainers]
        time.sleep(0.001)


def undisturbed(database: Database, told: Told) -> dict[str, Any]:
    """Where the run stands when nobody is killed."""
    project = set_up_project(database)
    run = project.open_run()
    for step in told.saved:
        project.submit(run, CheckpointSaved(step, f"file:///{step}"))
    for batch in told.batches:
        project.submit(run, Observations(tuple(batch)))
    stands = project.load_run(run)
    decision = project.find_decision(run)
    stood = {
        "verdict": stands.verdict,
        "best_checkpoint": stands.best_checkpoint,
        "raw_maximum": stands.raw_maximum,
        "decided_at": decision and decision.step,
    }
    return dict(msgspec.json.decode(msgspec.json.encode(stood)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("kind", ["embedded", "apart"])
def test_survives(request: pytest.FixtureRequest, kind: str, kills: int, embedded_database: Database) -> None:
    """Killed again and again, the service has every acknowledged point, the same verdicts, and delivers each stop."""
    service: Installation = request.getfixturevalue(kind)
    chance, end = random.Random(SEED), threading.Event()
    with (
        FakeReceiver(random.Random(SEED)) as receiver,
        httpx.Client(headers={"Authorization": f"Bearer {service.key}"}, timeout=30, trust_env=False) as client,
    ):
        body = {"url": receiver.url, "event_types": EVERY_EVENT}
        receiver.secret = client.post(f"{service.url}/api/v1/endpoints", json=body).raise_for_status().json()["secret"]
        trainers = [Trainer(service, random.Random(SEED + number), end) for number in range(2)]
        for trainer in trainers:
            trainer.start()
        try:
            disturb(service, trainers, receiver, chance, kills)
        finally:
            end.set()
            for trainer in trainers:
                trainer.join()
        assert [trainer.failure for trainer in trainers] == [None, None]
        runs = [told for trainer in trainers for told in trainer.told]
        decided = set()
        for told in runs:
            run = client.get(f"{service.url}/api/v1/runs/{told.run_id}").raise_for_status().json()
            stands = {name: run[name] for name in ("verdict", "best_checkpoint", "raw_maximum")}
            stands["decided_at"] = run["decision"] and run["decision"]["step"]
            assert stands == undisturbed(embedded_database, told)
            assert on_record(client, service, told) == {
                (point.metric, point.step): point.value for batch in told.batches for point in batch
            }
            if run["decision"]:
                decided.add(run["decision"]["id"])
        assert len(decided) >= len(runs) // 2
        assert receiver.wait_for(lambda: decided <= delivered(receiver), DEADLINE_SECONDS)
        assert delivered(receiver) == decided
        assert receiver.forged == 0
        assert all(len(bodies) == 1 for bodies in receiver.bodies.values())


def delivered(receiver: FakeReceiver) -> set[str]:
    return {data["decision"]["id"] for data in receiver.events("run.stop_requested")}


def on_record(client: httpx.Client, service: Installation, told: Told) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], float] = {}
    for metric in ("eval", "proxy", "kl"):
        path = f"{service.url}/api/v1/runs/{told.run_id}/observations"
        answer = client.get(path, params={"metric": metric}).raise_for_status().json()
        assert answer["next_cursor"] is None
        found |= {(metric, item["step"]): item["value"] for item in answer["items"]}
    return found
