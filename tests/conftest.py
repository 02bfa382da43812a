"""What all tests share: where they write, and a migrated database each, embedded and PostgreSQL."""

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

# Before NumPy is imported. The tests fill every core by their number; a library that adds threads of its own has them
# wait for each other in loops, which costs a small product of matrices five times its processor time.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import sqlalchemy as sa
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent.parent))  # importlib mode leaves the path as it is
from tests.fixtures.empty_databases import EmptyDatabases, EmptyFiles, EmptyPostgres
from tests.fixtures.postgres_server import NoPostgres, connected, postgres
from tests.service import committers

gc.disable()  # until all tests are collected: what they import stays

os.environ["EVALSTOP_HELD_OUT_SHARE"] = "0"  # what is to be stopped is stopped, unless a test is about chance
os.environ["EVALSTOP_WEBHOOK_NETWORKS"] = "127.0.0.0/8,::1/128"  # where the receivers of the tests listen

# A script that runs the tests in the background has them ignore Ctrl-C, and all programs that they start with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# In CI the examples are the same each time: a red build is then the fault of its change. Elsewhere they are new ones.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("tests"), derandomize=False, max_examples=600)
settings.register_profile("quick", settings.get_profile("tests"), max_examples=8)  # of `make check`
settings.load_profile("tests")

BACKENDS = ("sqlite", "postgresql")

# Most of what the tests do is commit. In memory a flush to disk costs nothing; a process that is killed loses nothing.
MEMORY_BYTES = 4 << 30


def memory() -> Path | None:
    """A folder in memory with room for the tests' files; None where there is none."""
    folder = Path("/dev/shm")
    if not folder.is_dir() or shutil.disk_usage(folder).free < MEMORY_BYTES:
        return None
    return None if os.statvfs(folder).f_flag & os.ST_NOEXEC else folder


MEMORY = memory()
if MEMORY is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

UNFLUSHED = ("fsync=off", "full_page_writes=off", "max_wal_size=128MB", "autovacuum=off")
"""Of the PostgreSQL that the tests share: it may lose its data to a loss of power alone."""


class ClonePostgres(Protocol):
    """Makes a database and gives its URL: at head, or without any table."""

    def __call__(self, empty: bool = False) -> str: ...


BOTH_MATTER = ("tests/service/store/", "tests/service/ingest/", "tests/migrations/")
"""Where a quick look at the tests takes PostgreSQL, too: these talk to the database itself."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what takes long, and leave the second database of tests that are above it to `make test`."""
    # What is short is left for the end, where it fills every process. Tests of Slurm mostly wait: two other files are
    # begun beside each of theirs, but none of a real Kubernetes, which most machines skip.
    files = dict.fromkeys(item.path for item in sorted(items, key=lambda item: (not is_real(item), is_skipped(item))))
    waiting = [file for file in files if file.parent.name == "slurm"]
    others = [file for file in files if file.parent.name != "slurm"]
    woven = [file for place, one in enumerate(waiting) for file in (one, *others[2 * place : 2 * place + 2])]
    order = {file: place for place, file in enumerate(woven + others[2 * len(waiting) :])}
    items.sort(key=lambda item: order[item.path])
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if "postgresql" in parameters and not item.nodeid.startswith(BOTH_MATTER):
            item.add_marker(pytest.mark.real)


def is_real(item: pytest.Item) -> bool:
    """Whether its module is marked so, all of whose tests stay together."""
    module = item.getparent(pytest.Module)
    return module is not None and module.get_closest_marker("real") is not None


def is_skipped(item: pytest.Item) -> bool:
    """Whether most machines have not what it needs."""
    return item.path.parent.name == "real"


def pytest_sessionfinish() -> None:
    """Close what tests share to the end."""
    committers.close_all_committers()


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported: it stays, and looking through it takes an eighth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # a server's routes and compiled statements stay, too
    gc.enable()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedded database at head, to copy from."""
    file = tmp_path_factory.mktemp("template") / "template.db"
    database = Database(f"sqlite:///{file}")
    schema.upgrade_schema(database)
    database.close()  # the last connection to close folds the write-ahead log into the file
    return file


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a real PostgreSQL, one a test process; skips where there is none, and fails in CI."""
    with ExitStack() as stack:
        try:
            url = stack.enter_context(postgres(UNFLUSHED, MEMORY))
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
    schema.upgrade_schema(migrated)
    migrated.close()
    yield lambda empty=False: url_of(create(None if empty else template))
    if "TEST_DATABASE_URL" not in os.environ:
        return  # dropping is slow, and a server of our own goes with all it has
    with connected(postgres_url) as connection:
        for name in names:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def empty_postgres(clone_postgres: ClonePostgres) -> Iterator[EmptyPostgres]:
    """PostgreSQL databases at head, which tests use one after another."""
    databases = EmptyPostgres(clone_postgres)
    yield databases
    databases.close()


@pytest.fixture(scope="session")
def empty_files(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> EmptyFiles:
    """Embedded databases at head, which tests use one after another."""
    return EmptyFiles(migrated_file, tmp_path_factory.mktemp("databases"))


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a migrated database of the test's own: the embedded one, then PostgreSQL."""
    with empty_databases(request, request.param).borrow() as url:
        yield url


@pytest.fixture
def database(request: pytest.FixtureRequest, database_url: str) -> Database:
    """A migrated database of the test's own: the embedded one, then PostgreSQL."""
    return empty_databases(request, database_url).lent(database_url)


def empty_databases(request: pytest.FixtureRequest, kind: str) -> EmptyDatabases:
    """Where databases of a kind, or with such a URL, come from."""
    databases: EmptyDatabases = request.getfixturevalue(
        "empty_files" if kind.startswith("sqlite") else "empty_postgres"
    )
    return databases


@pytest.fixture
def postgres_database(empty_postgres: EmptyPostgres) -> Iterator[Database]:
    """A migrated PostgreSQL of the test's own, for what only it can do."""
    with empty_postgres.borrow() as url:
        yield empty_postgres.lent(url)


@pytest.fixture
def empty_postgres_url(clone_postgres: ClonePostgres) -> str:
    """The URL of a PostgreSQL database without any table."""
    return clone_postgres(empty=True)


@pytest.fixture
def embedded_database(empty_files: EmptyFiles) -> Iterator[Database]:
    """A migrated embedded database of the test's own, for what only it can do."""
    with empty_files.borrow() as url:
        yield empty_files.lent(url)
