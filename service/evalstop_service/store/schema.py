"""Migrates the schema of a database, and reports its revision."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import Script, ScriptDirectory
from alembic.util import CommandError

from evalstop_service.errors import ServiceError
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.faults import Fault, find_fault
from evalstop_service.store.tables import metadata, projects

MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"

_LOCK = 0x45_56_53_54  # any fixed number: replicas that start together migrate one after the other
_WAIT_SECONDS = 0.1
_LOCK_TIMEOUT_SECONDS = 2  # statements queue behind a waiting migration, and no trainer should wait for longer
_TRIES = 100


def upgrade_schema(database: Database, folder: Path = MIGRATIONS) -> None:
    """Apply all missing migrations, if any. The previous release still runs on the schema.

    SQLite: all in one transaction. PostgreSQL: one transaction for each migration, or several where the migration says
    so. Raises ServiceError if the database's encoding is not UTF-8, or its schema newer than this code.
    """
    with _hold_migration_lock(database) as connection:
        config = _create_config(folder)
        config.attributes.update(connection=connection, metadata=metadata)
        for tries_left in reversed(range(_TRIES)):
            try:
                command.upgrade(config, "head")
                return
            except CommandError as error:
                raise ServiceError(f"{error}; the schema was probably created by a newer EvalStop") from error
            except sa.exc.OperationalError as error:  # such as a deadlock, or a lock that was not free in time
                if not tries_left or find_fault(error) is not Fault.CONFLICT:
                    raise
            time.sleep(_WAIT_SECONDS)


def current_revision(database: Database) -> str | None:
    """The revision of the database; None for an empty one."""
    with database.reading() as tx:
        return MigrationContext.configure(tx).get_current_revision()


def require_writing(tx: Transaction) -> None:
    """Raise the database's error if rows may only be read on this connection, as where a server became a standby."""
    # PostgreSQL asks for the right to write before it looks for a row, and none is locked for longer.
    tx.execute(sa.select(projects.c.id).limit(1).with_for_update(skip_locked=True))


def head_revision(folder: Path = MIGRATIONS) -> str:
    """The newest revision."""
    return _list_revisions(folder)[-1].revision


def is_served(revision: str | None, folder: Path = MIGRATIONS) -> bool:
    """Whether this code runs on a schema at this revision; newer, unknown revisions are compatible by promise."""
    earlier = [script.revision for script in _list_revisions(folder)[:-1]]
    return revision is not None and revision not in earlier


def require_schema(database: Database) -> None:
    """Raise ServiceError unless this code runs on the database's schema."""
    revision = current_revision(database)
    if not is_served(revision):
        raise ServiceError(
            f"the schema is at {revision or 'nothing'}, {head_revision()} is needed; run `evalstop migrate` first"
        )


@contextmanager
def _hold_migration_lock(database: Database) -> Iterator[sa.Connection]:
    """A connection for migrations, with a lock that keeps other processes from migrating."""
    if database.embedded:
        with database.transaction() as tx:
            yield tx
        return
    with database.engine.connect() as guard:
        if (encoding := guard.exec_driver_sql("SHOW server_encoding").scalar_one()) != "UTF8":
            raise ServiceError(
                f"the database's encoding is {encoding}; create it anew: CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE "
                "template0"
            )
        # Of a transaction, since a pooler keeps its session until that ends. Polled: a statement that waits inside
        # PostgreSQL holds a snapshot, which others may wait for.
        while not guard.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({_LOCK})").scalar_one():
            guard.rollback()
            time.sleep(_WAIT_SECONDS)
        guard.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout TO 0")
        with database.engine.connect() as connection:
            sa.event.listen(connection, "begin", _set_timeouts)
            yield connection


def _set_timeouts(connection: sa.Connection) -> None:
    connection.exec_driver_sql(
        f"SET LOCAL lock_timeout TO '{_LOCK_TIMEOUT_SECONDS}s'; SET LOCAL statement_timeout TO 0"
    )


@cache
def _list_revisions(folder: Path) -> list[Script]:
    """All migrations, oldest first."""
    revisions = list(ScriptDirectory.from_config(_create_config(folder)).walk_revisions())[::-1]
    if not revisions:
        raise LookupError(f"there are no migrations in {folder}")
    return revisions


def _create_config(folder: Path) -> Config:
    config = Config()
    config.set_main_option("script_location", str(folder))
    return config
