"""`evalstop-lab cluster`: what stopping saves on a GPU cluster; one subcommand per module."""

from __future__ import annotations

import argparse

from evalstop_lab.simulator import actions, reproduce

EXAMPLES = """examples:
  evalstop-lab cluster reproduce
  evalstop-lab cluster reproduce --seeds 4 --json
  evalstop-lab cluster actions --schedulers FIFO SRTF-Est
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "cluster",
        help="simulate a GPU cluster to measure what stopping saves, by scheduler and rule",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (reproduce, actions):
        module.add_parser(commands)
