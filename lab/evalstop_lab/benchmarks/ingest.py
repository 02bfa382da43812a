"""`make bench-ingest`: durable observations a second beside MLflow, Optuna, bare COPY and a bare ASGI route.

All contenders are up at the same time and take each load one after the other, another one first each time. What they
acknowledge is counted in their database after each load, and has to be there to the last observation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks import growth, targets
from evalstop_lab.benchmarks.generator import Load
from evalstop_lab.benchmarks.growth import Ground
from evalstop_lab.benchmarks.ingest_charts import draw
from evalstop_lab.benchmarks.ingest_contenders import Contender
from evalstop_lab.benchmarks.ingest_stage import POSTGRES, Stage
from evalstop_lab.benchmarks.ingest_tables import print_tables
from evalstop_lab.benchmarks.outside import Outside
from evalstop_lab.benchmarks.reading import reading
from evalstop_lab.benchmarks.recovery import recovery
from evalstop_lab.benchmarks.rounds import ASKING, GRID, LARGEST_COPY, Shape, cell, document, rotated
from evalstop_lab.benchmarks.slow_disk import sync_ms
from evalstop_lab.benchmarks.worker import JobFailed
from tests.fixtures.postgres_server import conninfo

LOADS = (*GRID, ASKING, LARGEST_COPY)
QUICK_LOADS = (Shape(1, 8), Shape(100, 8), ASKING)
SECTIONS = ("growth", "recovery", "reading")
VERSIONS = ("evalstop-service", "uvicorn", "uvloop", "msgspec", "sqlalchemy", "psycopg", "asyncpg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its tables and leave its plots in a folder."""
    options = _parser().parse_args(arguments)
    if options.quick:
        options.rounds, options.seconds = 1, 0.3
    command = " ".join(["make bench-ingest", *([f'BENCH="{" ".join(sys.argv[1:])}"'] if sys.argv[1:] else [])])
    report: dict[str, Any] = {"command": command, "begun": datetime.now(UTC).isoformat(timespec="minutes")}
    begun = time.monotonic()
    report |= measure(options)
    report["minutes"] = (time.monotonic() - begun) / 60
    options.folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(finite(report))
    (options.folder / "report.json").write_text(text + "\n", encoding="utf-8")
    draw(options.folder, report)
    if options.json:
        sys.stdout.write(text + "\n")
    else:
        console = Console() if sys.stdout.isatty() else Console(width=200)
        print_tables(console, report)
        console.print(f"plots and report.json are in {options.folder}/")
    return 1 if report["failures"] else 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The report as JSON values."""

    def wanted(name: str) -> bool:
        return not options.only or any(fnmatchcase(name, pattern) for pattern in options.only)

    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="evalstop-bench-")))
        folder.chmod(0o755)  # PostgreSQL runs as somebody else and reads from it
        bar = ends.enter_context(_progress())
        stage = Stage(ends, folder, Outside(options.cache), wanted)
        contenders = stage.set()
        loads = QUICK_LOADS if options.quick else LOADS
        loads = tuple(
            load for load in loads if not options.loads or any(fnmatchcase(f"{load}", p) for p in options.loads)
        )
        machine = _machine(folder, stage)
        total = options.rounds * sum(item.takes(load) for load in loads for item in contenders)
        task = bar.add_task("loads", total=total)
        taken, failures = in_turns(
            contenders,
            loads,
            options.rounds,
            options.seconds,
            lambda text: bar.update(task, advance=1, description=text),
        )
        cells = {key: cell(*key, found) for key, found in taken.items()}
        rest = _sections(Ground(stage.postgres, folder, stage.generator), options, wanted, bar)
        machine["load_average_after"] = os.getloadavg()[0]
    found = targets.of_ingestion(cells) + targets.of_growth(rest)
    return {
        "setting": {"rounds": options.rounds, "seconds": options.seconds},
        "machine": machine,
        "notes": stage.notes,
        "failures": failures,
        "cells": [document(item) for item in cells.values()],
        **rest,
        "targets": [asdict(item) | {"met": item.met} for item in found],
    }


def in_turns(
    contenders: Sequence[Contender], loads: Sequence[Shape], rounds: int, seconds: float, tick: Callable[[str], None]
) -> tuple[dict[tuple[str, Shape], list[Load]], list[str]]:
    """Each contender's loads round by round, and why some have none: whoever fails at a load is out of it."""
    taken: dict[tuple[str, Shape], list[Load]] = {}
    failed: dict[tuple[str, Shape], str] = {}
    for number in range(rounds):
        for place, load in enumerate(loads):
            for contender in rotated([item for item in contenders if item.takes(load)], number + place):
                tick(f"{load}: {contender.name}")
                key = (contender.name, load)
                try:
                    if key not in failed:
                        taken.setdefault(key, []).append(contender.measure(load, seconds))
                except JobFailed as error:
                    failed[key] = error.detail
                    taken.pop(key, None)
    return taken, list(failed.values())


def _sections(
    ground: Ground, options: argparse.Namespace, wanted: Callable[[str], bool], bar: Progress
) -> dict[str, Any]:
    runs, points, rounds = ((1000, 10_000), (100, 10_000), 1) if options.quick else (RUNS, POINTS, 3)
    found: dict[str, Any] = {}
    task = bar.add_task("growth", total=len(runs) + 1 + len(points) + rounds + 2)

    def tick() -> None:
        bar.advance(task)

    if wanted("growth"):
        found["live_runs"] = growth.live_runs(ground, runs, 2 * options.seconds, tick)
        found["points"] = growth.points_in_a_run(ground, points, options.seconds, options.rounds, tick)
    if wanted("recovery"):
        bar.update(task, description="recovery")
        found["recovery"] = recovery(ground, rounds, tick)
    if wanted("reading"):
        bar.update(task, description="reading")
        found["reading"] = reading(ground, *((10**5, 10**4) if options.quick else (10**6, 10**6)), tick)
    return found


RUNS = (1000, 10_000, 100_000)
POINTS = (100, 10_000, 1_000_000)


def _machine(folder: Path, stage: Stage) -> dict[str, Any]:
    with psycopg.connect(conninfo(stage.postgres)) as connection:
        server = connection.info.server_version // 10_000
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "versions": {name: version(name) for name in VERSIONS} | stage.outside.versions(),
        "postgresql": f"{server} with {', '.join(POSTGRES)}",
        "sync_ms": sync_ms(folder),
        "load_average_before": os.getloadavg()[0],
    }


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: never and unknown become null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench-ingest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  make bench-ingest\n"
        "  make bench-ingest BENCH='--quick'\n"
        '  make bench-ingest BENCH=\'--only EvalStop MLflow --loads "1 x 8" "100 x *"\'\n'
        "  make bench-ingest BENCH='--only growth recovery'",
    )
    parser.add_argument("--rounds", type=positive_number, default=5, help="each load is taken so often (default: 5)")
    parser.add_argument("--seconds", type=float, default=0.7, help="how long each time (default: 0.7)")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PATTERN",
        help=f"contenders, and of {', '.join(SECTIONS)} (default: all)",
    )
    parser.add_argument("--loads", nargs="+", metavar="PATTERN", help="such as '100 x 8': observations x clients")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("~/.cache/evalstop").expanduser(),
        help="where MLflow and Optuna are installed, once, apart from all else (%(default)s)",
    )
    parser.add_argument("--folder", type=Path, default=Path("bench-ingest"), help="for the plots (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a round of few loads: to try it, not to quote it")
    parser.add_argument("--json", action="store_true", help="print one JSON object rather than tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
