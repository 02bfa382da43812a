"""Settings of all tests, and their databases: a migrated one for each test, embedded or PostgreSQL."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

# Set before NumPy is imported. The tests already use every core; threads of a linear algebra library would then spin
# while they wait for each other, which makes a small matrix product five times as expensive.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import sqlalchemy as sa
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent.parent))  # importlib mode leaves the path as it is
from tests.fixtures.asyncio_errors import AsyncioErrors
from tests.fixtures.certificates import create_self_signed_certificate
from tests.fixtures.database_pool import DatabasePool, PostgresPool, SQLitePool
from tests.fixtures.postgres_server import PostgresUnavailable, open_connection, start_postgres
from tests.service import committers

gc.disable()  # until all tests are collected, because imported modules are never freed

os.environ["EVALSTOP_HELD_OUT_SHARE"] = "0"  # no random hold-outs, except in tests of them
os.environ["EVALSTOP_WEBHOOK_NETWORKS"] = "127.0.0.0/8,::1/128"  # the addresses of the test receivers

# A service that `make run` started in this folder left its encryption key in the default data folder.
DATA_FOLDER = tempfile.TemporaryDirectory(prefix="evalstop-tests-")
os.environ["EVALSTOP_DATA_FOLDER"] = DATA_FOLDER.name

# One trusted certificate instead of a hundred and more: each client and each worker of deliveries would take 20 ms of
# processor time to load them. Tests of TLS trust the certificate of their own server.
CERTIFICATE = create_self_signed_certificate(Path(DATA_FOLDER.name), datetime.now(UTC))
os.environ["SSL_CERT_FILE"] = str(CERTIFICATE)

# A shell that starts the tests in the background makes them and their child processes ignore SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# In CI the examples are always the same, so that a failure is caused by the change. Elsewhere they are random.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    max_examples=6,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("tests"), derandomize=False, max_examples=600)
settings.register_profile("nightly", settings.get_profile("tests"), max_examples=100)
settings.register_profile("quick", settings.get_profile("tests"), max_examples=3)  # used by `make check`
settings.load_profile("tests")

ASYNCIO_ERRORS = AsyncioErrors()

BACKENDS = ("sqlite", "postgresql")

# The tests spend most of their time in commits. In memory, flushing is free and survives a killed process.
MEMORY_BYTES = 4 << 30


def find_memory_folder() -> Path | None:
    """A folder in memory with MEMORY_BYTES free, or None."""
    folder = Path("/dev/shm")
    if not folder.is_dir() or shutil.disk_usage(folder).free < MEMORY_BYTES:
        return None
    return None if os.statvfs(folder).f_flag & os.ST_NOEXEC else folder


MEMORY_FOLDER = find_memory_folder()
if MEMORY_FOLDER is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_FOLDER))

POSTGRES_SETTINGS = ("fsync=off", "full_page_writes=off", "max_wal_size=128MB", "autovacuum=off")
"""Of the PostgreSQL that the tests share: without flushes, only a power failure loses data."""


class ClonePostgres(Protocol):
    """Creates a database, migrated or without tables, and returns its URL."""

    def __call__(self, empty: bool = False) -> str: ...


ON_BOTH_DATABASES = (
    "tests/migrations/",
    "tests/security/test_answers.py::test_path_with_a_nul_character_is_not_found",
    "tests/security/test_decision_lane.py",
    "tests/service/decisions/test_approvals.py::test_concurrent_approvals_are_both_counted_or_refused",
    "tests/service/decisions/test_deadlines.py::test_concurrent_checks_escalate_once",
    "tests/service/decisions/test_guards.py::test_decisions_of_one_commit_respect_the_limit",
    "tests/service/decisions/test_guards.py::test_requested_stops_of_the_last_hour_are_counted",
    "tests/service/decisions/test_guards.py::test_share_of_stopped_runs_is_limited",
    "tests/service/decisions/test_hand_overs.py",
    "tests/service/decisions/test_sweeps.py",
    "tests/service/decisions/test_copies.py",
    "tests/service/decisions/test_veto_windows.py",
    "tests/service/ingest/test_atomicity.py",
    "tests/service/ingest/test_attempts.py::test_resume_supersedes_later_observations",
    "tests/service/ingest/test_committer.py::test_failing_message_does_not_affect_the_group",
    "tests/service/ingest/test_committer.py::test_messages_of_a_run_are_applied_in_order",
    "tests/service/ingest/test_committer.py::test_stale_cache_is_retried_once",
    "tests/service/ingest/test_committer.py::test_waiting_posts_are_committed_together",
    "tests/service/ingest/test_edits.py",
    "tests/service/runs/test_retention_beside_others.py::test_writer_beside_pruning_loses_nothing",
    "tests/service/store/queue/test_leases.py",
    "tests/service/store/queue/test_outbox_model.py",
    "tests/service/store/queue/test_queues.py",
    "tests/service/store/test_audit.py::test_concurrent_writers_extend_one_chain",
    "tests/service/store/test_audit.py::test_exported_chain_verifies_with_hashlib_alone",
    "tests/service/store/test_audit.py::test_log_is_read_by_page_actor_and_action",
    "tests/service/store/test_audit.py::test_search_has_no_special_characters",
    "tests/service/store/test_database.py",
    "tests/service/store/test_encrypted_secrets.py::test_deleting_an_endpoint_cancels_its_deliveries",
    "tests/service/store/test_ingest_stores.py",
    "tests/service/store/test_many_runs.py",
    "tests/service/store/test_series.py",
    "tests/service/web/api/test_routes.py",
    "tests/service/web/api/test_unusual_values.py",
    "tests/service/web/mlflow/test_experiments.py::test_runs_are_found_by_any_comparison",
    "tests/service/webhooks/delivery/test_concurrent_workers.py",
    "tests/service/webhooks/delivery/test_wakeup.py",
)
"""What `make test` runs on PostgreSQL too: queries, locks and concurrency, and each route once."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests, long ones first, and mark the PostgreSQL variants of most tests as `nightly`."""
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
        names = [value for value in parameters if isinstance(value, str)]  # an array cannot be compared with a name
        if "postgresql" in names and not item.nodeid.startswith(ON_BOTH_DATABASES):
            item.add_marker(pytest.mark.nightly)


