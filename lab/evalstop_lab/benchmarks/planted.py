"""Runs and observations that are put straight into the tables, where posting them would take too long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import httpx
import psycopg
from psycopg import sql

from evalstop_lab.benchmarks.dialects import MIX
from evalstop_lab.benchmarks.ingest_contenders import evalstop_run
from evalstop_lab.benchmarks.servers import Server


@contextmanager
def api(server: Server) -> Iterator[httpx.Client]:
    """A client with the server's key."""
    headers = {"Authorization": f"Bearer {server.key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as client:
        yield client


def runs(conninfo: str, server: Server, count: int, name: str) -> list[str]:
    """So many new runs, copies of one that was opened over HTTP; their names begin with `name`."""
    with api(server) as client, psycopg.connect(conninfo) as connection:
        first = evalstop_run(True)(client)
        columns = _columns(connection, "runs")
        copied = sql.SQL(", ").join(map(sql.Identifier, columns))
        connection.execute(
            sql.SQL(
                "INSERT INTO runs (id, name, {copied}) SELECT gen_random_uuid(), %s || '-' || number, {copied}"
                " FROM runs, generate_series(1, %s) AS number WHERE id = %s"
            ).format(copied=copied),
            (name, count, UUID(first)),
        )
        connection.execute(
            "INSERT INTO attempts (run_id, attempt, started_at)"
            " SELECT id, 1, created_at FROM runs WHERE starts_with(name, %s)",
            (f"{name}-",),
        )
        found = connection.execute("SELECT id::text FROM runs WHERE starts_with(name, %s)", (f"{name}-",)).fetchall()
    return [row[0] for row in found]


def observations(conninfo: str, run: str, count: int, metric: str | None = None) -> None:
    """So many observations of a run that gets better and does not turn: of one metric, or mixed as they are posted."""
    metrics = [metric] if metric else list(MIX)
    with psycopg.connect(conninfo) as connection:
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


def forget_monitors(conninfo: str) -> None:
    """Throw away every state of a monitor that is kept, so that it has to be rebuilt."""
    with psycopg.connect(conninfo) as connection:
        connection.execute("DELETE FROM monitor_states")


def _columns(connection: psycopg.Connection[Any], table: str) -> list[str]:
    query = "SELECT column_name FROM information_schema.columns WHERE table_name = %s AND table_schema = 'public'"
    return [row[0] for row in connection.execute(query, (table,)) if row[0] not in ("id", "name")]
