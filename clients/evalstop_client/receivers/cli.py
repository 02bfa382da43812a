"""The command `evalstop-receiver`: stands beside a scheduler and ends jobs when EvalStop says so."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from evalstop_client.errors import ConfigurationError
from evalstop_client.receivers import cli_command, cli_kubernetes, cli_process, cli_slurm
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
        description="Stands beside a scheduler, ends jobs when EvalStop asks for it, and reports that they are gone.",
        epilog="`evalstop-receiver SCHEDULER --help` shows each with examples.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    kinds = parser.add_subparsers(title="schedulers", required=True, metavar="SCHEDULER")
    for module in (cli_process, cli_slurm, cli_kubernetes, cli_command):
        module.add_parser(kinds)
    return parser


if __name__ == "__main__":
    sys.exit(main())
