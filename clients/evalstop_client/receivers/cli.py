"""The command `evalstop-receiver`: ends jobs when EvalStop requests it, and reports TensorBoard logs."""

from __future__ import annotations

import argparse
import inspect
import logging
import sys
from collections.abc import Sequence

from evalstop_client.errors import ConfigurationError, KeyRefused
from evalstop_client.receivers import command, evaluator, process, tensorboard
from evalstop_client.receivers.kubernetes import control as kubernetes
from evalstop_client.receivers.slurm import control as slurm
from evalstop_client.version import __version__

FAILED, USAGE = 1, 2

COMMANDS = {
    "process": process,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "command": command,
    "evaluator": evaluator,
    "watch-tensorboard": tensorboard,
}
"""Modules with `add_options` and `run`: one a scheduler, and the two that end no job. The docstring is the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = create_parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="evalstop-receiver: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return int(options.run(options))
    except (ConfigurationError, KeyRefused) as error:
        sys.stderr.write(f"evalstop-receiver: {error}\n")
        return USAGE if isinstance(error, ConfigurationError) else FAILED


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evalstop-receiver",
        description="Runs beside a scheduler, ends jobs when EvalStop requests it, and reports when they are gone; "
        "or runs beside trainers and reports their TensorBoard logs.",
        epilog="docs/receivers.md has examples.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    kinds = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        _, _, description = inspect.cleandoc(module.__doc__ or "").partition(": ")
        kind = kinds.add_parser(
            name, help=description.partition(".")[0], description=description[:1].upper() + description[1:]
        )
        module.add_options(kind)
        kind.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
