"""Shared by all commands: how they are added to the parser, how they connect to the service, and what they print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from evalstop_client.reading.api import Api
from evalstop_client.reading.records import pick_columns
from evalstop_client.service import Json

OK, FAILED = 0, 1

Command = Callable[[argparse.Namespace], int]
"""Runs a command and returns the exit code; its docstring is its help text."""

Subcommands = Any
"""argparse's subparsers, whose type is private."""


def add_command(to: Subcommands, name: str, run: Command, *arguments: str) -> argparse.ArgumentParser:
    """Add a command with required arguments of these names; the parsed options hold its function as `command`."""
    command: argparse.ArgumentParser = to.add_parser(name, help=run.__doc__, description=run.__doc__)
    command.add_argument("--url", help="URL of the service (default: EVALSTOP_URL)")
    command.add_argument("--json", action="store_true", help="print what the API answers")
    for argument in arguments:
        command.add_argument(argument, metavar=argument.upper())
    command.set_defaults(command=run)
    return command


def add_group(commands: Subcommands, name: str, text: str) -> Subcommands:
    return commands.add_parser(name, help=text, description=text).add_subparsers(required=True, metavar="VERB")


def add_limit(command: argparse.ArgumentParser) -> None:
    command.add_argument("--limit", type=parse_count, default=50, metavar="N", help="default: %(default)s")


def parse_count(text: str) -> int:
    """A number of items or days, for an option; raises ArgumentTypeError."""
    if not text.isascii() or not text.isdecimal() or len(text) > 5:
        raise argparse.ArgumentTypeError(f"{text}: it must be a whole number from 0 to 99999")
    return int(text)


def connect(options: argparse.Namespace) -> Api:
    """Connect to the service in the options. Raises ConfigurationError."""
    return Api(options.url)


def show_result(options: argparse.Namespace, document: object, text: str) -> int:
    """Print a result as text or, with --json, as JSON; returns the exit code of success."""
    print(json.dumps(document) if options.json else text, flush=True)
    return OK


def show_list(options: argparse.Namespace, documents: Sequence[Json], columns: str) -> int:
    """Print a list as a table with these columns of `pick_columns` or, with --json, as JSON."""
    if options.json:
        return show_result(options, documents, "")
    print_table([pick_columns(document, columns) for document in documents])
    return OK


def show_facts(options: argparse.Namespace, document: Json, facts: Mapping[str, object]) -> int:
    """Print these facts of a document, but those that are None, or, with --json, all of it."""
    if options.json:
        return show_result(options, document, "")
    width = max(map(len, facts))
    for name, value in facts.items():
        if value is not None:
            print(f"{name:<{width}}  {format_value(name, value)}")
    return OK


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows of the same columns; `none` without rows."""
    if not rows:
        print("none")
        return
    cells = [list(rows[0]), *([format_value(name, value) for name, value in row.items()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def format_value(name: str, value: object) -> str:
    """A value of an answer, on one line; a share is in percent, with its interval, and a time is that of this machine.

    >>> format_value("precision", {"value": 0.9, "low": 0.81, "high": 0.95}), format_value("labels", {"team": "x"})
    ('90.0 % (81.0 to 95.0)', 'team=x')
    >>> format_value("stale_seconds", 5400.0)
    '1h30m'
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_seconds") and isinstance(value, int | float) and value % 1 == 0:
        return _format_duration(int(value))
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping) and value.keys() >= {"value", "low", "high"}:
        low, share, high = (f"{100 * (value[key] or 0):.1f}" for key in ("low", "value", "high"))
        return "-" if value["value"] is None else f"{share} % ({low} to {high})"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={format_value('', part)}" for key, part in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(format_value("", part) for part in value)
    text = str(value)
    if name.endswith("_at") and text != "none":
        return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M}"
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)


def _format_duration(seconds: int) -> str:
    text = ""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"
