"""`make bench-ingest`: durable observations per second and CPU time per request, compared with an upper bound.

All contenders run at the same time and take turns under each load, in rotating order. Every acknowledged observation
must be in the database afterwards. The bound is a minimal ASGI app that commits the same rows with the same statement,
without keys and detectors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.databases import add_database_option, libpq_url, parse_with_database
from evalstop_lab.benchmarks.ingest.contenders import Lineup
from evalstop_lab.benchmarks.ingest.results import (
    AGAINST,
    BOUND,
    EVALSTOP,
    ON_SQLITE,
    SHAPES,
    Cell,
    Cells,
    Measurement,
    Shape,
    Target,
    compute_rate,
    compute_ratio,
    compute_targets,
    rotate,
)
from evalstop_lab.benchmarks.machine import describe_machine, format_machine
from evalstop_lab.benchmarks.processes import JobFailed
from evalstop_lab.report import new_table

QUICK_SHAPES = (Shape(1, 64), Shape(100, 8))
WARM_UP_SECONDS = 0.5
PACKAGES = ("evalstop-service", "uvicorn", "uvloop", "msgspec", "sqlalchemy", "asyncpg")


class Measured(Protocol):
    """The interface of a contender."""

    @property
    def name(self) -> str: ...

    @property
    def shapes(self) -> Sequence[Shape]: ...

    def measure(self, shape: Shape, seconds: float) -> Measurement: ...


@dataclass(frozen=True)
class Report:
    """The result of the benchmark."""

    command: str
    started_at: datetime
    rounds: int
    seconds: float
    machine: dict[str, Any]
    postgresql: str
    notes: list[str]
    failures: list[str]
    cells: list[Cell]
    targets: list[Target]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print its tables; returns 1 when a contender failed."""
    parser = build_parser()
    options = parse_with_database(parser, arguments)
    if options.quick:
        options.rounds, options.seconds = 1, 0.5
    report = run(options)
    if options.json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        print_report(Console() if sys.stdout.isatty() else Console(width=160), report)
    return 1 if report.failures else 0


def is_wanted(only: Sequence[str] | None, name: str) -> bool:
    """Whether a contender matches a pattern, or all are wanted; another checkout is if this one is."""
    names = {name, name.replace(AGAINST, EVALSTOP)}
    return not only or any(fnmatchcase(item, pattern) for item in names for pattern in only)


def run(options: argparse.Namespace) -> Report:
    """Start the contenders and measure them."""
    started_at, machine = datetime.now(UTC), describe_machine(*PACKAGES)
    shapes = [
        shape
        for shape in (QUICK_SHAPES if options.quick else SHAPES)
        if not options.loads or any(fnmatchcase(str(shape), pattern) for pattern in options.loads)
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="evalstop-bench-")))
        progress = ends.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        task = progress.add_task("starting the servers", total=None)
        wants = partial(is_wanted, options.only)
        lineup = Lineup(ends, options.database_url, folder, wants, options.against, options.mlflow)
        contenders = lineup.start()
        for contender in contenders:
            with suppress(JobFailed):  # the first requests warm up; a failure is recorded when it occurs again
                contender.measure(contender.shapes[0], min(WARM_UP_SECONDS, options.seconds))
        total = options.rounds * sum(shape in item.shapes for shape in shapes for item in contenders)
        progress.update(task, total=total)
        cells, failures = measure_in_turns(
            contenders,
            shapes,
            options.rounds,
            options.seconds,
            lambda text: progress.update(task, advance=1, description=text),
        )
    arguments = " ".join(sys.argv[1:])
    return Report(
        command="make bench-ingest" + (f" BENCH='{arguments}'" if arguments else ""),
        started_at=started_at,
        rounds=options.rounds,
        seconds=options.seconds,
        machine=machine,
        postgresql=describe_postgres(options.database_url),
        notes=lineup.notes,
        failures=failures,
        cells=list(cells.values()),
        targets=compute_targets(cells),
    )


