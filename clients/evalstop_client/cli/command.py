"""Shared by all commands: how they are added to the parser, and how they connect to the service."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from evalstop_client.cli.output import Shown, print_json, print_table
from evalstop_client.errors import ConfigurationError
from evalstop_client.reading.api import Api

OK, FAILED = 0, 1

KEY_VARIABLE = "EVALSTOP_KEY"

Command = Callable[[argparse.Namespace], int]
"""Runs a command and returns the exit code; its docstring is its help text."""

Subcommands = Any
"""argparse's subparsers, whose type is private."""


def add_command(to: Subcommands, name: str, run: Command, *aliases: str) -> argparse.ArgumentParser:
    """Add a command with the common options; the parsed options hold its function as `command`."""
    command: argparse.ArgumentParser = to.add_parser(name, aliases=aliases, help=run.__doc__, description=run.__doc__)
    command.add_argument("--url", help="URL of the service (default: EVALSTOP_URL)")
    command.add_argument(
        "--key-env", metavar="NAME", default=KEY_VARIABLE, help="variable that holds the key (default: %(default)s)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(command=run)
    return command


def add_group(commands: Subcommands, name: str, text: str) -> Subcommands:
    return commands.add_parser(name, help=text, description=text).add_subparsers(required=True, metavar="VERB")


def connect(options: argparse.Namespace) -> Api:
    """Connect to the service in the options. Raises ConfigurationError."""
    if not os.environ.get(options.key_env):
        raise ConfigurationError(f"key: set {options.key_env} to a key of the project; `evalstop up` prints the first.")
    return Api(options.url, os.environ[options.key_env])


def show_result(options: argparse.Namespace, document: object, text: str) -> int:
    """Print a result as text or, with --json, as JSON; returns the exit code of success."""
    if options.json:
        print_json(document)
    else:
        print(text)
    return OK


def show_list(
    options: argparse.Namespace,
    documents: Sequence[object],
    columns: Sequence[str],
    rows: Iterable[Sequence[Shown]],
    prose: Collection[str] = (),
) -> int:
    """Print a list as a table or, with --json, as JSON; returns the exit code of success."""
    if options.json:
        print_json(documents)
    else:
        print_table(columns, rows, prose)
    return OK


def parse_count(text: str) -> int:
    """A number of items, for an option; raises ArgumentTypeError."""
    try:
        count = int(text)
    except ValueError:
        count = -1
    if not 0 <= count <= sys.maxsize:
        raise argparse.ArgumentTypeError(f"{text}: it must be a whole number, 0 or more")
    return count


def parse_pairs(written: list[str], name: str) -> dict[str, str]:
    """Parse NAME=VALUE arguments. Raises ConfigurationError."""
    pairs = {}
    for text in written:
        left, equals, right = text.partition("=")
        if not equals or not left:
            raise ConfigurationError(f"{name} {text!r}: write NAME=VALUE.")
        pairs[left] = right
    return pairs
