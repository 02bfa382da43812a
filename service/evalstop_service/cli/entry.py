"""Parses the command line, runs the command and returns its exit code.

Commands are imported on demand: together they import the web framework and the database drivers.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evalstop_service.settings import Settings

OK, FAILED, USAGE = 0, 1, 2

COMMANDS = {
    "up": "Migrate the schema, serve HTTP and deliver webhooks, in one process.",
    "serve": "Serve HTTP without delivering webhooks.",
    "deliver": "Deliver webhooks without serving HTTP.",
    "migrate": "Migrate the schema of the database.",
    "demo-data": "Fill a project with some 300 example runs.",
    "audit": "Verify the audit log.",
    "admin": "Create a key directly in the database, such as the first one.",
}
"""The commands that the service adds to `evalstop` through the entry point `evalstop.commands`."""

MODULES = {"up": "servers", "serve": "servers", "deliver": "servers", "demo-data": "demo_data"}
"""The modules of the commands; all others are in `administration`."""

Command = Callable[["Settings", argparse.Namespace], int]
"""Runs a command and returns the exit code; its docstring is its help text."""

Subcommands = Any
"""argparse's subparsers, whose type is private."""


Add = Callable[..., argparse.ArgumentParser]
"""Adds a command to subcommands and returns its parser, with the options of all commands and those of `parents`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 on success, 1 on failure, 2 on wrong usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    gc.disable()  # what is imported stays, and looking through it again and again takes a fifth of the time
    try:
        options = parser(arguments).parse_args(arguments)
        runner = import_module("evalstop_service.cli.administration")
    finally:
        gc.enable()
    return int(runner.execute(options))


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands, with the options of the one that `arguments` name; `command` is its function."""
    root = argparse.ArgumentParser(
        prog="evalstop",
        description="Stop training jobs that no longer improve, and keep their best checkpoints.",
        epilog="Each setting can also be an environment variable: EVALSTOP_DATABASE_URL, EVALSTOP_PORT, ...\n"
        "See docs/operations.md for all of them.\n\n"
        "examples:\n"
        "  evalstop up                                   everything, on an embedded database in .evalstop/\n"
        "  evalstop migrate --database-url postgresql://evalstop@db/evalstop\n"
        "  evalstop serve   --database-url postgresql://evalstop@db/evalstop --host 0.0.0.0\n"
        "  evalstop deliver --database-url postgresql://evalstop@db/evalstop\n"
        "  evalstop admin key create --name provisioning --scopes admin --installation",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = arguments[0] if arguments and arguments[0] in COMMANDS else None
    if command is None:
        for name, text in COMMANDS.items():
            commands.add_parser(name, help=text)
    else:
        module: Any = import_module(f"evalstop_service.cli.{MODULES.get(command, 'administration')}")
        module.add_to(commands, _add)
    return root


def tell(options: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    """Print the document with `--json`, else the text."""
    print(json.dumps(document) if options.json else text)


def _add(to: Subcommands, name: str, run: Command, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = to.add_parser(
        name, parents=[_shared_options(), *parents], help=run.__doc__, description=run.__doc__
    )
    command.set_defaults(command=run)
    return command


def _shared_options() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--data-folder", type=Path, metavar="DIR", help="folder of the embedded database (default .evalstop)"
    )
    shared.add_argument(
        "--database-url", metavar="URL", help="postgresql://USER:PASSWORD@HOST/NAME (default: embedded)"
    )
    shared.add_argument("--log-level", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    shared.add_argument("--log-format", choices=["text", "json"], help="json: one object per line (default text)")
    shared.add_argument("--json", action="store_true", help="print JSON")
    return shared
