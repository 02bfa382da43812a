"""What all tests share: a migrated database of their own, embedded and PostgreSQL."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest
import sqlalchemy as sa
from evalstop_service.store import schema
from evalstop_service.store.database import Database

sys.path.insert(0, str(Path(__file__).parent.parent))  # importlib mode leaves the path as it is
from tests.fixtures.postgres_server import NoPostgres, connected, postgres

os.environ["EVALSTOP_HELD_OUT_SHARE"] = "0"  # what is to be stopped is stopped, unless a test is about chance
os.environ["EVALSTOP_WEBHOOK_NETWORKS"] = "127.0.0.0/8,::1/128"  # where the receivers of the tests listen

# A script that runs the tests in the background has them ignore Ctrl-C, and all programs that they start with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

BACKENDS = ("sqlite", "postgresql")


class ClonePostgres(Protocol):
    """Makes a database and gives its URL: at head, or without any table."""

    def __call__(self, empty: bool = False) -> str: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what mostly waits, for as long as mypy is at work; what is short is left for the end."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/clients/receivers/slurm/"))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported: it stays, and looking through it takes an eighth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedded database at head, to copy from."""
    file = tmp_path_factory.mktemp("template") / "template.db"
    database = Database(f"sqlite:///{file}")
    schema.upgrade(database)
    database.close()  # the last connection to close folds the write-ahead log into the file
    return file


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a real PostgreSQL, one a test process; skips where there is none, and fails in CI."""
    with ExitStack() as stack:
        try:
            url = stack.enter_context(postgres())
        except NoPostgres as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(str(error))
        yield url


@pytest.fixture(scope="session")
def clone_postgres(postgres_url: str) -> Iterator[ClonePostgres]:
    """Makes fresh databases, cloned from one at head."""
    names: list[str] = []

    def create(template: str | None = None) -> str:
        name = f"evalstop_test_{uuid.uuid4().hex}"
        with connected(postgres_url) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template or 'template0'}")
        names.append(name)
        return name

    def url_of(name: str) -> str:
        return sa.make_url(postgres_url).set(database=name).render_as_string(hide_password=False)

    template = create()
    migrated = Database(url_of(template))
    schema.upgrade(migrated)
    migrated.close()
    yield lambda empty=False: url_of(create(None if empty else template))
    if "TEST_DATABASE_URL" not in os.environ:
        return  # dropping is slow, and a server of our own goes with all it has
    with connected(postgres_url) as connection:
        for name in names:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a migrated database of the test's own: the embedded one, then PostgreSQL."""
    if request.param == "sqlite":
        file = tmp_path / "evalstop.db"
        shutil.copyfile(request.getfixturevalue("migrated_file"), file)
        return f"sqlite:///{file}"
    clone: ClonePostgres = request.getfixturevalue("clone_postgres")
    return clone()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A migrated database of the test's own: the embedded one, then PostgreSQL."""
    database = Database(database_url)
    yield database
    database.close()


@pytest.fixture
def postgres_database(clone_postgres: ClonePostgres) -> Iterator[Database]:
    """A migrated PostgreSQL of the test's own, for what only it can do."""
    database = Database(clone_postgres())
    yield database
    database.close()


@pytest.fixture
def empty_postgres_url(clone_postgres: ClonePostgres) -> str:
    """The URL of a PostgreSQL database without any table."""
    return clone_postgres(empty=True)


@pytest.fixture
def embedded_database(migrated_file: Path, tmp_path: Path) -> Iterator[Database]:
    """A migrated embedded database of the test's own, for what only it can do."""
    file = tmp_path / "embedded.db"
    shutil.copyfile(migrated_file, file)
    database = Database(f"sqlite:///{file}")
    yield database
    database.close()
