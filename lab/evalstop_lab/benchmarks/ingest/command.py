"""`make bench-ingest`: durable observations per second and CPU time per request, compared with an upper bound.

All contenders run at the same time and take turns under each load, in rotating order. Every acknowledged observation
must be in the database afterwards. The bound is a minimal ASGI app that commits the same rows with the same statement,
without keys and detectors. Other machines, other times: compare ratios, or count instructions.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.ingest.contenders import (
    AGAINST,
    BOUND,
    EVALSTOP,
    MOST_CLIENTS,
    RUNS_A_CLIENT,
    SHAPES,
    Measurement,
    Shape,
    open_run,
    start_contenders,
)
from evalstop_lab.benchmarks.load import run_load
from evalstop_lab.benchmarks.processes import (
    JobFailed,
    add_database_option,
    create_keys,
    describe_machine,
    format_machine,
    libpq_url,
    parse_with_database,
    run_service,
    temporary_database,
)
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.report import new_table

PACKAGES = ("evalstop-service", "uvicorn", "uvloop", "msgspec", "sqlalchemy", "asyncpg")
QUICK_SHAPES = (MOST_CLIENTS, Shape(100, 8))
MOST_INSTRUCTIONS = 350_000
COUNTED_REQUESTS = 20 * MOST_CLIENTS.clients
"""The posts whose instructions are counted, after half as many that warm up."""

LEAST_OF_BOUND = dict(zip(SHAPES, (0.75, 0.75, 0.65, 0.65, 0.65), strict=True))
"""The target for the service's rate as a share of the bound's."""

Figure = Callable[[Measurement], float]
FIGURES: Mapping[str, Figure] = {
    "rate": lambda item: item.load.per_second,
    "p99": lambda item: item.load.p99_ms,
    "CPU time of the service": lambda item: item.server_us,
    "CPU time of PostgreSQL": lambda item: item.database_us,
}
TARGETS = (
    *((EVALSTOP, BOUND, shape, "rate", ">=", least) for shape, least in LEAST_OF_BOUND.items()),
    (EVALSTOP, BOUND, MOST_CLIENTS, "CPU time of the service", "<=", 2.0),
    (EVALSTOP, BOUND, MOST_CLIENTS, "CPU time of PostgreSQL", "<=", 1.3),
    *((EVALSTOP, AGAINST, shape, "rate", ">=", 1.0) for shape in SHAPES),
    *((EVALSTOP, AGAINST, shape, "p99", "<=", 1.0) for shape in SHAPES),
)
"""Contender, baseline, load, figure, and the limit of the ratio's median."""


Cells = Mapping[tuple[str, Shape], Sequence[Measurement]]
"""The rounds of each contender under each load."""


def compute_ratios(cells: Cells, contender: str, baseline: str, shape: Shape, figure: Figure) -> list[float]:
    """The ratios of two contenders' figures, round by round; empty if one was not measured, or if a divisor is 0."""
    ours, theirs = cells.get((contender, shape), ()), cells.get((baseline, shape), ())
    if not ours or not theirs or not all(map(figure, theirs)):
        return []
    return [figure(a) / figure(b) for a, b in zip(ours, theirs, strict=True)]


class Target(NamedTuple):
    """A ratio within each round, by its median and extremes, and whether it is within its limit."""

    name: str
    median: float
    lowest: float
    highest: float
    limit: str
    met: bool


def compute_targets(cells: Cells) -> list[Target]:
    """The targets whose contenders were measured."""
    targets = []
    for contender, baseline, shape, figure, sign, limit in TARGETS:
        if ratios := compute_ratios(cells, contender, baseline, shape, FIGURES[figure]):
            median = statistics.median(ratios)
            met = median >= limit if sign == ">=" else median <= limit
            name = f"{shape}: {figure}, {contender} to {baseline}"
            targets.append(Target(name, median, min(ratios), max(ratios), f"{sign} {limit:g}", met))
    return targets


