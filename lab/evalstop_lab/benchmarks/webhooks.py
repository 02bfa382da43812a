"""`make bench-webhooks`: webhooks a second through worker and outbox beside a bare client, and how soon one leaves."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
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
from evalstop_lab.benchmarks.webhook_senders import (
    AT_A_TIME,
    BODY,
    Outbox,
    an_outbox,
    by_a_bare_client,
    by_the_worker,
    fill,
    latencies,
)
from evalstop_lab.benchmarks.webhook_sink import sink
from tests.fixtures.postgres_server import postgres

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
    parser.add_argument("--rounds", type=positive_number, default=5, help="everybody is measured so often, in turns")
    parser.add_argument("--count", type=positive_number, default=5000, help="webhooks each time")
    parser.add_argument("--events", type=positive_number, default=100, help="events timed from commit to arrival")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with ExitStack() as stack:
        databases = stack.enter_context(_databases())
        url = stack.enter_context(sink())
        report = _report(_rates(databases, url, options), _waits(databases, options), options)
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _print(report)
    return 0


@contextmanager
def _databases() -> Iterator[dict[str, Database]]:
    """Both databases at head."""
    with tempfile.TemporaryDirectory(prefix="evalstop-bench-") as folder, postgres() as server:
        databases = {"PostgreSQL": Database(server), "SQLite": Database(f"sqlite:///{Path(folder) / 'evalstop.db'}")}
        for database in databases.values():
            schema.upgrade_schema(database)
        yield databases
        for database in databases.values():
            database.close()


def _rates(databases: dict[str, Database], url: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Webhooks a second of each contender in each round; another one begins each round."""
    boxes = {name: an_outbox(database, url) for name, database in databases.items()}
    names = [BARE, *boxes]
    rates: dict[str, list[float]] = {name: [] for name in names}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=options.rounds * len(names))
        for number in range(options.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                rates[name].append(_rate(name, boxes, options.count))
                progress.advance(task)
    return rates


def _rate(name: str, boxes: dict[str, Outbox], count: int) -> float:
    if name == BARE:
        return uvloop.run(by_a_bare_client(next(iter(boxes.values())), count))
    fill(boxes[name], count)
    return uvloop.run(by_the_worker(boxes[name], count))


def _waits(databases: dict[str, Database], options: argparse.Namespace) -> dict[str, list[float]]:
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
            box = an_outbox(database, f"http://127.0.0.1:{runner.addresses[0][1]}/")
            return await latencies(box, options.events, arrived)
        finally:
            await runner.cleanup()

    return {name: uvloop.run(measure(database)) for name, database in databases.items()}


def _report(
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
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "target": TARGET,
        "deliveries": [
            {
                "contender": name,
                "per_second": statistics.median(found),
                "rounds": found,
                # Of each round by itself, since what else the machine does changes from round to round.
                "of_bare": statistics.median(mine / theirs for mine, theirs in zip(found, bare, strict=True)),
            }
            for name, found in rates.items()
        ],
        "commit_to_arrival_ms": {
            name: {"p50": statistics.median(found), "p90": statistics.quantiles(found, n=10)[-1], "most": max(found)}
            for name, found in waits.items()
        },
    }


def _print(report: dict[str, Any]) -> None:
    console = Console()
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    console.print(
        f"{report['command']}: {report['rounds']} rounds of {report['count']:,} webhooks "
        f"of {report['body_bytes']} bytes, {report['at_a_time']} at a time; "
        f"Python {report['python']}, {report['cores']} cores, "
        f"load average {report['load_average']:.1f}; {versions}"
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
