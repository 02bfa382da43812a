"""Fixtures of the delivery tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from evalstop_service.store.database import Database

from tests.service.webhooks.delivery.fakes import SeededProject, seed_project


@pytest.fixture
def project(database: Database) -> SeededProject:
    """A project with a run."""
    return seed_project(database)


@pytest.fixture(scope="module")
def migrated(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """An embedded database shared by the examples of a property test."""
    file = tmp_path_factory.mktemp("law") / "evalstop.db"
    shutil.copyfile(migrated_file, file)
    database = Database(f"sqlite:///{file}")
    yield database
    database.close()
