"""A fake service on a free port for whoever asks, and an environment without settings of the person who tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from evalstop_service.store.database import Database

from tests.clients.fake_service import FakeServer, FakeService
from tests.clients.programs import eventually
from tests.clients.real_service import Project, make_project, running_service
from tests.clients.receivers.listening_receiver import Setup, receiving


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EVALSTOP_URL", "EVALSTOP_KEY", "EVALSTOP_RUN_NAME", "EVALSTOP_LABELS"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
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
def setup(server: FakeServer, tmp_path: Path) -> Iterator[Setup]:
    """A receiver that listens."""
    with receiving(server, tmp_path) as setup:
        yield setup


@pytest.fixture
def ended_runs() -> Iterator[None]:
    """No test leaves a thread of a run behind."""
    yield
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("evalstop-")])


@pytest.fixture(scope="session")
def real_service(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Database]]:
    """A real service, for what reads and decides."""
    with running_service(migrated_file, tmp_path_factory.mktemp("real")) as running:
        yield running


@pytest.fixture
def project(real_service: tuple[str, Database]) -> Project:
    """A project whose stops wait an hour for a veto."""
    return make_project(*real_service, mode="enforce", veto_window_seconds=3600)