class Measured(Protocol):
    """The interface of a contender."""

    @property
    def name(self) -> str: ...

    @property
    def shapes(self) -> Sequence[Shape]: ...

    def measure(self, shape: Shape, seconds: int) -> Measurement: ...


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print its tables; returns 1 when a contender failed."""
    options = parse_with_database(build_parser(), arguments)
    if options.instructions:
        return _print_instructions(options)
    if options.quick:
        options.rounds, options.seconds = 1, 1
    shapes = [
        shape
        for shape in (QUICK_SHAPES if options.quick else SHAPES)
        if not options.loads or any(fnmatchcase(str(shape), pattern) for pattern in options.loads)
    ]
    machine = describe_machine(*PACKAGES) | {"postgresql": describe_postgres(options.database_url)}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="evalstop-bench-")))
        progress = ends.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        task = progress.add_task("starting the servers", total=None)
        contenders = start_contenders(ends, options, folder)
        for contender in contenders:
            with suppress(JobFailed):  # the first requests warm up; a failure is recorded when it occurs again
                contender.measure(contender.shapes[0], 1)
        progress.update(
            task, total=options.rounds * sum(shape in item.shapes for shape in shapes for item in contenders)
        )
        cells, failures = measure_in_turns(
            contenders,
            shapes,
            options.rounds,
            options.seconds,
            lambda text: progress.update(task, advance=1, description=text),
        )
    if options.json:
        rows = [
            {"contender": name, "load": str(shape), "rounds": [asdict(item) for item in rounds]}
            for (name, shape), rounds in cells.items()
        ]
        report = {"machine": machine, "cells": rows, "targets": compute_targets(cells), "failures": failures}
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _print_report(machine, cells, failures)
    return 1 if failures else 0


def measure_in_turns(
    contenders: Sequence[Measured],
    shapes: Sequence[Shape],
    rounds: int,
    seconds: int,
    show_progress: Callable[[str], None],
) -> tuple[Cells, list[str]]:
    """Measure all contenders under all loads, round by round; returns the cells and the messages of failures.

    A contender that fails under a load gets no cell for it.
    """
    by_name = {item.name: item for item in contenders}
    measurements: dict[tuple[str, Shape], list[Measurement]] = {}
    failures: dict[tuple[str, Shape], str] = {}
    for number in range(rounds):
        for place, shape in enumerate(shapes):
            for name in rotate([item.name for item in contenders if shape in item.shapes], number + place):
                key = (name, shape)
                show_progress(f"{shape}: {name}")
                try:
                    if key not in failures:
                        measurements.setdefault(key, []).append(by_name[name].measure(shape, seconds))
                except JobFailed as error:
                    failures[key] = error.detail
                    measurements.pop(key, None)
    keys = [(item.name, shape) for shape in shapes for item in contenders if (item.name, shape) in measurements]
    return {key: measurements[key] for key in keys}, list(failures.values())


def rotate(items: Sequence[str], turn: int) -> list[str]:
    """Rotate the items by one place per turn, so that no item is always first."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]


def describe_postgres(url: str) -> str:
    """The version of PostgreSQL and its settings that affect the benchmark."""
    names = ("fsync", "synchronous_commit", "shared_buffers", "max_wal_size")
    with psycopg.connect(libpq_url(url)) as connection:
        rows = connection.execute(
            "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY(%s)", (list(names),)
        )
        settings = ", ".join(f"{name}={value}" for name, value in rows)
        return f"{connection.info.server_version // 10_000} with {settings}"


