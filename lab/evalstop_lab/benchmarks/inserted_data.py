"""Inserts runs and observations directly into PostgreSQL's tables, because posting them would take too long."""

from __future__ import annotations

from uuid import UUID

import psycopg
from psycopg import sql

from evalstop_lab.benchmarks.databases import libpq_url
from evalstop_lab.benchmarks.ingest.contenders import open_run
from evalstop_lab.benchmarks.ingest.payloads import METRICS
from evalstop_lab.benchmarks.processes import Server


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


def delete_monitor_states(url: str) -> None:
    """Delete all monitor states, so that they have to be rebuilt from observations."""
    with psycopg.connect(libpq_url(url)) as connection:
        connection.execute("DELETE FROM monitor_states")
