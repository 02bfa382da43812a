"""The line itself: what is asked for is read, done, and answered by an exit code.

Each command is imported when it is asked for: together they bring the web framework and the database's drivers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from evalstop_service.cli.command import Command, Subcommands

COMMANDS = {
    "up": "Everything in one process: schema, HTTP and deliveries.",
    "serve": "HTTP alone, on a schema that is at head.",
    "deliver": "Deliveries alone.",
    "migrate": "Bring the schema to head, or do one half of the way.",
    "openapi": "Print the OpenAPI document.",
    "demo-data": "Fill a project with some 300 example runs.",
    "pause": "Stop nothing more in a project until it is resumed.",
    "resume": "Let stops go on in a project that was paused.",
    "prune": "Remove the details of runs that ended long ago.",
    "secrets": "Seal webhook secrets.",
    "audit": "Verify, export or prune the audit log.",
    "admin": "Make projects and keys in the database itself, such as the first key.",
}
"""What the service adds to `evalstop`, by the entry point `evalstop.commands`: it works on the installation itself."""

MODULES = {"up": "servers", "serve": "servers", "deliver": "servers", "audit": "audit", "openapi": "openapi"}
"""Where commands are that are not in `administration`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it did what it was asked, 1 when it could not, 2 when it was asked wrongly."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parser(words).parse_args(words)
    return int(import_module("evalstop_service.cli.execution").execute(options))


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The commands, with the options of the one that `words` name; what is parsed holds its function as `command`."""
    root = argparse.ArgumentParser(
        prog="evalstop",
        description="Stops training jobs that no longer get better, and keeps their best checkpoints.",
        epilog="Every setting is an environment variable too: EVALSTOP_DATABASE_URL, EVALSTOP_PORT, ...\n"
        "See docs/operations.md for all of them.\n\n"
        "examples:\n"
        "  evalstop up                                   everything, on an embedded database in .evalstop/\n"
        "  evalstop migrate --database-url postgresql://evalstop@db/evalstop\n"
        "  evalstop serve   --database-url postgresql://evalstop@db/evalstop --host 0.0.0.0\n"
        "  evalstop deliver --database-url postgresql://evalstop@db/evalstop\n"
        "  evalstop admin key create --name provisioning --scopes admin --installation\n"
        "  evalstop pause alignment --reason 'the eval set is broken'\n"
        "  evalstop prune --project alignment --older-than-days 90 --dry-run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    named = words[0] if words and words[0] in COMMANDS else None
    if named is None:
        for name, text in COMMANDS.items():
            commands.add_parser(name, help=text)
    else:
        module: Any = import_module(f"evalstop_service.cli.{MODULES.get(named, 'administration')}")
        module.add_to(commands, _add)
    return root


def _add(to: Subcommands, name: str, run: Command, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = to.add_parser(
        name, parents=[_shared_options(), *parents], help=run.__doc__, description=run.__doc__
    )
    command.set_defaults(command=run)
    return command


def _shared_options() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--data-folder", type=Path, metavar="DIR", help="of the embedded database (default .evalstop)")
    shared.add_argument(
        "--database-url", metavar="URL", help="postgresql://USER:PASSWORD@HOST/NAME (default: embedded)"
    )
    shared.add_argument("--log-level", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    shared.add_argument("--log-format", choices=["text", "json"], help="json: one object a line (default text)")
    shared.add_argument("--json", action="store_true", help="print for machines")
    return shared