def _print_report(machine: dict[str, Any], cells: Cells, failures: Sequence[str]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(f"{format_machine(machine)}; PostgreSQL {machine['postgresql']}", highlight=False)
    for failure in failures:
        console.print(f"FAILED: {failure}", highlight=False)
    title = "observations per second, and microseconds of CPU time per request; clients and servers share the cores"
    headings = ("per second", "min - max", "of the bound", "p50 ms", "p99 ms", "server us", "database us", "refused")
    table = new_table(title, "load", "contender", *headings, left=2)
    for (contender, shape), rounds in sorted(cells.items(), key=lambda item: item[0][1]):
        rates = [item.load.per_second for item in rounds]
        ratios = compute_ratios(cells, contender, BOUND, shape, FIGURES["rate"])
        table.add_row(
            str(shape),
            contender,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f} - {max(rates):,.0f}",
            f"{statistics.median(ratios):.2f}" if ratios else "",
            f"{statistics.median(item.load.p50_ms for item in rounds):.2f}",
            f"{statistics.median(item.load.p99_ms for item in rounds):.1f}",
            f"{statistics.median(item.server_us for item in rounds):,.0f}",
            f"{statistics.median(item.database_us for item in rounds):,.0f}",
            f"{sum(item.load.refused for item in rounds):,}",
        )
    console.print(table)
    if targets := compute_targets(cells):
        table = new_table("targets: ratios within each round", "", "median", "min - max", "target", "")
        for item in targets:
            extremes = f"{item.lowest:.2f} - {item.highest:.2f}"
            table.add_row(item.name, f"{item.median:.2f}", extremes, item.limit, "met" if item.met else "MISSED")
        console.print(table)


def _print_instructions(options: argparse.Namespace) -> int:
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="evalstop-bench-")))
        url = ends.enter_context(temporary_database(options.database_url, "instructions"))
        count = count_instructions(url, folder)
    met = "met" if count <= MOST_INSTRUCTIONS else "MISSED"
    Console(width=160).print(
        f"{count:,.0f} instructions per post of one observation at 64 clients; target: <= {MOST_INSTRUCTIONS:,}, {met}"
    )
    return 0


def count_instructions(url: str, folder: Path) -> float:
    """The instructions of the service for a post of one observation at 64 clients, by valgrind's callgrind.

    They depend less on the machine than times do; on a busy one, where a commit holds fewer posts, they are up to 1.4
    times as many.
    """
    if shutil.which("valgrind") is None:
        raise UnusableArguments("--instructions needs valgrind (on Debian: apt install valgrind).")
    environment = {"EVALSTOP_DATABASE_URL": url}
    (key,) = create_keys(environment)
    counting = ("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counted")
    with run_service(folder, key, environment, program=(*counting, sys.executable)) as service:
        with service.connect() as api:
            runs = [open_run(api) for _ in range(RUNS_A_CLIENT * MOST_CLIENTS.clients)]
        post = partial(run_load, [service.address], runs, key, clients=MOST_CLIENTS.clients, batch=MOST_CLIENTS.batch)
        post(requests=COUNTED_REQUESTS // 2)
        for switch in ("on", "off"):
            subprocess.run(["callgrind_control", "-i", switch, str(service.pid)], check=True, capture_output=True)
            if switch == "on":
                load = post(requests=COUNTED_REQUESTS, first_step=COUNTED_REQUESTS)
        subprocess.run(["callgrind_control", "-d", str(service.pid)], check=True, capture_output=True)
        totals = [re.search(r"^totals: (\d+)", file.read_text(), re.M) for file in folder.glob("counted*")]
    return sum(int(match[1]) for match in totals if match) / load.requests


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench-ingest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  make bench-ingest\n"
        "  make bench-ingest BENCH='--quick'\n"
        f"  make bench-ingest BENCH='--only {EVALSTOP} {BOUND} --loads \"1 x *\"'\n"
        "  make bench-ingest BENCH='--only \"4 replicas*\"'\n"
        "  make bench-ingest BENCH='--against HEAD~20'\n"
        "  make bench-ingest BENCH=--instructions",
    )
    add_database_option(parser)
    parser.add_argument("--rounds", type=positive_number, default=5, help="rounds per load (default: 5)")
    parser.add_argument("--seconds", type=positive_number, default=2, help="seconds per load and round (default: 2)")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="contenders (default: all)")
    parser.add_argument(
        "--loads", nargs="+", metavar="PATTERN", help="such as '100 x 8': observations per request x clients"
    )
    parser.add_argument(
        "--against", metavar="REV|PATH", help="a revision, or the folder of a checkout, to compare with"
    )
    parser.add_argument("--instructions", action="store_true", help="only count the service's instructions per post")
    parser.add_argument("--quick", action="store_true", help="one short round of two loads; not representative")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
