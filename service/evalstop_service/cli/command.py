"""Shared by all commands: their type, how they are added to the parser, how they print results."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from evalstop_service.settings import Settings

OK, FAILED, USAGE = 0, 1, 2

MOST_DAYS = 36_500

Command = Callable[["Settings", argparse.Namespace], int]
"""Runs a command and returns the exit code; its docstring is its help text."""

Subcommands = Any
"""argparse's subparsers, whose type is private."""


class Add(Protocol):
    """Adds a command and returns its parser, with the options common to all commands and those of `parents`."""

    def __call__(
        self, to: Subcommands, name: str, run: Command, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser: ...


def parse_days(text: str) -> timedelta:
    """A number of days, for an option; raises ArgumentTypeError outside 0 to 36,500."""
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not 0 <= days <= MOST_DAYS:
        raise argparse.ArgumentTypeError(f"{text}: it must be from 0 to {MOST_DAYS} days")
    return timedelta(days=days)


def tell(options: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    """Print the document with `--json`, else the text."""
    print(json.dumps(document) if options.json else text)
