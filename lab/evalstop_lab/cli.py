"""The command line of the lab: one module per subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from evalstop_client import ConfigurationError, EvalStopError

from evalstop_lab.errors import LabError, UnusableArguments

SUBCOMMANDS = {
    "backtest": "evalstop_lab.backtest.command",
    "calibrate": "evalstop_lab.calibrate.command",
    "cluster": "evalstop_lab.simulator.reproduce",
    "demo": "evalstop_lab.rlhf.demo",
    "replay": "evalstop_lab.replay.command",
    "roles": "evalstop_lab.replay.roles",
    "stopbench": "evalstop_lab.stopbench.command",
    "sweep": "evalstop_lab.rlhf.population",
    "train": "evalstop_lab.rlhf.job",
    "train-posterior": "evalstop_lab.posterior.train",
}
"""The module of each subcommand; its `add_parser` sets the function that runs the subcommand as the default of `run`.

Only the requested one is imported: all of them, with SciPy, pandas, Matplotlib and the service, take five seconds
instead of one.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `evalstop-lab` with the given arguments, by default those of the process."""
    # Each process has one core: NumPy's threads would wait for each other at every eval, which took a quarter of the
    # processor time of a backtest. It reads this when it is imported, with the command.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="evalstop-lab", description="Replay, backtest, calibrate and simulate stopping rules, or train an example."
    )
    parser.add_argument("--version", action="version", version=f"evalstop-lab {version('evalstop-lab')}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in [arguments[0]] if arguments and arguments[0] in SUBCOMMANDS else SUBCOMMANDS:
        import_module(SUBCOMMANDS[name]).add_parser(subparsers)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except (UnusableArguments, ConfigurationError) as error:
        sys.stderr.write(f"evalstop-lab: {error}\n")
        return 2
    except (LabError, EvalStopError) as error:
        sys.stderr.write(f"evalstop-lab: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 1


if __name__ == "__main__":
    sys.exit(main())
