"""The command `evalstop-receiver`: ends jobs when EvalStop requests it, and reports TensorBoard logs."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from evalstop_client.errors import ConfigurationError, KeyRefused
from evalstop_client.receivers import command
from evalstop_client.receivers.cli import evaluator, kubernetes, process, slurm, tensorboard
from evalstop_client.version import __version__

FAILED, USAGE = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _create_parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="evalstop-receiver: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return int(options.run(options))
    except ConfigurationError as error:
        sys.stderr.write(f"evalstop-receiver: {error}\n")
        return USAGE
    except KeyRefused as error:
        sys.stderr.write(f"evalstop-receiver: {error}\n")
        return FAILED


def _create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evalstop-receiver",
        description="Runs beside a scheduler, ends jobs when EvalStop requests it, and reports when they are gone; "
        "or runs beside trainers and reports their TensorBoard logs.",
        epilog="`evalstop-receiver COMMAND --help` shows options and examples.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    kinds = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (process, slurm, kubernetes, command, evaluator, tensorboard):
        module.add_parser(kinds)
    return parser
