"""Databases without tables, to be migrated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from evalstop_service.store.database import Database

from tests.conftest import BACKENDS, ClonePostgres


@pytest.fixture(params=BACKENDS)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without tables; the test runs on an embedded one and on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    clone: ClonePostgres = request.getfixturevalue("clone_postgres")
    return clone(empty=True)


@pytest.fixture
def empty_database(empty_url: str) -> Iterator[Database]:
    database = Database(empty_url)
    yield database
    database.close()
