"""What the commands of `evalstop-lab cluster` have in common: their options, and how they answer."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.simulator.setting import Setting
from evalstop_lab.simulator.study import Cell, Row, run_cells
from evalstop_lab.sweep import BACKENDS, LOCAL, cores, sweep
from evalstop_lab.worlds.scoring import Figure, wilson


def add(parser: argparse.ArgumentParser, seeds: int) -> None:
    """Add the options that all commands know."""
    parser.add_argument("--seeds", type=positive_number, default=seeds, help=f"how many (default: {seeds})")
    parser.add_argument("--first-seed", type=whole_number, help="the first of them (default: seeds not fitted on)")
    parser.add_argument("--cluster-jobs", type=positive_number, metavar="JOBS", help="jobs of each seed's cluster")
    parser.add_argument("--jobs", type=positive_number, default=cores(), help="processes (default: one a core)")
    parser.add_argument("--backend", choices=BACKENDS, default=LOCAL, help="who computes (default: %(default)s)")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="leave plots in this folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object rather than tables")


def seeds(args: argparse.Namespace, first: int) -> list[int]:
    """The seeds that were asked for; `first` is where they begin if nothing else was said."""
    start = first if args.first_seed is None else args.first_seed
    return list(range(start, start + args.seeds))


def sweep_cells(args: argparse.Namespace, cells: Sequence[Cell], title: str) -> list[Row]:
    """Run the cells with a progress bar."""
    found = sweep(run_cells, cells, title, args.jobs, chunk=1, backend=args.backend)
    return [row for rows in found for row in rows]


def give(
    args: argparse.Namespace,
    report: dict[str, Any],
    show: Callable[[Console], None],
    draw: Callable[[Path, dict[str, Any]], None],
) -> int:
    """Print the report as it was asked for, and leave its plots; returns the exit code."""
    if args.plots is not None:
        args.plots.mkdir(parents=True, exist_ok=True)
        draw(args.plots, report)
    if args.json:
        sys.stdout.write(json.dumps(_finite(report)) + "\n")
    else:
        show(Console() if sys.stdout.isatty() else Console(width=180))
    return 0


def share(hits: int, n: int) -> Figure:
    """A share with Wilson's interval."""
    found = wilson(hits, n)
    return Figure(found.value, found.low, found.high, n)


def setting_document(setting: Setting, seeds: Sequence[int]) -> dict[str, Any]:
    """The numbers of a world as JSON has them."""
    offered = {kind.value: asdict(item) for kind, item in setting.offered.items()}
    numbers = {name: getattr(setting, name) for name in setting.__dataclass_fields__ if name != "offered"}
    return numbers | {"offered": offered, "seeds": [seeds[0], seeds[-1]]}


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
