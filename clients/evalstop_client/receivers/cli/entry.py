"""The command `evalstop-receiver`: ends jobs when EvalStop says so, and reports those that write for TensorBoard."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers.cli import command, evaluator, kubernetes, process, slurm, tensorboard
from evalstop_client.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="evalstop-receiver: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return int(options.run(options))
    except ConfigurationError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evalstop-receiver",
        description="Stands beside a scheduler, ends jobs when EvalStop asks for it, and reports that they are gone; "
        "or stands beside trainers and reports what they write for TensorBoard.",
        epilog="`evalstop-receiver COMMAND --help` shows each with examples.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    kinds = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (process, slurm, kubernetes, command, evaluator, tensorboard):
        module.add_parser(kinds)
    return parser
