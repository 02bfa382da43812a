"""What the commands share: how they are added to the line, how they answer and end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from evalstop_service.settings import Settings

OK, FAILED, USAGE = 0, 1, 2

Command = Callable[["Settings", argparse.Namespace], int]
"""Does what it is asked and gives the exit code; its docstring is its help."""

Subcommands = Any
"""Of argparse, which names their type for itself alone."""


class Add(Protocol):
    """Adds a command and gives its parser, with the options of all commands and those of `parents`."""

    def __call__(
        self, to: Subcommands, name: str, run: Command, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser: ...


def tell(options: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    """Answer machines with the document and people with the text."""
    print(json.dumps(document) if options.json else text)
