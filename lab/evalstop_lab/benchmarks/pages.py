"""`make bench-pages`: the response time of each page with 100,000 ended and 40,000 running runs, and 10,000 decisions.

The data are the example runs of `evalstop demo-data` and copies of them. Copies of ended runs are older, and have rows
of runs, attempts, cases, calls and outcomes, the first copies also decisions with their histories, but no observations.
Of copies that run the first 1,000 have observations. One client requests all pages in turns over HTTP, including the
login form, which needs no database query and is the baseline.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psycopg
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.benchmarks.processes import (
    create_key,
    libpq_url,
    parse_with_database,
    run_service,
    temporary_database,
)
from evalstop_lab.report import new_table
from evalstop_lab.service_process import Service

BARE = "/login"
LIMIT_MS = 100.0
WARM_UP_TURNS = 3
MINUTES_APART = 10
RUNNING, WITH_OBSERVATIONS = 40_000, 1_000

# The time in a copy's UUIDv7 is shifted like its other times, so that lists are in the right order.
_MOVED = """
CREATE FUNCTION pg_temp.moved(id uuid, copy integer) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
    SELECT (lpad(to_hex(('x0000' || substr(hex, 1, 12))::bit(64)::bigint - copy * 600000::bigint), 12, '0')
        || substr(hex, 13, 12) || lpad(to_hex(copy), 8, '0'))::uuid
    FROM (SELECT replace(id::text, '-', '') AS hex) AS written
$$
"""

_COPIED = ("attempts", "cases", "case_calls", "outcomes")
_OF_DECISIONS = ("decisions", "decision_changes")
_IDS = ("run_id", "decision_id")
_NEVER_FLAGGED = {
    "cases": (
        *("decision_id", "treatment", "observed_probability", "decided_step", "detectors", "stated_risk"),
        *("delay_steps", "gpu_hours_saved", "gpu_hours_lost", "parked_seconds"),
    ),
    "case_calls": ("treatment", "observed_probability"),
}
"""The columns that are null without a decision."""

_OUTCOME_LEFT_ALONE = "CASE t.run_outcome WHEN 'turned' THEN 'wrong' WHEN 'healthy' THEN 'right' ELSE 'unknown' END"

_TIMES = ("created_at", "updated_at", "ended_at", "started_at", "at", "due_at")


def main() -> int:
    """Run the benchmark and print its table; returns 1 if a page is slower than `LIMIT_MS`."""
    parser = argparse.ArgumentParser(prog="make bench-pages", description=__doc__)
    parser.add_argument("--runs", type=positive_number, default=100_000, help="number of runs (default: 100000)")
    parser.add_argument(
        "--decisions", type=positive_number, default=10_000, help="number of decisions (default: 10000)"
    )
    parser.add_argument("--times", type=positive_number, default=40, help="requests per page (default: 40)")
    options = parse_with_database(parser)
    with (
        tempfile.TemporaryDirectory(prefix="evalstop-bench-") as folder,
        temporary_database(options.database_url, "pages") as url,
    ):
        environment = {"EVALSTOP_DATABASE_URL": url}
        key = create_key(environment)
        command = [sys.executable, "-m", "evalstop_service.cli", "demo-data", "--json", "--database-url", url]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        runs, decisions = copy_runs(libpq_url(url), options.runs, options.decisions)
        with run_service(Path(folder), key, environment) as service:
            times_ms = measure_pages(service, options.times)
    table = new_table(f"pages with {runs:,} runs and {decisions:,} decisions, milliseconds", "page", "median", "p90")
    for path, taken in times_ms.items():
        short = re.sub(r"(&run=[0-9a-f-]{36})+", "&…", re.sub(r"[0-9a-f-]{36}", "{id}", path, count=1))
        table.add_row(short, f"{statistics.median(taken):.1f}", f"{statistics.quantiles(taken, n=10)[-1]:.1f}")
    Console(width=120).print(table)
    return 0 if all(statistics.median(taken) < LIMIT_MS for taken in times_ms.values()) else 1


def copy_runs(url: str, runs: int, decisions: int) -> tuple[int, int]:
    """Copy the runs of a database until it has about this many runs and decisions; returns the actual numbers."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_MOVED)
        ended = _count_rows(connection, "runs WHERE ended_at IS NOT NULL")
        decided = _count_rows(connection, "decisions JOIN runs ON runs.id = run_id WHERE ended_at IS NOT NULL")
        copies = max(0, round((runs - _count_rows(connection, "runs")) / ended))
        of_decisions = max(0, round((decisions - _count_rows(connection, "decisions")) / decided))
        _copy_ended(connection, "runs", "id", copies)
        for table in _COPIED:
            _copy_ended(connection, table, "run_id", copies, of_decisions)
        for table in _OF_DECISIONS:
            _copy_ended(connection, table, "run_id", of_decisions)
        running = _count_rows(connection, "runs WHERE ended_at IS NULL")
        for table in ("runs", "attempts", "run_health", "running_runs", "observations"):
            copies = round((WITH_OBSERVATIONS if table == "observations" else RUNNING) / running) - 1
            _copy_running(connection, table, "id" if table == "runs" else "run_id", copies)
        connection.execute("VACUUM ANALYZE")
        return _count_rows(connection, "runs"), _count_rows(connection, "decisions")


