"""`make bench-growth`: the cost of ingestion and reads with many runs, with long runs, and after a crash."""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import msgspec
import psycopg
from psycopg import sql
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.ingest.contenders import open_run
from evalstop_lab.benchmarks.load import run_load
from evalstop_lab.benchmarks.processes import (
    JobFailed,
    Server,
    add_database_option,
    create_keys,
    describe_machine,
    find_free_port,
    format_machine,
    libpq_url,
    measure_memory,
    parse_with_database,
    run_service,
    temporary_database,
)
from evalstop_lab.report import new_table

PACKAGES = ("evalstop-service", "uvicorn", "uvloop", "sqlalchemy", "asyncpg")
RUN_COUNTS = (1000, 10_000, 100_000)
RUN_LENGTHS = (100, 10_000, 1_000_000)
CLIENTS = 64
WARM_UP_RUNS = 200
STEPS_A_ROUND = 10_000_000
RECOVERY_LENGTH = 10_000
LATER_READS = 20
METRICS = ("eval", *["proxy", "kl", "loss"] * 7)[:20]
"""The metrics of consecutive observations."""

Row = dict[str, float | str]


@dataclass(frozen=True)
class Environment:
    """The environment of one section: its own database, and a folder for logs."""

    url: str
    key: str
    variables: Mapping[str, str]
    folder: Path

    def warm_up(self, server: Server, name: str) -> None:
        """Post once to each of `WARM_UP_RUNS` other runs, which are not measured."""
        runs = insert_runs(self.url, server, WARM_UP_RUNS, name)
        run_load([server.address], runs, self.key, clients=CLIENTS, batch=20, requests=WARM_UP_RUNS)


def insert_runs(url: str, server: Server, count: int, name: str) -> list[str]:
    """Insert copies of a run that is opened over HTTP; their names start with `name`. Returns their ids."""
    with server.connect() as client, psycopg.connect(libpq_url(url)) as connection:
        original = open_run(client)
        rows = connection.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_name = 'runs' AND table_schema = 'public'"
        )
        copied = sql.SQL(", ").join(sql.Identifier(row[0]) for row in rows if row[0] not in ("id", "name"))
        connection.execute(
            sql.SQL(
                "INSERT INTO runs (id, name, {copied}) SELECT gen_random_uuid(), %s || '-' || number, {copied}"
                " FROM runs, generate_series(1, %s) AS number WHERE id = %s"
            ).format(copied=copied),
            (name, count, UUID(original)),
        )
        connection.execute(
            "INSERT INTO attempts (run_id, attempt, started_at)"
            " SELECT id, 1, created_at FROM runs WHERE starts_with(name, %s)",
            (f"{name}-",),
        )
        ids = connection.execute("SELECT id::text FROM runs WHERE starts_with(name, %s)", (f"{name}-",)).fetchall()
    return [row[0] for row in ids]


def insert_observations(url: str, run: str, count: int, metric: str | None = None) -> None:
    """Insert observations of a run that improves and does not turn: of one metric, or of all metrics in turns."""
    metrics = [metric] if metric else list(METRICS)
    with psycopg.connect(libpq_url(url)) as connection:
        connection.execute(
            "INSERT INTO observations (run_id, metric, step, superseded_by, value, attempt, received_at)"
            " SELECT %s, (%s::text[])[1 + number %% %s], number, 0,"
            " 1 - exp(-number / 2000.0) + 0.02 * (random() - 0.5), 1, now() FROM generate_series(0, %s - 1) AS number",
            (UUID(run), metrics, len(metrics), count),
        )
        connection.execute("UPDATE runs SET last_step = %s WHERE id = %s", (count - 1, UUID(run)))
        connection.commit()
        connection.autocommit = True
        connection.execute("ANALYZE observations")