def is_real(item: pytest.Item) -> bool:
    """Whether the test's module is marked `real`; the tests of such a module stay together."""
    module = item.getparent(pytest.Module)
    return module is not None and module.get_closest_marker("real") is not None


def is_skipped(item: pytest.Item) -> bool:
    """Whether the test needs something that most machines do not have."""
    return item.path.parent.name == "real"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Fail on errors that asyncio only logged, as pytest does on exceptions in threads and finalizers."""
    messages = ASYNCIO_ERRORS.take()
    assert not messages, "\n".join(messages)


def pytest_sessionfinish() -> None:
    """Close the committers that tests share, and remove their data folder."""
    committers.close_all_committers()
    DATA_FOLDER.cleanup()


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which would take an eighth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # routes and compiled statements of servers are kept, too
    gc.enable()


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Restore the logging configuration, which commands that run in this process change."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated embedded database, to be copied."""
    file = tmp_path_factory.mktemp("template") / "template.db"
    database = Database(f"sqlite:///{file}")
    schema.upgrade_schema(database)
    database.close()  # the last connection to close folds the write-ahead log into the file
    return file


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a real PostgreSQL, one per test process; without PostgreSQL the test is skipped, in CI it fails."""
    with ExitStack() as stack:
        try:
            url = stack.enter_context(start_postgres(POSTGRES_SETTINGS, MEMORY_FOLDER))
        except PostgresUnavailable as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(str(error))
        yield url


@pytest.fixture(scope="session")
def clone_postgres(postgres_url: str) -> Iterator[ClonePostgres]:
    """Creates databases by cloning a migrated one."""
    names: list[str] = []

    def create(template: str | None = None) -> str:
        name = f"evalstop_test_{uuid.uuid4().hex}"
        with open_connection(postgres_url) as connection:
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
        return  # dropping is slow, and our own server is deleted with its databases
    with open_connection(postgres_url) as connection:
        for name in names:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def postgres_pool(clone_postgres: ClonePostgres) -> Iterator[PostgresPool]:
    """The pool of migrated PostgreSQL databases."""
    pool = PostgresPool(clone_postgres)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def sqlite_pool(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SQLitePool]:
    """The pool of migrated embedded databases."""
    pool = SQLitePool(migrated_file, tmp_path_factory.mktemp("databases"))
    yield pool
    pool.close()


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a migrated database; the test runs on an embedded one and on PostgreSQL."""
    with find_pool(request, request.param).acquire() as url:
        yield url


@pytest.fixture
def database(request: pytest.FixtureRequest, database_url: str) -> Database:
    """A migrated database; the test runs on an embedded one and on PostgreSQL."""
    return find_pool(request, database_url).get_database(database_url)


def find_pool(request: pytest.FixtureRequest, kind: str) -> DatabasePool[Any]:
    """The pool of a backend; `kind` is its name or a URL."""
    pool: DatabasePool[Any] = request.getfixturevalue("sqlite_pool" if kind.startswith("sqlite") else "postgres_pool")
    return pool


@pytest.fixture
def postgres_database(postgres_pool: PostgresPool) -> Iterator[Database]:
    """A migrated PostgreSQL database, for tests of PostgreSQL alone."""
    with postgres_pool.acquire() as url:
        yield postgres_pool.get_database(url)


@pytest.fixture
def empty_postgres_url(clone_postgres: ClonePostgres) -> str:
    """The URL of a PostgreSQL database without tables."""
    return clone_postgres(empty=True)


@pytest.fixture
def embedded_database(sqlite_pool: SQLitePool) -> Iterator[Database]:
    """A migrated embedded database, for tests that need only one backend."""
    with sqlite_pool.acquire() as url:
        yield sqlite_pool.get_database(url)
