"""A project and runs for tests to ingest into, and what became of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from evalstop_service import ingest, installation, opening
from evalstop_service.ingest import News, Points, Receipt
from evalstop_service.store import decisions, policies, projects, runs, tables
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import Point
from evalstop_service.store.runs import Run

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)

WATCHFUL: dict[str, Any] = {
    "name": "watchful",
    "members": [
        {"detector": "k_decline", "params": {"k": 2}},
        {"detector": "k_decline", "params": {"k": 2, "signal": "proxy"}},
        {"detector": "non_finite", "params": {"signal": "kl"}},
        {"detector": "loss_plateau", "params": {}},
        {"detector": "fixed_progress", "params": {}},
    ],
}
"""A policy that looks at every signal."""


@dataclass(frozen=True)
class Scene:
    """A project in a database."""

    database: Database
    project_id: UUID

    def open(self, name: str | None = None, **terms: Any) -> Run:
        """A new run, or the one of that name."""
        request = opening.Request(name or uuid.uuid4().hex, **terms)
        return opening.open_run(self.database, self.project_id, request, NOW)[0]

    def take(self, run: Run, news: News, now: datetime = NOW) -> Receipt:
        return ingest.take(self.database, self.project_id, run.id, news, now)

    def post(self, run: Run, points: Iterable[Point], now: datetime = NOW) -> Receipt:
        return self.take(run, Points(tuple(points)), now)

    def read(self, run: Run) -> Run:
        with self.database.reading() as tx:
            found = runs.find(tx, self.project_id, run.id)
        assert found is not None
        return found

    def decision(self, run: Run, attempt: int = 1) -> Decision | None:
        with self.database.reading() as tx:
            return decisions.of_attempt(tx, run.id, attempt)

    def forget_state(self, run: Run) -> None:
        """Throw the cached state of the monitor away."""
        with self.database.transaction() as tx:
            tx.execute(tables.runs.update().where(tables.runs.c.id == run.id).values(monitor_state=None))

    def rows(self, table: sa.Table, run: Run) -> list[dict[str, Any]]:
        """A run's rows in a table, in the order of its key."""
        query = sa.select(table).where(table.c.run_id == run.id).order_by(*table.primary_key)
        with self.database.reading() as tx:
            return [dict(row) for row in tx.execute(query).mappings()]

    def events(self, run: Run, event_type: str) -> list[dict[str, Any]]:
        """A run's events of a type."""
        return [row for row in self.rows(tables.events, run) if row["type"] == event_type]


def set_up(database: Database, mode: str = "enforce", grace_seconds: float = 0.0) -> Scene:
    """A new project that also has the policy `watchful`."""
    project = installation.add_project(database, uuid.uuid4().hex, mode, grace_seconds, NOW, "paper")
    with database.transaction() as tx:
        policies.add(tx, projects.get(tx, project.id), "watchful", WATCHFUL, NOW)
    return Scene(database, project.id)


def evals(*values: float, start: int = 0) -> list[Point]:
    """One eval a step."""
    return [Point("eval", step, value) for step, value in enumerate(values, start)]
