"""The command `evalstop-receiver`: ends jobs when EvalStop requests it, and reports TensorBoard logs."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from evalstop_client.errors import ConfigurationError, KeyRefused
from evalstop_client.receivers import command, evaluator, process, tensorboard
from evalstop_client.receivers.kubernetes import control as kubernetes
from evalstop_client.receivers.slurm import control as slurm
from evalstop_client.version import __version__

FAILED, USAGE = 1, 2

COMMANDS = (process, slurm, kubernetes, command, evaluator, tensorboard)
"""The modules with `add_parser`: one a scheduler, and the two that end no job."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = create_parser().parse_args(arguments)
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


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evalstop-receiver",
        description="Runs beside a scheduler, ends jobs when EvalStop requests it, and reports when they are gone; "
        "or runs beside trainers and reports their TensorBoard logs.",
        epilog="`evalstop-receiver COMMAND --help` shows options and examples.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    kinds = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(kinds)
    return parser


if __name__ == "__main__":
    sys.exit(main())
