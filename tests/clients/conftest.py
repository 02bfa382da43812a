"""A fake service on a free port for whoever asks, and an environment without settings of the person who tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.fake_service import FakeServer, FakeService


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