def measure_in_turns(
    contenders: Sequence[Measured],
    shapes: Sequence[Shape],
    rounds: int,
    seconds: float,
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
    return {key: Cell(*key, tuple(measurements[key])) for key in keys}, list(failures.values())


def describe_postgres(url: str) -> str:
    """The version of PostgreSQL and its settings that affect the benchmark."""
    names = ("fsync", "synchronous_commit", "shared_buffers", "max_wal_size")
    with psycopg.connect(libpq_url(url)) as connection:
        rows = connection.execute(
            "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY(%s)", (list(names),)
        )
        settings = ", ".join(f"{name}={value}" for name, value in rows)
        return f"{connection.info.server_version // 10_000} with {settings}"


def print_report(console: Console, report: Report) -> None:
    console.print(
        f"{report.command}, {report.started_at:%Y-%m-%d %H:%M} UTC; medians of {report.rounds} rounds of"
        f" {report.seconds:g} s in turns; {format_machine(report.machine)}; PostgreSQL {report.postgresql};"
        " clients, servers and databases share the cores",
        highlight=False,
    )
    for note in report.notes:
        console.print(f"note: {note}", highlight=False)
    for failure in report.failures:
        console.print(f"FAILED: {failure}", highlight=False)
    console.print(_build_cells_table(report.cells))
    if report.targets:
        console.print(_build_targets_table(report.targets))


def _build_cells_table(cells: Sequence[Cell]) -> Table:
    table = new_table(
        "observations per second, and microseconds of CPU time per request",
        "load",
        "contender",
        "per second",
        "min - max",
        "of the bound",
        "p50 ms",
        "p99 ms",
        "server us",
        "database us",
        "client CPU",
        left=2,
    )
    by_key = {(cell.contender, cell.shape): cell for cell in cells}
    for shape in sorted({cell.shape for cell in cells}):
        for cell in (cell for cell in cells if cell.shape == shape):
            rates = list(map(compute_rate, cell.rounds))
            bound = BOUND + ON_SQLITE if cell.contender.endswith(ON_SQLITE) else BOUND
            ratio = compute_ratio(by_key, cell.contender, bound, shape, compute_rate)
            retried = sum(item.load.retried for item in cell.rounds)
            database_us = cell.median(lambda item: item.database_us)
            table.add_row(
                str(shape),
                cell.contender + (f", {retried} retried" if retried else ""),
                f"{cell.median(compute_rate):,.0f}",
                f"{min(rates):,.0f} - {max(rates):,.0f}",
                f"{ratio.median:.2f}" if ratio else "",
                f"{cell.median(lambda item: item.load.p50_ms):.2f}",
                f"{cell.median(lambda item: item.load.p99_ms):.1f}",
                f"{cell.median(lambda item: item.server_us):,.0f}",
                f"{database_us:,.0f}" if database_us == database_us else "",
                f"{cell.median(lambda item: item.load.generator_cpu):.2f}",
            )
        table.add_section()
    return table


def _build_targets_table(targets: Sequence[Target]) -> Table:
    table = new_table("targets: ratios within each round", "", "median", "min - max", "target", "")
    for item in targets:
        target = f">= {item.least:g}" if item.least is not None else f"<= {item.most:g}"
        extremes = f"{item.ratio.lowest:.2f} - {item.ratio.highest:.2f}"
        table.add_row(item.name, f"{item.ratio.median:.2f}", extremes, target, "met" if item.met else "MISSED")
    return table


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
        "  make bench-ingest BENCH='--against ../old/.venv/bin/python'",
    )
    add_database_option(parser)
    parser.add_argument("--rounds", type=positive_number, default=5, help="rounds per load (default: 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per load and round (default: 2)")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="contenders (default: all)")
    parser.add_argument(
        "--loads", nargs="+", metavar="PATTERN", help="such as '100 x 8': observations per request x clients"
    )
    parser.add_argument("--against", metavar="PYTHON", help="the Python of another checkout to compare with")
    parser.add_argument("--mlflow", metavar="PYTHON", help="a Python with mlflow and psycopg2 to compare with")
    parser.add_argument("--quick", action="store_true", help="one short round of two loads; not representative")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
