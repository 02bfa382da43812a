"""What the tests of deliveries share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from evalstop_service.store.database import Database

from tests.service.webhooks.delivery.fakes import Scene, a_scene


@pytest.fixture
def scene(database: Database) -> Scene:
    """A project with a run."""
    return a_scene(database)


@pytest.fixture(scope="module")
def migrated(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """An embedded database that the examples of one law share."""
    file = tmp_path_factory.mktemp("law") / "evalstop.db"
    shutil.copyfile(migrated_file, file)
    database = Database(f"sqlite:///{file}")
    yield database
    database.close()
