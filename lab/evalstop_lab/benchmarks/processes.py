"""Starts the measured processes, servers on free ports of this machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import psycopg
import sqlalchemy as sa

from evalstop_lab.errors import LabError, ServiceUnavailable
from evalstop_lab.service_process import Service, run_server


class JobFailed(LabError):
    """A measurement failed."""


@contextmanager
def run_service(
    folder: Path, key: str, environment: Mapping[str, str], program: Sequence[str] = (sys.executable,)
) -> Iterator[Service]:
    """Run `evalstop serve` on a migrated database within the block, by this Python; its log is in the folder."""
    command = [*program, "-m", "evalstop_service.cli", "serve", "--json", "--port", "0"]
    with run_server(command, folder / "serve.log", environment, key) as service:
        yield service


PROJECT = ("migrate", "admin key create --name bench --scopes admin")
STOPS_AT_ONCE = {"EVALSTOP_HELD_OUT_SHARE": "0", "EVALSTOP_VETO_WINDOW_SECONDS": "0"}
RUN_COMMANDS = """
import sys
from evalstop_service.cli import main

raise SystemExit(next(filter(None, (main([*command.split(), "--json"]) for command in sys.argv[1:])), 0))
"""


def create_keys(
    environment: Mapping[str, str], commands: Sequence[str] = PROJECT, python: str = sys.executable
) -> list[str]:
    """Run commands of `evalstop` that prepare the environment's database; returns the keys that they create."""
    completed = subprocess.run(
        [python, "-c", RUN_COMMANDS, *commands],
        env={**os.environ, **STOPS_AT_ONCE, **environment},
        capture_output=True,
        text=True,
        cwd="/",
    )
    if completed.returncode != 0:
        raise ServiceUnavailable(f"The database was not prepared: {completed.stderr.strip()}")
    documents = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]
    return [document["key"] for document in documents if "key" in document]


def measure_cpu_seconds(pid: int) -> float:
    """The CPU time of a process and its descendants."""
    process = psutil.Process(pid)
    processes = [process, *process.children(recursive=True)]
    return float(sum(sum(item.cpu_times()[:4]) for item in processes))  # [2:4] are of children that have exited


def add_database_option(parser: argparse.ArgumentParser) -> None:
    """Add `--database-url`, which defaults to the environment's `TEST_DATABASE_URL`."""
    parser.add_argument(
        "--database-url",
        default=os.environ.get("TEST_DATABASE_URL"),
        help="a PostgreSQL server whose user may create databases (default: TEST_DATABASE_URL)",
    )


def parse_with_database(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments; a missing `--database-url` is an error."""
    options = parser.parse_args(arguments)
    if not options.database_url:
        parser.error(
            "this benchmark needs PostgreSQL: set TEST_DATABASE_URL, give --database-url, or run `make bench-...`,"
            " which starts a server"
        )
    return options


@contextmanager
def temporary_database(server: str, name: str) -> Iterator[str]:
    """A new database on a server, as a URL; it is dropped at the end of the block."""
    name = f"bench_{name}_{uuid4().hex[:8]}"
    with psycopg.connect(libpq_url(server), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield sa.make_url(server).set(database=name).render_as_string(hide_password=False)
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def libpq_url(url: str) -> str:
    """The URL without SQLAlchemy's driver name, as libpq and asyncpg read it."""
    return sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def describe_machine(*packages: str) -> dict[str, Any]:
    """The Python version, cores, load average, and the versions of these packages, as JSON values."""
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_average": round(os.getloadavg()[0], 1),
        "versions": {name: version(name) for name in packages},
    }


def format_machine(machine: dict[str, Any]) -> str:
    """Format the result of `describe_machine` as one line of text."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"Python {machine['python']}, {machine['cores']} cores, Linux {machine['kernel']},"
        f" load average {machine['load_average']}; {versions}"
    )
