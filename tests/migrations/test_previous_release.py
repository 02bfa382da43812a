"""The previous release works during and after the migration to head, beside the new release.

The previous release is the newest tag `v*` of this repository. Until there is one, the current code is used in its
place, which tests the test itself.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from evalstop_detectors import POLICIES, MetricRole, Observation, replay
from evalstop_service.store import schema
from evalstop_service.store.database import Database

from tests.acceptance.fake_receiver import start_fake_receiver
from tests.acceptance.programs import Program
from tests.fixtures.projects import read_pages

pytestmark = [pytest.mark.real, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
RELEASE_FOLDERS = ("detectors", "service", "migrations")

EVALS = [0.1, 0.2, 0.3, 0.35, 0.4, 0.38, 0.41, 0.45, 0.5, 0.49, 0.52, 0.5, 0.48, 0.45, 0.4]

SHORT_INTERVALS = {
    "EVALSTOP_MAX_MODE": "enforce",
    "EVALSTOP_DELIVERY_LONGEST_PAUSE_SECONDS": "0.5",
    "EVALSTOP_DELIVERY_POLL_SECONDS": "0.1",
}


@dataclass
class Release:
    """A client of a running release of the service."""

    client: httpx.Client

    def open_run(self, name: str) -> str:
        run = self.client.post("/runs", json={"name": name, "policy": "paper", "mode": "enforce"})
        identity: str = run.raise_for_status().json()["id"]
        return identity

    def post_observations(self, run_id: str, observations: list[dict[str, Any]]) -> dict[str, Any]:
        answer = self.client.post(f"/runs/{run_id}/observations", json={"observations": observations})
        document: dict[str, Any] = answer.raise_for_status().json()
        return document

    def get_run(self, run_id: str) -> dict[str, Any]:
        document: dict[str, Any] = self.client.get(f"/runs/{run_id}").raise_for_status().json()
        return document

    def list_observations(self, run_id: str, metric: str) -> list[dict[str, Any]]:
        path = f"/runs/{run_id}/observations"
        return read_pages(lambda query: self.client.get(path, params={"metric": metric, **query}).json())


@dataclass
class Writer:
    """Posts observations without a pause until the end of the block."""

    release: Release
    run_id: str
    posted: int = 0
    failures: list[BaseException] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Writer:
        self._thread = threading.Thread(target=self._write)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        try:
            while not self._stop.is_set():
                observation = {"metric": "loss", "step": self.posted, "value": 1.0}
                assert self.release.post_observations(self.run_id, [observation])["accepted"] == 1
                self.posted += 1
        except BaseException as error:
            self.failures.append(error)


@pytest.fixture(scope="session")
def previous_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code of the previous release."""
    folder = tmp_path_factory.mktemp("previous")
    git = ["git", "-C", str(ROOT)]
    tags = subprocess.run([*git, "tag", "--list", "v*", "--sort=-v:refname"], capture_output=True, text=True)
    if newest := tags.stdout.split()[:1]:
        archive = subprocess.run([*git, "archive", *newest, *RELEASE_FOLDERS], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    else:
        for part in RELEASE_FOLDERS:
            shutil.copytree(ROOT / part, folder / part, symlinks=True)
    return folder


@pytest.fixture
def old(empty_url: str, previous_release: Path, tmp_path: Path) -> Iterator[Release]:
    """The previous release in one process, on a database at that release's head."""
    environment = SHORT_INTERVALS | {
        "EVALSTOP_DATABASE_URL": empty_url,
        "PYTHONPATH": f"{previous_release}/detectors:{previous_release}/service",
    }
    files = subprocess.run(
        [
            sys.executable,
            "-c",
            "import evalstop_service, evalstop_detectors as d; print(evalstop_service.__file__, d.__file__)",
        ],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert all(path.startswith(str(previous_release)) for path in files.stdout.split())
    program = Program(tmp_path / "old.log", "up", "--json", "--port", "0", **environment)
    with ExitStack() as stack:
        stack.callback(program.kill)
        ready = program.start_server()
        yield Release(stack.enter_context(create_client(ready["url"], ready["key"])))


def create_client(url: str, key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=f"{url}/api/v1", headers=headers, timeout=60, trust_env=False)


def build_evals(first: int, last: int) -> list[dict[str, Any]]:
    """The evals from `first` up to but not including `last`."""
    return [{"metric": "eval", "step": step, "value": EVALS[step]} for step in range(first, last)]


def replay_verdict(last: int) -> dict[str, Any]:
    """The verdict of a replay of the first `last` evals."""
    points = [Observation(MetricRole.EVAL, step, EVALS[step]) for step in range(last)]
    verdict = replay(POLICIES["paper"], points).verdict
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(verdict))
    return document


def test_previous_and_new_release_share_a_database(empty_url: str, old: Release, tmp_path: Path) -> None:
    """Verdicts, resumes and deliveries continue on the new schema, and the releases can alternate on the same run."""
    shared, resumed = old.open_run("shared"), old.open_run("resumed")
    assert old.post_observations(shared, build_evals(0, 4))["verdict"] == replay_verdict(4)
    old.post_observations(resumed, [*build_evals(0, 4), {"metric": "eval", "step": 4, "value": 9.0}])

    database = Database(empty_url)
    with Writer(old, old.open_run("written-during-migration")) as writer:
        schema.upgrade_schema(database)
    assert writer.failures == []
    assert schema.current_revision(database) == schema.head_revision()
    with database.transaction() as tx:  # limits would put stops on hold, a state unknown to the old release
        tx.exec_driver_sql("UPDATE projects SET stops_per_hour = NULL, stops_share = NULL, veto_window_seconds = 0")
    database.close()
    for run_id in (shared, resumed):
        old.client.post(f"/runs/{run_id}/checkpoints", json={"step": 3, "uri": "file:///3"}).raise_for_status()
    stored = old.list_observations(writer.run_id, "loss")
    assert [item["step"] for item in stored] == list(range(writer.posted))

    # The old release alone, on the new schema.
    answer = old.post_observations(shared, build_evals(2, 6))
    assert (answer["accepted"], answer["duplicates"], answer["verdict"]) == (2, 2, replay_verdict(6))
    old.client.post(f"/runs/{resumed}/resume", json={"step": 3}).raise_for_status()
    assert old.post_observations(resumed, build_evals(4, 8))["verdict"] == replay_verdict(8)

    program = Program(tmp_path / "new.log", "serve", "--json", "--port", "0", EVALSTOP_DATABASE_URL=empty_url)
    with ExitStack() as stack:
        stack.callback(program.kill)
        key = old.client.headers["Authorization"].removeprefix("Bearer ")
        new = Release(stack.enter_context(create_client(program.start_server()["url"], key)))
        receiver = stack.enter_context(start_fake_receiver(random.Random(0)))
        endpoint = old.client.post("/endpoints", json={"url": receiver.url, "event_types": ["run.stop_requested"]})
        receiver.secret = endpoint.raise_for_status().json()["secret"]

        # Both releases in turn, on the same runs.
        assert new.post_observations(shared, build_evals(6, 8))["verdict"] == replay_verdict(8)
        assert new.post_observations(resumed, build_evals(8, 9))["verdict"] == replay_verdict(9)
        assert old.post_observations(shared, build_evals(8, 9))["verdict"] == replay_verdict(9)
        new.client.post(f"/runs/{resumed}/resume", json={"step": 6}).raise_for_status()
        assert old.post_observations(resumed, build_evals(7, 10))["verdict"] == replay_verdict(10)
        answer = new.post_observations(shared, build_evals(0, 11))
        assert (answer["accepted"], answer["duplicates"], answer["verdict"]) == (2, 9, replay_verdict(11))
        for step in range(11, len(EVALS)):
            release = (old, new)[step % 2]
            assert release.post_observations(shared, build_evals(step, step + 1))["verdict"] == replay_verdict(step + 1)
            assert release.post_observations(resumed, build_evals(10, step + 1))["verdict"] == replay_verdict(step + 1)
        assert replay_verdict(len(EVALS))["verdict"] == "stop"
        for release in (old, new):
            for run_id in (shared, resumed):
                run = release.get_run(run_id)
                assert (run["should_stop"], run["verdict"]) == (True, replay_verdict(len(EVALS)))
        # The old release delivers the decisions of both.
        assert receiver.wait_for(lambda: len(receiver.bodies) >= 2, 60)
        assert {event["run"]["id"] for event in receiver.events("run.stop_requested")} == {shared, resumed}
        assert receiver.invalid_signatures == 0
