"""A project and runs for tests to ingest into, and what became of them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from evalstop_detectors import MonitorState
from evalstop_service.errors import ServiceError
from evalstop_service.ingest import Content, Message, Observations, Receipt, RunCache, open_run
from evalstop_service.store import decisions, policies, projects, runs, tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.fixtures.projects import create_project
from tests.service.committers import committer_of

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)

WATCHFUL: dict[str, Any] = {
    "name": "watchful",
    "members": [
        {"detector": "k_decline", "params": {"k": 2}},
        {"detector": "k_decline", "params": {"k": 2, "role": "proxy"}},
        {"detector": "non_finite", "params": {"role": "kl"}},
        {"detector": "loss_plateau", "params": {}},
        {"detector": "fixed_progress", "params": {}},
    ],
}
"""A policy that looks at every role."""


@dataclass(frozen=True)
class Scene:
    """A project in a database, and a process that takes messages for it, with its cache of runs."""

    database: Database
    project_id: UUID
    cache: RunCache = field(default_factory=RunCache)

    def open(self, name: str | None = None, **terms: Any) -> Run:
        """A new run, or the one of that name."""
        request = open_run.OpenRequest(name or uuid.uuid4().hex, **terms)
        return open_run.open_run(self.database, self.project_id, request, NOW)[0]

    def take(self, run: Run, content: Content, now: datetime = NOW) -> Receipt:
        """Take a message of one run, by itself; raises what it is refused with."""
        return take(self.database, self.project_id, run.id, content, now, self.cache)

    def take_all(self, messages: Sequence[Message], now: datetime = NOW) -> list[Receipt | ServiceError]:
        """Take messages of many runs that arrive together."""
        return committer_of(self.database, self.cache).submit_all(messages, now)

    def count(self, name: str, **labels: str) -> float:
        """What the process counted."""
        return committer_of(self.database, self.cache).count(name, **labels)

    def post(self, run: Run, points: Iterable[PostedObservation], now: datetime = NOW) -> Receipt:
        return self.take(run, Observations(tuple(points)), now)

    def read(self, run: Run) -> Run:
        with self.database.reading() as tx:
            found = runs.find_run(tx, self.project_id, run.id)
        assert found is not None
        return found

    def decision(self, run: Run, attempt: int = 1) -> Decision | None:
        with self.database.reading() as tx:
            return decisions.find_decision_of_attempt(tx, run.id, attempt)

    def forget_state(self, run: Run) -> None:
        """Throw away what this process and the database keep of the monitor."""
        self.forget_run(run)
        with self.database.transaction() as tx:
            tx.execute(tables.monitor_states.delete().where(tables.monitor_states.c.run_id == run.id))

    def forget_run(self, run: Run) -> None:
        """Throw away what this process remembers of the run."""
        self.cache.drop_states([run.id])

    def monitor(self, run: Run) -> MonitorState:
        """The run's monitor as this process remembers it."""
        state = self.cache.find_state(run.id)
        assert state is not None
        return state.monitor

    def rows(self, table: sa.Table, run: Run) -> list[dict[str, Any]]:
        """A run's rows in a table, in the order of its key."""
        query = sa.select(table).where(table.c.run_id == run.id).order_by(*table.primary_key)
        with self.database.reading() as tx:
            return [dict(row) for row in tx.execute(query).mappings()]

    def events(self, run: Run, event_type: str) -> list[dict[str, Any]]:
        """A run's events of a type."""
        return [row for row in self.rows(tables.events, run) if row["type"] == event_type]


def take(
    database: Database, project_id: UUID, run_id: UUID, content: Content, now: datetime, cache: RunCache | None = None
) -> Receipt:
    """Take a message of one run, as a process that knows no run unless told which."""
    running = committer_of(database, RunCache() if cache is None else cache)
    (answer,) = running.submit_all([Message(project_id, run_id, content)], now)
    if isinstance(answer, Exception):
        raise answer
    return answer


def add_points(tx: Transaction, points: Sequence[tuple[UUID, PostedObservation]], now: datetime = NOW) -> None:
    """Store new observations of runs, and nothing else of them."""
    rows = [
        {
            "run_id": run_id,
            "metric": point.metric,
            "step": point.step,
            "superseded_by": 0,
            "value": point.value,
            "stderr": point.stderr,
            "attempt": 1,
            "observed_at": point.time,
            "received_at": now,
        }
        for run_id, point in points
    ]
    if rows:
        tx.execute(tables.observations.insert(), rows)


def set_up(database: Database, mode: str = "enforce", veto_window_seconds: float = 0.0) -> Scene:
    """A new project that also has the policy `watchful`."""
    project = create_project(database, uuid.uuid4().hex, mode, veto_window_seconds, NOW, "paper")
    with database.transaction() as tx:
        policies.add_policy(tx, projects.get_project(tx, project.id), "watchful", WATCHFUL, NOW)
    return Scene(database, project.id)


def unbound(database: Database) -> None:
    """Let the projects have as many runs stopped as they like."""
    with database.transaction() as tx:
        tx.execute(tables.projects.update().values(stops_per_hour=None, stops_share=None))


def evals(*values: float, start: int = 0) -> list[PostedObservation]:
    """One eval a step."""
    return [PostedObservation("eval", step, value) for step, value in enumerate(values, start)]


FALLING = evals(0.5, 0.9, 0.8, 0.7, 0.6)
"""Three declines: the paper's rule stops at step 4, the turn was at step 1."""


LATER = NOW + timedelta(hours=1)


def deliveries_of_stops(scene: Scene) -> list[str]:
    """The states of the deliveries of all stop requests of a project."""
    query = sa.select(tables.deliveries.c.state).join(tables.events, tables.events.c.id == tables.deliveries.c.event_id)
    query = query.where(tables.events.c.project_id == scene.project_id, tables.events.c.type == "run.stop_requested")
    with scene.database.reading() as tx:
        return list(tx.execute(query).scalars())


def at_once(*calls: Callable[[], object]) -> list[BaseException]:
    """Run calls in threads that start together; gives what they raised."""
    barrier, failures = threading.Barrier(len(calls)), list[BaseException]()

    def run(call: Callable[[], object]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def waiting_for_a_lock(database: Database) -> int:
    """The PostgreSQL process that waits for a lock in this database, once there is one."""
    query = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with database.reading() as tx:
            pid: int | None = tx.exec_driver_sql(query).scalar()
        if pid is not None:
            return pid
    raise AssertionError("nobody waits for a lock")
