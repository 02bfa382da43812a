"""The command line of the lab: one subcommand a module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Protocol, cast

from evalstop_client import ConfigurationError, EvalStopError

from evalstop_lab.errors import LabError, UnusableArguments

SUBCOMMANDS = {
    "backtest": "evalstop_lab.backtest.command",
    "calibrate": "evalstop_lab.calibrate.command",
    "cluster": "evalstop_lab.simulator.command",
    "demo": "evalstop_lab.rlhf.demo",
    "example-runs": "evalstop_lab.worlds.example_runs",
    "replay": "evalstop_lab.replay.command",
    "roles": "evalstop_lab.replay.roles",
    "stopbench": "evalstop_lab.stopbench.command",
    "train": "evalstop_lab.rlhf.job",
    "train-posterior": "evalstop_lab.posterior.train",
    "train-paired": "evalstop_lab.posterior.train_paired",
}
"""Their modules by name. Together they bring SciPy, pandas, Matplotlib and the service: the one that is named is
imported alone, so that a trainer is up in a second and not in five."""


class Subcommand(Protocol):
    """What a module offers to be a subcommand; `add_parser` sets `run` as the parser's default of that name."""

    @property
    def add_parser(self) -> Callable[[argparse._SubParsersAction[argparse.ArgumentParser]], None]:
        """Adds the subcommand's parser."""

    @property
    def run(self) -> Callable[[argparse.Namespace], int]:
        """Runs the subcommand and returns its exit code: 0 ok, 1 failed, 2 wrongly used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `evalstop-lab` with the given arguments, or with the process's own."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="evalstop-lab", description="Replay, backtest, calibrate and simulate stopping rules, or watch a real run."
    )
    parser.add_argument("--version", action="version", version=f"evalstop-lab {version('evalstop-lab')}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in [words[0]] if words and words[0] in SUBCOMMANDS else SUBCOMMANDS:
        cast(Subcommand, import_module(SUBCOMMANDS[name])).add_parser(subparsers)
    args = parser.parse_args(words)
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
