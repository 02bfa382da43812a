"""A service on PostgreSQL to do harm to, and a PostgreSQL that may be restarted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from evalstop_service.store import schema
from evalstop_service.store.database import Database

from tests.conftest import ClonePostgres
from tests.faults.retrying_clients import Caller
from tests.faults.run_records import installed
from tests.faults.servers import Replicas, Restartable, restartable, serving
from tests.service.project_fixture import ProjectFixture

OWN = "this needs a PostgreSQL of its own, not the one that TEST_DATABASE_URL names"


@dataclass(frozen=True)
class Installation:
    """One `evalstop serve`, its project as it stands in the database, and a key to that."""

    project: ProjectFixture
    service: Replicas
    key: str

    def caller(self) -> Caller:
        return Caller(self.key, lambda: self.service.url)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory, clone_postgres: ClonePostgres) -> Iterator[Installation]:
    """A service on a database of its own, which the tests of a module do harm to one after the other."""
    yield from _installed(tmp_path_factory.mktemp("service"), clone_postgres())


@pytest.fixture
def own_postgres(postgres_url: str) -> Iterator[Restartable]:
    """A PostgreSQL that nobody else uses."""
    if "TEST_DATABASE_URL" in os.environ:
        pytest.skip(OWN)
    with restartable() as server:
        yield server


@pytest.fixture
def on_own_postgres(tmp_path: Path, own_postgres: Restartable) -> Iterator[Installation]:
    """A service on the PostgreSQL that nobody else uses."""
    database = Database(own_postgres.url)
    schema.upgrade_schema(database)
    database.close()
    yield from _installed(tmp_path, own_postgres.url)


def _installed(folder: Path, url: str) -> Iterator[Installation]:
    with ExitStack() as stack:
        database = Database(url)
        stack.callback(database.close)
        project, key = installed(database)
        yield Installation(project, stack.enter_context(serving(folder, url)), key)