def measure_pages(service: Service, times: int) -> dict[str, list[float]]:
    """Request each page `times` times, all of them in turns; returns the milliseconds by path."""
    with httpx.Client(base_url=service.url, follow_redirects=True, timeout=60) as browser:
        paths = [BARE, *_list_paths(browser, service.key)]
        times_ms: dict[str, list[float]] = {path: [] for path in paths}
        for turn in range(times + WARM_UP_TURNS):
            for path in paths:
                started = time.perf_counter()
                browser.get(path).raise_for_status()
                if turn >= WARM_UP_TURNS:
                    times_ms[path].append((time.perf_counter() - started) * 1000)
    return times_ms


def _list_paths(browser: httpx.Client, key: str) -> list[str]:
    """Sign in; returns the paths of all pages, including those of a run and of a policy."""
    token = re.search(r'name="csrf" value="([^"]+)"', browser.get(BARE).text)
    assert token is not None, "the login form has a token"
    browser.post(BARE, data={"key": key, "csrf": token[1]}).raise_for_status()
    headers = {"Authorization": f"Bearer {key}"}
    decision = browser.get("/api/v1/decisions", params={"state": "confirmed", "limit": 1}, headers=headers).json()
    run = f"/runs/{decision['items'][0]['run_id']}"
    newest = browser.get("/api/v1/runs", params={"limit": 10}, headers=headers).json()["items"]
    compared = "&".join(f"run={item['id']}" for item in newest)
    for item in newest:
        browser.patch(f"/api/v1/runs/{item['id']}", json={"group": "newest"}, headers=headers).raise_for_status()
    return [
        *("/", "/runs", "/runs?name=sawtooth", "/runs?status=stopped", "/runs/fleet", run, "/precision"),
        *(f"/runs/compare?{compared}", f"/runs/compare/series.json?{compared}"),
        *("/groups/newest", "/group/series.json?group=newest"),
        *("/precision/figures.json", "/cases"),
        *("/policies", "/policies/default", "/webhooks", "/settings"),
    ]


def _copy_ended(connection: psycopg.Connection, table: str, key: str, copies: int, of_decisions: int = 0) -> None:
    values = _build_values(connection, table)
    for name in values:
        if name in _TIMES:
            values[name] += f" - copy * interval '{MINUTES_APART} minutes'"
        if name in _NEVER_FLAGGED.get(table, ()):
            values[name] = f"CASE WHEN copy <= {of_decisions} THEN {values[name]} END"
    if table == "cases":
        values["outcome"] = f"CASE WHEN copy <= {of_decisions} THEN t.outcome ELSE {_OUTCOME_LEFT_ALONE} END"
    _insert_copies(connection, table, values, f"original.id = t.{key} AND original.ended_at IS NOT NULL", copies)


def _copy_running(connection: psycopg.Connection, table: str, key: str, copies: int) -> None:
    """Copy running runs without changing their times, because older ones would be stale."""
    values = _build_values(connection, table)
    _insert_copies(connection, table, values, f"original.id = t.{key} AND original.ended_at IS NULL", copies)


def _build_values(connection: psycopg.Connection, table: str) -> dict[str, str]:
    """The SQL expressions of a copy's columns: new ids, a new name and job, and otherwise the original's values."""
    rows = connection.execute("SELECT column_name FROM information_schema.columns WHERE table_name = %s", (table,))
    values = {name: f't."{name}"' for (name,) in rows}  # a column is named group
    for name in values.keys() & {*_IDS, "id"}:
        values[name] = f"pg_temp.moved(t.{name}, copy)"
    for name in values.keys() & {"name", "job_key"}:
        values[name] = f"t.{name} || '-' || copy"
    return values


def _insert_copies(
    connection: psycopg.Connection, table: str, values: dict[str, str], of_original: str, copies: int
) -> None:
    columns = ", ".join(f'"{name}"' for name in values)
    connection.execute(
        f"INSERT INTO {table} ({columns}) SELECT {', '.join(values.values())} FROM {table} AS t "  # noqa: S608
        f"JOIN runs AS original ON {of_original} CROSS JOIN generate_series(1, {copies}) AS copy"
    )


def _count_rows(connection: psycopg.Connection, table: str) -> int:
    row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608
    assert row is not None
    return int(row[0])


if __name__ == "__main__":
    sys.exit(main())
