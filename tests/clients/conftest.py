"""A fake service on a free port, a real service, and an environment without the settings of whoever runs the tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from evalstop_service.store.database import Database

from tests.clients.fake_service import FakeServer, FakeService
from tests.clients.programs import wait_until
from tests.clients.real_service import Project, make_project, running_service
from tests.clients.receivers.listening_receiver import ListeningReceiver, listening_receiver


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EVALSTOP_URL", "EVALSTOP_KEY", "EVALSTOP_RUN_NAME", "EVALSTOP_LABELS"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "EVALSTOP_KUBERNETES_", "KUBE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EVALSTOP_SPOOL", str(tmp_path / "spool"))


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def server(service: FakeService) -> Iterator[FakeServer]:
    with FakeServer(service) as server:
        yield server


@pytest.fixture
def listener(server: FakeServer, tmp_path: Path) -> Iterator[ListeningReceiver]:
    """A receiver that listens."""
    with listening_receiver(server, tmp_path) as listener:
        yield listener


@pytest.fixture
def ended_runs() -> Iterator[None]:
    """Waits until no thread of a run is left."""
    yield
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("evalstop-")])


@pytest.fixture(scope="module")
def real_service(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Database]]:
    """A real service, for tests of reading and deciding."""
    with running_service(migrated_file, tmp_path_factory.mktemp("real")) as running:
        yield running


@pytest.fixture
def project(real_service: tuple[str, Database]) -> Project:
    """A project whose stops wait an hour for a veto."""
    return make_project(*real_service, mode="enforce", veto_window_seconds=3600)


@pytest.fixture
def eval_project(real_service: tuple[str, Database]) -> Project:
    """A project whose policy requests evaluations."""
    return make_project(*real_service, mode="enforce", policy="early")


@pytest.fixture
def api(eval_project: Project) -> Iterator[httpx.Client]:
    """A client of `eval_project`."""
    with eval_project.open_client() as client:
        yield client
