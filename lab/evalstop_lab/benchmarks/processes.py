"""Starts the measured service on a free port of this machine, on a database of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
import sqlalchemy as sa

from evalstop_lab.errors import ServiceUnavailable
from evalstop_lab.service_process import Service, run_server


@contextmanager
def run_service(
    folder: Path, key: str, environment: Mapping[str, str], program: Sequence[str] = (sys.executable,)
) -> Iterator[Service]:
    """Run `evalstop serve` on a migrated database within the block, by this Python; its log is in the folder."""
    command = [*program, "-m", "evalstop_service.cli", "serve", "--json", "--port", "0"]
    with run_server(command, folder / "serve.log", environment, key) as service:
        yield service


def create_key(environment: Mapping[str, str], python: str = sys.executable) -> str:
    """Migrate the environment's database and create a key with the scope admin."""
    for command in ("migrate", "admin key create --name bench --scopes admin"):
        completed = subprocess.run(
            [python, "-m", "evalstop_service.cli", *command.split(), "--json"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            cwd="/",
        )
        if completed.returncode != 0:
            raise ServiceUnavailable(f"The database was not prepared: {completed.stderr.strip()}")
    return str(json.loads(completed.stdout)["key"])


def parse_with_database(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, with the server in `--database-url` or `TEST_DATABASE_URL`; without one it is an error."""
    parser.add_argument(
        "--database-url",
        default=os.environ.get("TEST_DATABASE_URL"),
        help="a PostgreSQL server whose user may create databases (default: TEST_DATABASE_URL)",
    )
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
    """The URL without SQLAlchemy's driver name, as libpq reads it."""
    return sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
