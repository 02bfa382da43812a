"""What the subcommands of `evalstop-lab cluster` share: options, sweeps over seeds, and reports.

The unit of work is one seed of one world, so that results do not depend on the number of workers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from rich.console import Console

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.report import to_json_values
from evalstop_lab.simulator.setting import Setting
from evalstop_lab.sweep import BACKENDS, LOCAL, add_jobs_option, sweep

Item = TypeVar("Item")
Result = TypeVar("Result")

REPORTING_SEED = 30_000


def add_common(parser: argparse.ArgumentParser, seeds: int) -> None:
    parser.add_argument("--seeds", type=positive_number, default=seeds, help=f"number of seeds (default: {seeds})")
    parser.add_argument("--first-seed", type=whole_number, help="the first seed (default: seeds not used for fitting)")
    parser.add_argument("--cluster-jobs", type=positive_number, metavar="JOBS", help="number of jobs per seed")
    add_jobs_option(parser)
    parser.add_argument("--backend", choices=BACKENDS, default=LOCAL, help="where to compute (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def get_seeds(args: argparse.Namespace) -> list[int]:
    """The requested seeds, else those not used for fitting."""
    start = REPORTING_SEED if args.first_seed is None else args.first_seed
    return list(range(start, start + args.seeds))


def sweep_each(
    args: argparse.Namespace, work: Callable[[Item], Result], items: Sequence[Item], title: str
) -> list[Result]:
    """Apply `work` to each item, with a progress bar, in the requested processes or cluster."""
    return sweep(work, items, title, args.jobs, chunk=1, backend=args.backend)


def print_report(args: argparse.Namespace, report: dict[str, Any], show: Callable[[Console], None]) -> int:
    """Print the report in the requested format; returns the exit code."""
    if args.json:
        sys.stdout.write(json.dumps(to_json_values(report)) + "\n")
    else:
        show(Console() if sys.stdout.isatty() else Console(width=180))
    return 0


def encode_setting(setting: Setting, seeds: Sequence[int]) -> dict[str, Any]:
    """The parameters of a world as JSON values."""
    offered = {kind.value: asdict(item) for kind, item in setting.offered.items()}
    numbers = {name: getattr(setting, name) for name in setting.__dataclass_fields__ if name != "offered"}
    return numbers | {"offered": offered, "seeds": [seeds[0], seeds[-1]]}
