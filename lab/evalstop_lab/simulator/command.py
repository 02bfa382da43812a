"""`evalstop-lab cluster`: what stopping saves on a GPU cluster; one subcommand per module."""

from __future__ import annotations

import argparse

from evalstop_lab.simulator import reproduce

EXAMPLES = """examples:
  evalstop-lab cluster reproduce
  evalstop-lab cluster reproduce --seeds 4 --json
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "cluster",
        help="simulate a GPU cluster to measure what stopping saves, by scheduler and rule",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    reproduce.add_parser(commands)
