"""The command line of the lab: one subcommand a module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from evalstop_client import ConfigurationError, EvalStopError

from evalstop_lab import calibrate, demo, example_runs, roles, survey
from evalstop_lab.backtest import command as backtest
from evalstop_lab.errors import LabError, UnusableArguments
from evalstop_lab.fusion import command as train_fusion
from evalstop_lab.replay import command as replay
from evalstop_lab.rlhf import job
from evalstop_lab.simulator import command as cluster


class Subcommand(Protocol):
    """What a module offers to be a subcommand; `add_parser` sets `run` as the parser's default of that name."""

    @property
    def add_parser(self) -> Callable[[argparse._SubParsersAction[argparse.ArgumentParser]], None]:
        """Adds the subcommand's parser."""

    @property
    def run(self) -> Callable[[argparse.Namespace], int]:
        """Runs the subcommand and returns its exit code: 0 ok, 1 failed, 2 wrongly used."""


SUBCOMMANDS: tuple[Subcommand, ...] = (
    backtest,
    calibrate,
    cluster,
    demo,
    example_runs,
    job,
    replay,
    roles,
    survey,
    train_fusion,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `evalstop-lab` with the given arguments, or with the process's own."""
    parser = argparse.ArgumentParser(prog="evalstop-lab", description="The proving ground of EvalStop.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except (UnusableArguments, ConfigurationError) as error:
        sys.stderr.write(f"evalstop-lab: {error}\n")
        return 2
    except (LabError, EvalStopError) as error:
        sys.stderr.write(f"evalstop-lab: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
