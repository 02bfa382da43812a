"""Fixtures: a service on PostgreSQL, and a PostgreSQL that tests restart."""

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
from tests.faults.retrying_clients import RetryingClient
from tests.faults.run_records import create_project_and_key
from tests.faults.servers import Replicas, RestartablePostgres, start_replica, start_restartable_postgres
from tests.service.project_fixture import ProjectFixture

NEEDS_OWN_POSTGRES = "needs a PostgreSQL of its own, not the one of TEST_DATABASE_URL"


@dataclass(frozen=True)
class Installation:
    """A running `evalstop serve`, a project in its database, and an API key of the project."""

    project: ProjectFixture
    service: Replicas
    key: str

    def open_client(self) -> RetryingClient:
        return RetryingClient(self.key, lambda: self.service.url)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory, clone_postgres: ClonePostgres) -> Iterator[Installation]:
    """A service on a database of its own, shared by the tests of a module."""
    yield from install(tmp_path_factory.mktemp("service"), clone_postgres())


@pytest.fixture
def restartable_postgres(postgres_url: str) -> Iterator[RestartablePostgres]:
    """A PostgreSQL of the test's own."""
    if "TEST_DATABASE_URL" in os.environ:
        pytest.skip(NEEDS_OWN_POSTGRES)
    with start_restartable_postgres() as server:
        yield server


@pytest.fixture
def restartable_installation(tmp_path: Path, restartable_postgres: RestartablePostgres) -> Iterator[Installation]:
    """A service on `restartable_postgres`."""
    database = Database(restartable_postgres.url)
    schema.upgrade_schema(database)
    database.close()
    yield from install(tmp_path, restartable_postgres.url)


def install(folder: Path, url: str) -> Iterator[Installation]:
    """Start a service on this database, with a project and a key."""
    with ExitStack() as stack:
        database = Database(url)
        stack.callback(database.close)
        project, key = create_project_and_key(database)
        yield Installation(project, stack.enter_context(start_replica(folder, url)), key)
