"""Brings the schema of a database to head, and says where it stands."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError

from evalstop_service.errors import ServiceError
from evalstop_service.store.database import Database
from evalstop_service.store.tables import metadata

MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"

_LOCK = 0x45_56_53_54  # any fixed number: replicas that start together migrate one after the other


def upgrade(database: Database) -> None:
    """Apply every migration that is missing, in one transaction; harmless when there is none."""
    with database.transaction() as tx:
        if not database.embedded:
            tx.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
        config = _config()
        config.attributes.update(connection=tx, metadata=metadata)
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise ServiceError(f"{error}; it seems that a newer EvalStop made this schema") from error


def current(database: Database) -> str | None:
    """The revision that the database is at; None for an empty one."""
    with database.reading() as tx:
        return MigrationContext.configure(tx).get_current_revision()


def head() -> str:
    """The revision that this code needs."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    if revision is None:
        raise LookupError(f"there are no migrations in {MIGRATIONS}")
    return revision


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return config
