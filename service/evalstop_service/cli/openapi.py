"""The command that prints the OpenAPI document: the only administrative one that needs the web application."""

from __future__ import annotations

import argparse
import json

from evalstop_service import app
from evalstop_service.cli.command import OK, Add, Subcommands
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database


def add_to(commands: Subcommands, add: Add) -> None:
    """Add `openapi`."""
    add(commands, "openapi", openapi)


def openapi(settings: Settings, options: argparse.Namespace) -> int:
    """Print the OpenAPI document."""
    database = Database(settings.url)  # never queried
    print(json.dumps(app.create_app(settings, database, session_secret="none").openapi(), indent=2))  # noqa: S106
    return OK
