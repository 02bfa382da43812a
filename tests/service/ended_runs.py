"""Projects with runs that ended long ago, and queries for what pruning left of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from evalstop_service.domain.run import Call, Verdict
from evalstop_service.domain.statuses import DecisionOutcome
from evalstop_service.store import cases, endpoints, projects, tables
from evalstop_service.store import retention as rows
from evalstop_service.store.cases import Outcome
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.runs import Run

from tests.fixtures.projects import EVERY_EVENT
from tests.service import project_fixture
from tests.service.project_fixture import ProjectFixture

VERDICT = Verdict(Call.STOP, 1, None, "")

NOW = datetime(2026, 6, 1, 12, 0, 0, tzinfo=UTC)


KEEP_DAYS = 30


FEW_ROWS = 7


def set_up_project_with_retention(database: Database, keep_days: int | None = KEEP_DAYS) -> ProjectFixture:
    """Set up a project that keeps its runs for this many days; None: for ever."""
    project = project_fixture.set_up_project(database)
    with database.transaction() as tx:
        tx.execute(tables.projects.update().where(tables.projects.c.id == project.id).values(retention_days=keep_days))
    return project


def load_project_name(project: ProjectFixture) -> str:
    with project.database.reading() as tx:
        return projects.get_project(tx, project.id).name


def add_ended_run(project: ProjectFixture, days_ago: float | None, observation_count: int = 20) -> Run:
    """Add a run with rows in every table that ended this many days ago; None: it is still running."""
    run = project.open_run()
    with project.database.transaction() as tx:
        insert_details(tx, project, run, observation_count)
        if days_ago is not None:
            set_end(tx, run, NOW - timedelta(days=days_ago))
    return run


def set_end(tx: Transaction, run: Run, at: datetime | None) -> None:
    values = {"status": "running" if at is None else "completed", "ended_at": at}
    tx.execute(tables.runs.update().where(tables.runs.c.id == run.id).values(values))


def insert_details(tx: Transaction, project: ProjectFixture, run: Run, observation_count: int) -> None:
    key = {"run_id": run.id}
    for step in range(observation_count):
        for metric in ("eval", "loss"):
            values = {**key, "metric": metric, "step": step, "superseded_by": 0, "value": 0.5, "attempt": 1}
            tx.execute(tables.observations.insert().values(**values, received_at=NOW))
    for step in range(3):
        checkpoint = {**key, "step": step, "superseded_by": 0, "uri": f"file:///{step}", "attempt": 1}
        tx.execute(tables.checkpoints.insert().values(**checkpoint, created_at=NOW))
        verdict = {**key, "sequence": step, "attempt": 1, "verdict": VERDICT, "at": NOW}
        tx.execute(tables.verdicts.insert().values(verdict))
    tx.execute(tables.monitor_states.insert().values(**key, version=1, state="{}"))
    decision = new_id()
    tx.execute(
        tables.decisions.insert().values(
            **key, id=decision, project_id=project.id, attempt=1, state="confirmed", step=1, verdict=VERDICT,
            policy_id=run.policy_id, policy_name=run.policy_name, policy_version=1, run_name=run.name,
            due_at=NOW, created_at=NOW, observed_probability=0.0,
        )
    )  # fmt: skip
    change = {**key, "decision_id": decision, "sequence": 1, "actor": "a", "at": NOW}
    tx.execute(tables.decision_changes.insert().values(**change, state="confirmed", reason="", details={}))
    right = Outcome(outcome=DecisionOutcome.RIGHT, turn_step=None, actor="a", note="", at=NOW)
    cases.add_outcome(tx, run.id, 1, right)


def add_delivery(tx: Transaction, project: ProjectFixture, run: Run, state: str, *, enabled: bool) -> None:
    """Add an event of the run with a delivery in this state, and one attempt, to an endpoint of its own."""
    endpoint = endpoints.add_endpoint(tx, project.id, url="https://example.org", event_types=EVERY_EVENT, now=NOW)
    event, delivery = new_id(), new_id()
    columns = {"run_id": run.id, "created_at": NOW}
    tx.execute(tables.events.insert().values(**columns, id=event, project_id=project.id, type="t", body="{}"))
    tx.execute(
        tables.deliveries.insert().values(
            **columns, id=delivery, event_id=event, endpoint_id=endpoint.id, state=state, attempts=1, due_at=NOW
        )
    )
    attempt = {"run_id": run.id, "delivery_id": delivery, "number": 1, "at": NOW, "duration_ms": 1.0}
    tx.execute(tables.delivery_attempts.insert().values(attempt))
    if not enabled:
        endpoints.update_endpoint(tx, project.id, endpoint.id, enabled=False)


def load_tables(database: Database, run: Run, wanted: tuple[sa.Table, ...]) -> dict[str, list[Any]]:
    """Load a run's rows of these tables."""
    with database.reading() as tx:
        return {
            table.name: [
                tuple(row) for row in tx.execute(
                    sa.select(table)
                    .where((table.c.id if table is tables.runs else table.c.run_id) == run.id)
                    .order_by(*table.primary_key)
                )
            ]
            for table in wanted
        }  # fmt: skip


def has_no_details(database: Database, run: Run) -> bool:
    return not any(load_tables(database, run, rows.REMOVED).values())


def is_marked_pruned(project: ProjectFixture, run: Run) -> bool:
    return project.load_run(run).pruned_at is not None
