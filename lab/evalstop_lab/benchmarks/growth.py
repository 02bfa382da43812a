"""`make bench-growth`: the cost of ingestion and reading with many runs, long runs and after a crash."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks import planted_data
from evalstop_lab.benchmarks.databases import add_database_option, parse_with_database, temporary_database
from evalstop_lab.benchmarks.ingest.contenders import open_run
from evalstop_lab.benchmarks.ingest.load_generator import Job, Load
from evalstop_lab.benchmarks.ingest.payloads import METRICS, compute_value
from evalstop_lab.benchmarks.ingest.results import rotate
from evalstop_lab.benchmarks.machine import describe_machine, format_machine
from evalstop_lab.benchmarks.processes import (
    JobFailed,
    Server,
    Worker,
    find_free_port,
    prepare_service,
    resident_bytes,
    run_service,
    start_worker,
)
from evalstop_lab.report import new_table

PACKAGES = ("evalstop-service", "uvicorn", "uvloop", "sqlalchemy", "asyncpg")
RUN_COUNTS = (1000, 10_000, 100_000)
RUN_LENGTHS = (100, 10_000, 1_000_000)
CLIENTS = 64
WARM_UP_RUNS = 200
STEPS_A_ROUND = 10_000_000
RECOVERY_LENGTH = 10_000
LOOKS = 20
COLD_SECONDS = 120.0

Row = dict[str, float | str]


@dataclass(frozen=True)
class Ground:
    """Where a section measures: a database of its own, a folder for logs, the load generator."""

    url: str
    key: str
    environment: Mapping[str, str]
    folder: Path
    generator: Worker

    def post(
        self,
        server: Server,
        runs: Sequence[str],
        batch: int,
        *,
        clients: int = CLIENTS,
        requests: int | None = None,
        seconds: float = 600.0,
        first_step: int = 0,
    ) -> Load:
        """Post to these runs: so many requests a client, or for so long."""
        job = Job(
            addresses=(server.address,),
            format="evalstop",
            runs=tuple(runs),
            clients=clients,
            batch=batch,
            seconds=seconds,
            key=server.key,
            first_step=first_step,
            requests=requests,
        )
        return self.generator.ask(job, Load)

    def warm_up(self, server: Server, name: str) -> None:
        """Post once to each of some runs that are not measured."""
        self.post(server, planted_data.plant_runs(self.url, server, WARM_UP_RUNS, name), 20, requests=1)


def measure_many_runs(ground: Ground, counts: Sequence[int], seconds: float) -> list[Row]:
    """Cost of an observation, and memory, by the number of live runs: runs new to the process, then known ones.

    Each process is fresh and caches all runs; a last one, with the most runs, has the default cache. Every run is
    posted to once, 20 observations with one eval, then all again.
    """
    rows: list[Row] = []
    for count, cached in [*((count, max(counts)) for count in counts), (max(counts), None)]:
        memory = {"EVALSTOP_CACHED_RUNS": str(cached + WARM_UP_RUNS)} if cached else {}
        name = f"{count}-{cached}"
        with run_service(ground.folder / name, ground.key, {**ground.environment, **memory}) as server:
            ground.warm_up(server, f"warm-{name}")
            runs = planted_data.plant_runs(ground.url, server, count, f"live-{name}")
            before = resident_bytes(server.pid)
            new = ground.post(server, runs, 20, requests=-(-count // CLIENTS), seconds=COLD_SECONDS)
            grown_by = resident_bytes(server.pid) - before
            reached = min(count, new.requests)
            known = ground.post(server, runs[:reached], 20, seconds=seconds, first_step=40)
        rows.append(
            {
                "live runs": f"{reached:,}" + ("" if cached else ", default cache"),
                "us an observation, new to the process": 1e6 / new.per_second,
                "us, known": 1e6 / known.per_second,
                "p99 ms": known.p99_ms,
                "kB a run": grown_by / reached / 1000,
            }
        )
    return rows


@dataclass
class _LongRun:
    """A run of so many observations, and the process that is posted to."""

    server: Server
    run: str
    length: int
    first_ms: float
    microseconds: list[float] = field(default_factory=list)


def measure_long_runs(ground: Ground, lengths: Sequence[int], seconds: float, rounds: int) -> list[Row]:
    """Milliseconds to the first verdict of a process that does not know the run; microseconds an observation after.

    One client posts 100 observations a request. The processes run side by side and take turns.
    """
    with ExitStack() as ends:
        long_runs: dict[str, _LongRun] = {}
        for length in lengths:
            folder = ground.folder / f"length-{length}"
            with run_service(folder, ground.key, ground.environment) as server:
                run = planted_data.plant_runs(ground.url, server, 1, f"long-{length}")[0]
                ground.warm_up(server, f"before-{length}")
            planted_data.plant_observations(ground.url, run, length)
            server = ends.enter_context(run_service(folder, ground.key, ground.environment))
            ground.warm_up(server, f"after-{length}")
            started = time.perf_counter()
            ground.post(server, [run], 100, clients=1, requests=1, first_step=length)
            long_runs[run] = _LongRun(server, run, length, (time.perf_counter() - started) * 1000)
        for number in range(rounds):
            for run in rotate(list(long_runs), number):
                item = long_runs[run]
                first_step = item.length + 100 + number * STEPS_A_ROUND
                load = ground.post(item.server, [run], 100, clients=1, seconds=seconds, first_step=first_step)
                item.microseconds.append(1e6 / load.per_second)
    return [
        {
            "observations in the run": f"{item.length:,}",
            "ms to the first verdict, new to the process": item.first_ms,
            "us an observation after": statistics.median(item.microseconds),
        }
        for item in long_runs.values()
    ]


def measure_recovery(ground: Ground, rounds: int) -> list[Row]:
    """Milliseconds from kill -9, the start of the next process included; medians of some rounds.

    A verdict has to be that of a twin: a run with the same observations that was followed without interruption.
    """
    port = find_free_port()
    accepted, cached, rebuilt = [], [], []
    for number in range(rounds):
        folder = ground.folder / f"recovery-{number}"
        with run_service(folder, ground.key, ground.environment, port) as server, server.connect() as api:
            runs = [open_run(api) for _ in range(3)]
            for run in runs:
                for first_step in range(0, RECOVERY_LENGTH, 1000):
                    _post_turning_run(api, run, first_step, 1000)
            expected = _post_turning_run(api, runs[0], RECOVERY_LENGTH, 20)
            os.kill(server.pid, signal.SIGKILL)
            killed_at = time.perf_counter()
            with (
                run_service(folder / "second", ground.key, ground.environment, port) as second,
                second.connect() as api,
            ):
                _post_turning_run(api, runs[0], RECOVERY_LENGTH + 20, 20)
                accepted.append((time.perf_counter() - killed_at) * 1000)
                cached.append(_time_verdict(api, runs[1], expected))
                planted_data.delete_monitor_states(ground.url)
                os.kill(second.pid, signal.SIGKILL)
        with run_service(folder / "third", ground.key, ground.environment, port) as third, third.connect() as api:
            _post_turning_run(api, runs[0], RECOVERY_LENGTH + 40, 20)
            rebuilt.append(_time_verdict(api, runs[2], expected))
    names = {
        "to the first accepted observation": accepted,
        f"first verdict on a run of {RECOVERY_LENGTH:,} observations": cached,
        "the same, its monitor's state deleted": rebuilt,
    }
    return [{"after kill -9": name, "ms": statistics.median(taken)} for name, taken in names.items()]


def _time_verdict(api: httpx.Client, run: str, expected: dict[str, Any]) -> float:
    started = time.perf_counter()
    verdict = _post_turning_run(api, run, RECOVERY_LENGTH, 20)
    if verdict != expected:
        raise JobFailed(f"The verdict after a restart is {verdict}; that of the twin is {expected}.")
    return (time.perf_counter() - started) * 1000


def _post_turning_run(api: httpx.Client, run: str, first_step: int, count: int) -> dict[str, Any]:
    """Post observations of a run that turns in its middle; returns the verdict."""
    observations = [
        {"metric": metric, "step": step, "value": compute_value(metric, min(step, abs(RECOVERY_LENGTH - step)))}
        for step in range(first_step, first_step + count)
        for metric in [METRICS[step % len(METRICS)]]
    ]
    response = api.post(f"/api/v1/runs/{run}/observations", json={"observations": observations}).raise_for_status()
    verdict: dict[str, Any] = response.json()["verdict"]
    return verdict


def measure_reading(ground: Ground, length: int, count: int) -> list[Row]:
    """Milliseconds of the first look and of those after it, at a long series and at a list of many runs."""
    with run_service(ground.folder / "reading", ground.key, ground.environment) as server, server.connect() as api:
        run = planted_data.plant_runs(ground.url, server, 1, "long")[0]
        planted_data.plant_observations(ground.url, run, length, "loss")
        series = f"/api/v1/runs/{run}/series?metric=loss&buckets=1000"
        last = length - length // 100
        rows = [
            _time_reading(api, f"series of {length:,} observations in 1,000 buckets", series),
            _time_reading(api, f"its last {length // 100:,} in 1,000 buckets", f"{series}&from={last}"),
            _time_reading(api, "run list, first page, 2 runs", "/api/v1/runs?limit=50"),
        ]
        planted_data.plant_runs(ground.url, server, count, "many")
        for name, query in {
            "first page": "",
            "those running": "&status=running",
            "by a name that one run has": f"&name=many-{count // 2}",
            "none has failed": "&status=failed",
        }.items():
            rows.append(_time_reading(api, f"run list, {name}, {count:,} runs", f"/api/v1/runs?limit=50{query}"))
    return rows


def _time_reading(api: httpx.Client, name: str, path: str) -> Row:
    taken = []
    for _ in range(1 + LOOKS):
        started = time.perf_counter()
        api.get(path).raise_for_status()
        taken.append((time.perf_counter() - started) * 1000)
    first, *others = taken
    return {"reading": name, "first look ms": first, "p50 of 20 more": statistics.median(others), "worst": max(others)}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="make bench-growth", description=__doc__)
    add_database_option(parser)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections (default: all)")
    parser.add_argument("--rounds", type=positive_number, default=5, help="of long runs and of recovery (default: 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a load on known runs (default: 1)")
    parser.add_argument("--quick", action="store_true", help="small sizes: to try it, not to quote it")
    parser.add_argument("--json", action="store_true", help="print one JSON object rather than tables")
    options = parse_with_database(parser, arguments)
    if options.quick:
        options.rounds = 1
    machine, tables = describe_machine(*PACKAGES), {}
    with (
        tempfile.TemporaryDirectory(prefix="evalstop-bench-") as folder,
        start_worker("evalstop_lab.benchmarks.ingest.load_generator") as generator,
    ):
        for section in options.only:
            with temporary_database(options.database_url, "growth") as url:
                environment = {"EVALSTOP_DATABASE_URL": url}
                ground = Ground(url, prepare_service(environment), environment, Path(folder) / section, generator)
                tables[section] = _measure(section, ground, options)
    if options.json:
        sys.stdout.write(msgspec.json.encode({"machine": machine, **tables}).decode() + "\n")
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(format_machine(machine), highlight=False)
    for rows in tables.values():
        table = new_table("", *rows[0])
        for row in rows:
            table.add_row(*(value if isinstance(value, str) else f"{value:,.1f}" for value in row.values()))
        console.print(table)
    return 0


SECTIONS = ("live-runs", "long-runs", "recovery", "reading")


def _measure(section: str, ground: Ground, options: argparse.Namespace) -> list[Row]:
    match section:
        case "live-runs":
            return measure_many_runs(ground, (1000, 2000) if options.quick else RUN_COUNTS, options.seconds)
        case "long-runs":
            lengths = (100, 10_000) if options.quick else RUN_LENGTHS
            return measure_long_runs(ground, lengths, options.seconds, options.rounds)
        case "recovery":
            return measure_recovery(ground, options.rounds)
        case _:
            return measure_reading(ground, *((10_000, 10_000) if options.quick else (10**6, 10**6)))


if __name__ == "__main__":
    sys.exit(main())
