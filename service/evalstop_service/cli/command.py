"""Shared by all commands: their type, how they are added to the parser, how they print results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from evalstop_service.settings import Settings

OK, FAILED, USAGE = 0, 1, 2

Command = Callable[["Settings", argparse.Namespace], int]
"""Runs a command and returns the exit code; its docstring is its help text."""

Subcommands = Any
"""argparse's subparsers, whose type is private."""


class Add(Protocol):
    """Adds a command and returns its parser, with the options common to all commands and those of `parents`."""

    def __call__(
        self, to: Subcommands, name: str, run: Command, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser: ...


def tell(options: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    """Print the document with `--json`, else the text."""
    print(json.dumps(document) if options.json else text)