def measure_many_runs(environment: Environment, counts: Sequence[int], seconds: int) -> list[Row]:
    """The cost of an observation and the memory by the number of live runs, for uncached and for cached runs.

    Each process is new and caches all runs, except the last, which has most runs and the default cache. Every run gets
    one request of 20 observations with one eval, then a second one.
    """
    rows: list[Row] = []
    for count, cached in [*((count, max(counts)) for count in counts), (max(counts), None)]:
        memory = {"EVALSTOP_CACHE_MIB": "8192"} if cached else {}
        name = f"{count}-{cached}"
        with run_service(environment.folder / name, environment.key, {**environment.variables, **memory}) as server:
            environment.warm_up(server, f"warm-{name}")
            runs = insert_runs(environment.url, server, count, f"live-{name}")
            before = measure_memory(server.pid)
            post = partial(run_load, [server.address], runs, environment.key, clients=CLIENTS, batch=20)
            uncached = post(requests=count)
            added_bytes = measure_memory(server.pid) - before
            cached_load = post(seconds=seconds, first_step=40)
        rows.append(
            {
                "live runs": f"{count:,}" + ("" if cached else ", default cache"),
                "us/observation, uncached": 1e6 / uncached.per_second,
                "us/observation, cached": 1e6 / cached_load.per_second,
                "p99 ms": cached_load.p99_ms,
                "kB/run": added_bytes / count / 1000,
            }
        )
    return rows


def measure_long_runs(environment: Environment, lengths: Sequence[int], seconds: int, rounds: int) -> list[Row]:
    """Milliseconds to the first verdict on an uncached run, and microseconds per observation afterwards.

    One client posts 100 observations per request.
    """
    rows: list[Row] = []
    for length in lengths:
        folder = environment.folder / f"length-{length}"
        with run_service(folder, environment.key, environment.variables) as server:
            run = insert_runs(environment.url, server, 1, f"long-{length}")[0]
        insert_observations(environment.url, run, length)
        with run_service(folder, environment.key, environment.variables) as server, server.connect() as api:
            environment.warm_up(server, f"after-{length}")
            started = time.perf_counter()
            _post_turning_run(api, run, length, 100)
            first_ms = 1000 * (time.perf_counter() - started)
            post = partial(run_load, [server.address], [run], environment.key, clients=1, batch=100, seconds=seconds)
            loads = [post(first_step=length + 100 + number * STEPS_A_ROUND) for number in range(rounds)]
        rows.append(
            {
                "observations in the run": f"{length:,}",
                "ms to the first verdict, uncached": first_ms,
                "us/observation afterwards": statistics.median(1e6 / load.per_second for load in loads),
            }
        )
    return rows


def measure_recovery(environment: Environment, rounds: int) -> list[Row]:
    """Median milliseconds from kill -9, including the start of the next process.

    The verdict must be that of a run with the same observations on a process that was not interrupted.
    """
    port = find_free_port()
    accepted, cached, rebuilt = [], [], []
    for number in range(rounds):
        folder = environment.folder / f"recovery-{number}"
        with run_service(folder, environment.key, environment.variables, port) as server, server.connect() as api:
            runs = [open_run(api) for _ in range(3)]
            for run in runs:
                for first_step in range(0, RECOVERY_LENGTH, 1000):
                    _post_turning_run(api, run, first_step, 1000)
            expected = _post_turning_run(api, runs[0], RECOVERY_LENGTH, 20)
            os.kill(server.pid, signal.SIGKILL)
            killed_at = time.perf_counter()
            with (
                run_service(folder / "second", environment.key, environment.variables, port) as second,
                second.connect() as api,
            ):
                _post_turning_run(api, runs[0], RECOVERY_LENGTH + 20, 20)
                accepted.append((time.perf_counter() - killed_at) * 1000)
                cached.append(_time_verdict(api, runs[1], expected))
                with psycopg.connect(libpq_url(environment.url)) as connection:
                    connection.execute("DELETE FROM monitor_states")  # it has to be rebuilt from observations
                os.kill(second.pid, signal.SIGKILL)
        with (
            run_service(folder / "third", environment.key, environment.variables, port) as third,
            third.connect() as api,
        ):
            _post_turning_run(api, runs[0], RECOVERY_LENGTH + 40, 20)
            rebuilt.append(_time_verdict(api, runs[2], expected))
    names = {
        "first accepted observation": accepted,
        f"first verdict on a run with {RECOVERY_LENGTH:,} observations": cached,
        "the same after its monitor state was deleted": rebuilt,
    }
    return [{"after kill -9": name, "ms": statistics.median(times_ms)} for name, times_ms in names.items()]


