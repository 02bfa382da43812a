"""The installation that a command works on."""

from __future__ import annotations

from evalstop_service import configuration
from evalstop_service.errors import ServiceError
from evalstop_service.settings import Settings
from evalstop_service.store import schema
from evalstop_service.store.database import Database


def open_database(settings: Settings) -> Database:
    """Open the configured database; raises ServiceError unless it exists with a schema for this release."""
    if settings.database_url is None and not settings.database_file.exists():
        raise ServiceError(
            f"there is no installation in {settings.data_folder.resolve()}: run this in the folder of `evalstop up`, "
            "or pass --data-folder DIR or --database-url URL"
        )
    database = configuration.create_database(settings)
    schema.require_schema(database)
    return database
