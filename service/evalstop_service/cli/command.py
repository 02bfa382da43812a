"""What the commands share: how they are added to the line, what they open, how they answer and end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, Protocol

from evalstop_service import app
from evalstop_service.errors import ServiceError
from evalstop_service.settings import Settings
from evalstop_service.store import schema
from evalstop_service.store.database import Database

OK, FAILED, USAGE = 0, 1, 2

Command = Callable[[Settings, argparse.Namespace], int]
"""Does what it is asked and gives the exit code; its docstring is its help."""

Subcommands = Any
"""Of argparse, which names their type for itself alone."""


class Add(Protocol):
    """Adds a command and gives its parser, with the options of all commands and those of `parents`."""

    def __call__(
        self, to: Subcommands, name: str, run: Command, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser: ...


def open_database(settings: Settings) -> Database:
    """The database that the settings name; raises ServiceError unless it exists, in a schema for this release."""
    if settings.database_url is None and not settings.database_file.exists():
        raise ServiceError(
            f"there is no installation in {settings.data_folder.resolve()}: run this in the folder of `evalstop up`, "
            "or say --data-folder DIR or --database-url URL"
        )
    database = app.create_database(settings)
    schema.require_schema(database)
    return database


def tell(options: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    """Answer machines with the document and people with the text."""
    print(json.dumps(document) if options.json else text)
