"""`make bench-webhooks`: webhooks a second through worker and outbox beside a bare client, and how soon one leaves."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.databases import add_database_option, parse_with_database, temporary_database
from evalstop_lab.benchmarks.machine import describe_machine, format_machine
from evalstop_lab.benchmarks.webhook_senders import (
    AT_A_TIME,
    BODY,
    Outbox,
    create_outbox,
    deliver_with_worker,
    fill_outbox,
    measure_latencies,
    post_with_bare_client,
)
from evalstop_lab.benchmarks.webhook_sink import run_sink

BARE = "bare aiohttp"
TARGET = 0.45
VERSIONS = ("evalstop-service", "aiohttp", "uvloop", "sqlalchemy", "psycopg")


def main() -> int:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(
        prog="make bench-webhooks",
        description=__doc__,
        epilog="examples:\n  make bench-webhooks\n  python -m evalstop_lab.benchmarks.webhooks --rounds 1 --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_database_option(parser)
    parser.add_argument("--rounds", type=positive_number, default=5, help="everybody is measured so often, in turns")
    parser.add_argument("--count", type=positive_number, default=5000, help="webhooks each time")
    parser.add_argument("--events", type=positive_number, default=100, help="events timed from commit to arrival")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parse_with_database(parser)
    with ExitStack() as stack:
        databases = stack.enter_context(_open_databases(options.database_url))
        url = stack.enter_context(run_sink())
        report = _build_report(_measure_rates(databases, url, options), _measure_waits(databases, options), options)
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _print_tables(report)
    return 0


@contextmanager
def _open_databases(server: str) -> Iterator[dict[str, Database]]:
    """Both databases, migrated."""
    with (
        tempfile.TemporaryDirectory(prefix="evalstop-bench-") as folder,
        temporary_database(server, "webhooks") as url,
    ):
        databases = {"PostgreSQL": Database(url), "SQLite": Database(f"sqlite:///{Path(folder) / 'evalstop.db'}")}
        for database in databases.values():
            schema.upgrade_schema(database)
        yield databases
        for database in databases.values():
            database.close()


def _measure_rates(databases: dict[str, Database], url: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Webhooks a second of each contender in each round; another one starts each round."""
    boxes = {name: create_outbox(database, url) for name, database in databases.items()}
    names = [BARE, *boxes]
    rates: dict[str, list[float]] = {name: [] for name in names}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=options.rounds * len(names))
        for number in range(options.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                rates[name].append(_measure_rate(name, boxes, options.count))
                progress.advance(task)
    return rates


def _measure_rate(name: str, boxes: dict[str, Outbox], count: int) -> float:
    if name == BARE:
        return uvloop.run(post_with_bare_client(next(iter(boxes.values())), count))
    fill_outbox(boxes[name], count)
    return uvloop.run(deliver_with_worker(boxes[name], count))


def _measure_waits(databases: dict[str, Database], options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds from commit to arrival, one event after another, into a receiver in this process."""

    async def measure(database: Database) -> list[float]:
        arrived: asyncio.Queue[float] = asyncio.Queue()

        async def receive(_request: web.Request) -> web.Response:
            arrived.put_nowait(time.perf_counter())
            return web.Response(status=204)

        receiver = web.Application()
        receiver.router.add_post("/", receive)
        runner = web.AppRunner(receiver)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            box = create_outbox(database, f"http://127.0.0.1:{runner.addresses[0][1]}/")
            return await measure_latencies(box, options.events, arrived)
        finally:
            await runner.cleanup()

    return {name: uvloop.run(measure(database)) for name, database in databases.items()}


def _build_report(
    rates: dict[str, list[float]], waits: dict[str, list[float]], options: argparse.Namespace
) -> dict[str, Any]:
    bare = rates[BARE]
    return {
        "command": "make bench-webhooks",
        "rounds": options.rounds,
        "count": options.count,
        "at_a_time": AT_A_TIME,
        "body_bytes": len(BODY),
        "events": options.events,
        "machine": describe_machine(*VERSIONS),
        "target": TARGET,
        "deliveries": [
            {
                "contender": name,
                "per_second": statistics.median(by_round),
                "rounds": by_round,
                # Of each round by itself, since what else the machine does changes from round to round.
                "of_bare": statistics.median(mine / theirs for mine, theirs in zip(by_round, bare, strict=True)),
            }
            for name, by_round in rates.items()
        ],
        "commit_to_arrival_ms": {
            name: {"p50": statistics.median(times), "p90": statistics.quantiles(times, n=10)[-1], "most": max(times)}
            for name, times in waits.items()
        },
    }


def _print_tables(report: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{report['command']}: {report['rounds']} rounds of {report['count']:,} webhooks "
        f"of {report['body_bytes']} bytes, {report['at_a_time']} at a time; {format_machine(report['machine'])}",
        highlight=False,
    )
    table = Table(title="webhooks a second, median of rounds")
    for column in ("", "a second", "lowest - highest", f"of bare (target {report['target']:.2f})"):
        table.add_column(column, justify="right" if column else "left")
    for row in report["deliveries"]:
        span = f"{min(row['rounds']):,.0f} - {max(row['rounds']):,.0f}"
        table.add_row(row["contender"], f"{row['per_second']:,.0f}", span, f"{row['of_bare']:.2f}")
    console.print(table)
    table = Table(title=f"from a commit to its webhook's arrival, {report['events']} one after another, in ms")
    for column in ("", "p50", "p90", "most"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in report["commit_to_arrival_ms"].items():
        table.add_row(name, f"{row['p50']:.1f}", f"{row['p90']:.1f}", f"{row['most']:.1f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
