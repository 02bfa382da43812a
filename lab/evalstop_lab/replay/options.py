"""The options by which a person says what the columns of a log are."""

from __future__ import annotations

import argparse

from evalstop_detectors import MetricRole

from evalstop_lab.replay.sources import Asked


def add_role_options(parser: argparse.ArgumentParser) -> None:
    """Add `--eval`, `--proxy`, `--kl`, `--loss`, `--minimize` and `--step`."""
    for role in reversed(MetricRole):
        parser.add_argument(
            f"--{role}", metavar="COLUMN", help=f"the column with the {role} (default: {role}, else by its name)"
        )
    parser.add_argument(
        "--minimize", action="append", default=[], metavar="COLUMN", help="a column that is better when lower"
    )
    parser.add_argument("--step", metavar="COLUMN", help="the column that counts steps (default: step)")


def asked_by(args: argparse.Namespace) -> Asked:
    """What these options say."""
    named = {role: column for role in MetricRole if (column := getattr(args, role)) is not None}
    return Asked(named, frozenset(args.minimize), args.step)
