"""Shared by all commands: how they are added to the parser, how they connect to the service, and what they print."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from evalstop_client.errors import ConfigurationError
from evalstop_client.observations import format_time
from evalstop_client.reading.api import Api

Shown = str | int | float | bool | datetime | None


def print_json(document: object) -> None:
    sys.stdout.write(json.dumps(document, default=_write_time) + "\n")
    sys.stdout.flush()


def _write_time(value: object) -> str:
    """A time as the API writes it."""
    if not isinstance(value, datetime):
        raise TypeError(f"{value!r} is not JSON")
    return format_time(value)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Shown]]) -> None:
    """Print a table; `none` without rows."""
    cells = [tuple(columns), *(tuple(map(_format_value, row)) for row in rows)]
    if len(cells) == 1:
        print("none")
        return
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def print_facts(facts: Iterable[tuple[str, Shown]]) -> None:
    """Print one fact per line, without those that are None."""
    texts = [(name, _format_value(value)) for name, value in facts if value is not None]
    width = max((len(name) for name, _ in texts), default=0)
    for name, text in texts:
        print(f"{name:<{width}}  {text}")


def parse_time(text: str | None) -> datetime | None:
    """A time as the API writes it."""
    return datetime.fromisoformat(text) if text is not None else None


def format_number(value: float) -> str:
    """A measured value with few digits."""
    return f"{value:.6g}"


def _format_value(value: Shown) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M")
    text = str(value)
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)


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
    options: argparse.Namespace, documents: Sequence[object], columns: Sequence[str], rows: Iterable[Sequence[Shown]]
) -> int:
    """Print a list as a table or, with --json, as JSON; returns the exit code of success."""
    if options.json:
        print_json(documents)
    else:
        print_table(columns, rows)
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
