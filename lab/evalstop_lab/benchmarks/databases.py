"""The PostgreSQL server that a benchmark measures on, given by `--database-url`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import psycopg
import sqlalchemy as sa


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
