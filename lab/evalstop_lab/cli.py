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
    "backtest": (
        "backtest.command",
        "backtest policies on past runs: what each would have stopped and saved, and which stops are wrong",
    ),
    "calibrate": (
        "calibrate.command",
        "find the thresholds of a detector at which a given share of healthy runs would be stopped",
    ),
    "cluster": (
        "simulator.reproduce",
        "simulate a GPU cluster to measure what stopping saves, by scheduler and rule",
    ),
    "demo": ("rlhf.demo", "run a service, a receiver and a training run, which is stopped after its eval has turned"),
    "replay": ("replay.command", "replay logged runs through a policy: where it would have stopped each, and why"),
    "stopbench": ("stopbench.command", "compare your stopping rule with common ones"),
    "train": ("rlhf.job", "train the example: a small RLHF run that over-optimizes or stays healthy"),
    "train-posterior": ("posterior.train", "train the network of the posterior detector"),
}
"""By name the module with `add_options` and `run`, and the help text.

Only the requested one is imported: all of them, with SciPy, Matplotlib and the service, take seconds.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `evalstop-lab` with the given arguments, by default those of the process."""
    # Each process has one core: NumPy's threads would wait for each other at every eval, which took a quarter of the
    # processor time of a backtest. It reads this when it is imported, with the command.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="evalstop-lab", description="Replay, backtest, calibrate and simulate stopping rules, or train an example."
    )
    parser.add_argument("--version", action="version", version=f"evalstop-lab {version('evalstop-lab')}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module_name, summary) in SUBCOMMANDS.items():
        description = f"{summary[:1].upper()}{summary[1:]}."
        added = subparsers.add_parser(
            name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if arguments[:1] == [name]:
            module = import_module(f"evalstop_lab.{module_name}")
            module.add_options(added)
            added.set_defaults(run=module.run)
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
