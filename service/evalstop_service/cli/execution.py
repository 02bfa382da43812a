"""Runs a parsed command with its settings, on the installation that they name."""

from __future__ import annotations

import argparse
import sys

import sqlalchemy as sa
from pydantic import ValidationError

from evalstop_service.cli.entry import FAILED, USAGE, Command
from evalstop_service.errors import ServiceError
from evalstop_service.observability import logs
from evalstop_service.settings import Settings
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from evalstop_service.store.faults import find_fault


def execute(options: argparse.Namespace) -> int:
    """Run `options.command` and return the exit code; prints errors."""
    try:
        given = {name: value for name, value in vars(options).items() if value is not None}
        settings = Settings(**{name: given[name] for name in Settings.model_fields.keys() & given})
    except ValidationError as error:
        for item in error.errors():
            setting = "".join(f"EVALSTOP_{str(name).upper()}: " for name in item["loc"])
            print(f"evalstop: {setting}{item['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return USAGE
    logs.configure_logging(settings.log_level, settings.log_format)
    try:
        command: Command = options.command
        return command(settings, options)
    except sa.exc.DBAPIError as error:
        print(f"evalstop: {find_fault(error).value}: {str(error.orig).strip()}", file=sys.stderr)
    except (ServiceError, OSError) as error:
        print(f"evalstop: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    return FAILED


def open_database(settings: Settings) -> Database:
    """Open the configured database; raises ServiceError unless it exists with a schema for this release."""
    if settings.database_url is None and not settings.database_file.exists():
        raise ServiceError(
            f"there is no installation in {settings.data_folder.resolve()}: run this in the folder of `evalstop up`, "
            "or pass --data-folder DIR or --database-url URL"
        )
    database = settings.create_database()
    schema.require_schema(database)
    return database