def _time_verdict(api: httpx.Client, run: str, expected: dict[str, Any]) -> float:
    started = time.perf_counter()
    verdict = _post_turning_run(api, run, RECOVERY_LENGTH, 20)
    if verdict != expected:
        raise JobFailed(f"The verdict after a restart is {verdict}; without a restart it is {expected}.")
    return (time.perf_counter() - started) * 1000


def _post_turning_run(api: httpx.Client, run: str, first_step: int, count: int) -> dict[str, Any]:
    """Post observations of a run that turns in its middle; returns the verdict."""
    observations = [
        {"metric": metric, "step": step, "value": 1 - math.exp(-min(step, abs(RECOVERY_LENGTH - step)) / 2000)}
        for step in range(first_step, first_step + count)
        for metric in [METRICS[step % len(METRICS)]]
    ]
    response = api.post(f"/api/v1/runs/{run}/observations", json={"observations": observations}).raise_for_status()
    verdict: dict[str, Any] = response.json()["verdict"]
    return verdict


def measure_reads(environment: Environment, length: int, count: int) -> list[Row]:
    """Milliseconds of the first and of later reads of a long series and of a list of many runs."""
    with (
        run_service(environment.folder / "reading", environment.key, environment.variables) as server,
        server.connect() as api,
    ):
        run = insert_runs(environment.url, server, 1, "long")[0]
        insert_observations(environment.url, run, length, "loss")
        series = f"/api/v1/runs/{run}/series?metric=loss&buckets=1000"
        rows = [_time_read(api, f"series of {length:,} observations in 1,000 buckets", series)]
        insert_runs(environment.url, server, count, "many")
        for name, query in {
            "first page": "",
            "running": "&status=running",
            "by the name of one run": f"&name=many-{count // 2}",
        }.items():
            rows.append(_time_read(api, f"run list, {name}, {count:,} runs", f"/api/v1/runs?limit=50{query}"))
    return rows


def _time_read(api: httpx.Client, name: str, path: str) -> Row:
    times_ms = []
    for _ in range(1 + LATER_READS):
        started = time.perf_counter()
        api.get(path).raise_for_status()
        times_ms.append((time.perf_counter() - started) * 1000)
    first, *later = times_ms
    return {"read": name, "first ms": first, f"p50 of {LATER_READS} more": statistics.median(later), "max": max(later)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-growth", description=__doc__)
    add_database_option(parser)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections (default: all)")
    parser.add_argument(
        "--rounds", type=positive_number, default=5, help="rounds of long runs and of recovery (default: 5)"
    )
    parser.add_argument(
        "--seconds", type=positive_number, default=1, help="duration of a load on cached runs (default: 1)"
    )
    parser.add_argument("--quick", action="store_true", help="use small sizes; the figures are not representative")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parse_with_database(parser, arguments)
    if options.quick:
        options.rounds = 1
    machine, tables = describe_machine(*PACKAGES), {}
    with tempfile.TemporaryDirectory(prefix="evalstop-bench-") as folder:
        for section in options.only:
            with temporary_database(options.database_url, "growth") as url:
                variables = {"EVALSTOP_DATABASE_URL": url}
                (key,) = create_keys(variables)
                environment = Environment(url, key, variables, Path(folder) / section)
                tables[section] = _measure_section(section, environment, options)
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


def _measure_section(section: str, environment: Environment, options: argparse.Namespace) -> list[Row]:
    match section:
        case "live-runs":
            return measure_many_runs(environment, (1000, 2000) if options.quick else RUN_COUNTS, options.seconds)
        case "long-runs":
            lengths = (100, 10_000) if options.quick else RUN_LENGTHS
            return measure_long_runs(environment, lengths, options.seconds, options.rounds)
        case "recovery":
            return measure_recovery(environment, options.rounds)
        case _:
            return measure_reads(environment, *((10_000, 10_000) if options.quick else (10**6, 10**6)))


if __name__ == "__main__":
    sys.exit(main())
