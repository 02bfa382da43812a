"""`make bench-first`: latency from a posted eval to its webhook, and observations a second beside a bare route."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from aiohttp import web
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.load import Ask, Asks, batches, load
from evalstop_lab.service_process import Service, end, running_service
from tests.fixtures.postgres_server import postgres

CONNECTIONS = (1, 8)
BATCHES = (1, 100)
VERSIONS = ("evalstop-service", "fastapi", "uvicorn", "pydantic", "sqlalchemy", "psycopg", "aiohttp")


@dataclass(frozen=True)
class Cell:
    """One thing to measure: who is asked, by how many connections, with how many observations a request."""

    contender: str
    connections: int
    batch: int


def main() -> int:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(prog="make bench-first", description=__doc__)
    parser.add_argument("--rounds", type=positive_number, default=5, help="each cell is measured so often, in turns")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each time")
    parser.add_argument("--stops", type=positive_number, default=40, help="stops timed from post to webhook")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evalstop-bench-")))
        hello = stack.enter_context(_hello())
        database = stack.enter_context(postgres())
        services = {
            "SQLite": stack.enter_context(running_service(folder / "sqlite")),
            "PostgreSQL": stack.enter_context(
                running_service(folder / "postgresql", {"EVALSTOP_DATABASE_URL": database})
            ),
        }
        rates = _throughput(hello, services, options)
        latencies = {name: asyncio.run(_latencies(service, options.stops)) for name, service in services.items()}
    report = _report(rates, latencies, options)
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _print(report)
    return 0


def _throughput(hello: str, services: dict[str, Service], options: argparse.Namespace) -> dict[Cell, list[float]]:
    cells = [Cell("bare route", connections, 1) for connections in CONNECTIONS]
    cells += [Cell(name, connections, batch) for name in services for connections in CONNECTIONS for batch in BATCHES]
    runs = {
        name: _open_runs(service, max(CONNECTIONS), options.rounds * len(cells)) for name, service in services.items()
    }
    rates: dict[Cell, list[float]] = {cell: [] for cell in cells}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=options.rounds * len(cells))
        for round_number in range(options.rounds):
            turn = round_number % len(cells)
            for cell in cells[turn:] + cells[:turn]:
                if cell.contender == "bare route":
                    asks, key = _greetings(hello), None
                else:
                    service = services[cell.contender]
                    asks, key = batches(service.url, runs[cell.contender].pop(), cell.batch, 0), service.key
                rates[cell].append(asyncio.run(load(asks, key, cell.connections, options.seconds)))
                progress.advance(task)
    return rates


def _greetings(url: str) -> Asks:
    def asks(_number: int) -> Iterator[Ask]:
        while True:
            yield Ask("GET", url)

    return asks


def _open_runs(service: Service, connections: int, times: int) -> list[list[str]]:
    """Fresh runs for each time a cell is measured, so that every time starts from the same."""
    with httpx.Client(base_url=f"{service.url}/api/v1", headers={"Authorization": f"Bearer {service.key}"}) as api:
        return [
            [api.post("/runs", json={"name": f"load-{time}-{number}"}).json()["id"] for number in range(connections)]
            for time in range(times)
        ]


async def _latencies(service: Service, stops: int) -> list[float]:
    """Milliseconds from sending the eval that turns the verdict to receiving the webhook, one stop after another."""
    arrived: asyncio.Queue[float] = asyncio.Queue()

    async def receive(request: web.Request) -> web.Response:
        arrived.put_nowait(time.perf_counter())
        return web.Response(status=204)

    receiver = web.Application()
    receiver.router.add_post("/", receive)
    runner = web.AppRunner(receiver)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    found = []
    headers = {"Authorization": f"Bearer {service.key}"}
    async with aiohttp.ClientSession(f"{service.url}/api/v1/", headers=headers, raise_for_status=True) as api:
        endpoint = {"url": f"http://127.0.0.1:{port}/", "event_types": ["run.stop_requested"]}
        await api.post("endpoints", json=endpoint)
        await api.patch("project", json={"stops_per_hour": None, "stops_share": None})
        for number in range(stops):
            async with api.post(
                "runs", json={"name": f"stop-{number}", "mode": "enforce", "policy": "paper"}
            ) as response:
                run = (await response.json())["id"]
            fall = [{"metric": "eval", "step": step, "value": -step} for step in range(4)]
            await api.post(f"runs/{run}/observations", json={"observations": fall[:3]})
            begun = time.perf_counter()
            await api.post(f"runs/{run}/observations", json={"observations": fall[3:]})
            found.append((await asyncio.wait_for(arrived.get(), 30) - begun) * 1000)
    await runner.cleanup()
    return found


@contextmanager
def _hello() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "evalstop_lab.benchmarks.hello"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        end(process)


def _report(
    rates: dict[Cell, list[float]], latencies: dict[str, list[float]], options: argparse.Namespace
) -> dict[str, Any]:
    bare = {cell.connections: statistics.median(rates[cell]) for cell in rates if cell.contender == "bare route"}
    return {
        "command": f"make bench-first  ({options.rounds} rounds of {options.seconds:g} s, {options.stops} stops)",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "throughput": [
            {
                "contender": cell.contender,
                "connections": cell.connections,
                "batch": cell.batch,
                "per_second": statistics.median(found),
                "lowest": min(found),
                "highest": max(found),
                "requests_to_bare_route": statistics.median(found) / cell.batch / bare[cell.connections],
            }
            for cell, found in rates.items()
        ],
        "latency_ms": {
            name: {"p50": statistics.median(found), "p90": statistics.quantiles(found, n=10)[-1]}
            for name, found in latencies.items()
        },
    }


def _print(report: dict[str, Any]) -> None:
    console = Console()
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    console.print(f"{report['command']}; Python {report['python']}, {report['cores']} cores; {versions}")
    table = Table(title="observations acknowledged a second (bare route: requests), median of rounds")
    for column in ("", "connections", "batch", "a second", "lowest - highest", "requests, bare route = 1"):
        table.add_column(column, justify="left" if not column else "right")
    for row in report["throughput"]:
        table.add_row(
            row["contender"],
            str(row["connections"]),
            str(row["batch"]),
            f"{row['per_second']:,.0f}",
            f"{row['lowest']:,.0f} - {row['highest']:,.0f}",
            f"{row['requests_to_bare_route']:.3f}",
        )
    console.print(table)
    table = Table(title="from an eval posted to its webhook received, in ms")
    for column in ("", "p50", "p90"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in report["latency_ms"].items():
        table.add_row(name, f"{row['p50']:.1f}", f"{row['p90']:.1f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
