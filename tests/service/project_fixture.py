"""A project that tests ingest into, with queries for what ingestion stored."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from evalstop_detectors import MonitorState
from evalstop_service.decisions import commands, veto_windows
from evalstop_service.domain.decision_commands import Released, StopOrdered, Undone, Vetoed
from evalstop_service.domain.decision_events import Reported
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.errors import ServiceError
from evalstop_service.ingest import Content, Message, Observations, Receipt, RunCache, open_run
from evalstop_service.ingest.run_state import RunState
from evalstop_service.store import cases, decisions, endpoints, policies, projects, runs, tables
from evalstop_service.store.cases import Case
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.policies import StoredPolicy
from evalstop_service.store.queue import leases
from evalstop_service.store.runs import Run
from sqlalchemy.dialects import postgresql

from tests.fixtures.projects import EVERY_EVENT, create_project
from tests.service.committers import get_committer, share_cache

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
ONE_HOUR_LATER = NOW + timedelta(hours=1)

ALL_ROLES_POLICY: dict[str, Any] = {
    "name": "watch-all-roles",
    "members": [
        {"detector": "k_decline", "params": {"k": 2}},
        {"detector": "k_decline", "params": {"k": 2, "role": "proxy"}},
        {"detector": "non_finite", "params": {"role": "kl"}},
        {"detector": "k_decline", "id": "loss", "params": {"k": 10, "role": "loss"}},
    ],
}
"""A policy with a detector for each metric role."""


def evals(*values: float, start: int = 0) -> list[PostedObservation]:
    """Build one observation of `eval` per step."""
    return [PostedObservation("eval", step, value) for step, value in enumerate(values, start)]


DECLINING_EVALS = evals(0.5, 0.9, 0.8, 0.7, 0.6)
"""Three declines in a row: the paper's rule stops at step 4 and places the turn at step 1."""


@dataclass(frozen=True)
class ProjectFixture:
    """A project in a database, and the run cache of one service process that ingests for it.

    What is done to it happens at `now`, unless another time is given.
    """

    database: Database
    id: UUID
    cache: RunCache = field(default_factory=RunCache)
    now: datetime = NOW

    def open_run(self, name: str | None = None, now: datetime | None = None, **options: Any) -> Run:
        """Open a new run, or the run of that name."""
        request = open_run.OpenRequest(name or uuid.uuid4().hex, **options)
        return open_run.open_run(self.database, self.id, request, now or self.now)[0]

    def open_declining_run(self, name: str | None = None, **options: Any) -> tuple[Run, Decision]:
        """Open a run whose evals decline until there is a decision."""
        run = self.open_run(name, **options)
        self.post_observations(run, DECLINING_EVALS)
        return run, self.load_decision(run)

    def submit(self, run: Run, content: Content, now: datetime | None = None) -> Receipt:
        """Commit one message by itself; raises the error if it is refused."""
        return submit_message(self.database, self.id, run.id, content, now or self.now, self.cache)

    def submit_all(self, messages: Sequence[Message], now: datetime | None = None) -> list[Receipt | ServiceError]:
        """Submit messages in one turn of the event loop."""
        return get_committer(self.database, self.cache).submit_all(messages, now or self.now)

    def read_counter(self, name: str, **labels: str) -> float:
        """Read a Prometheus counter of this process, which earlier tests may have raised."""
        return get_committer(self.database, self.cache).read_counter(name, **labels)

    def post_observations(
        self, run: Run, observations: Iterable[PostedObservation], now: datetime | None = None
    ) -> Receipt:
        return self.submit(run, Observations(tuple(observations)), now)

    def load_run(self, run: Run) -> Run:
        with self.database.reading() as tx:
            loaded = runs.find_run(tx, self.id, run.id)
        assert loaded is not None
        return loaded

    def find_decision(self, run: Run, attempt: int = 1) -> Decision | None:
        with self.database.reading() as tx:
            return decisions.find_decision_of_attempt(tx, run.id, attempt)

    def load_decision(self, run: Run, attempt: int = 1) -> Decision:
        """Load the decision of an attempt, which must exist."""
        decision = self.find_decision(run, attempt)
        assert decision is not None
        return decision

    def order_stop(self, run: Run, order: StopOrdered) -> Decision:
        """Stop the run on a person's order."""
        with self.database.transaction() as tx:
            return commands.order_run_stop(tx, self.id, run.id, order)

    def apply_command(self, decision: Decision, command: Vetoed | Released | Undone) -> DecisionState:
        """Apply a person's command; return the state of the decision."""
        return commands.apply_command(self.database, self.id, decision.id, command).state

    def record_report(
        self,
        decision: Decision,
        state: DecisionState,
        at: datetime = ONE_HOUR_LATER,
        *,
        expected_seconds: float = 0.0,
        reason: str = "as seen",
    ) -> DecisionState:
        """Record the report of a receiver; return the state of the decision."""
        report = Reported(at, state, "receiver", reason, {"exit_status": -15}, expected_seconds)
        return commands.record_report(self.database, self.id, decision.id, report).state

    def finish_run(self, run: Run, status: str = "completed", now: datetime | None = None, **options: Any) -> Run:
        """End the run, as its trainer does."""
        return commands.finish_run(self.database, self.id, run.id, status, now or self.now, **options)

    def end_windows(self, now: datetime) -> int:
        """Request the stops whose veto windows have ended; returns their number."""
        return veto_windows.request_stops(self.database, now, lambda _: now)

    def claim_stops(self, now: datetime) -> int:
        """Ask for all due deliveries as a worker does, hand their stops over, and claim them; returns their number."""
        for at in (now, now + timedelta(seconds=1)):
            with self.database.transaction() as tx:
                claimed = leases.claim_deliveries(tx, at, 60.0, 10, 10)
            veto_windows.hand_over_stops(self.database, at, partial(_read_time, at))
        return len(claimed)

    def load_decision_states(self, run: Run) -> list[str]:
        """Load the states that the run's decisions went through, in order."""
        return [row["state"] for row in self.load_rows(tables.decision_changes, run)]

    def load_case(self, run: Run, attempt: int = 1) -> Case:
        """Load the case of an attempt, which must exist."""
        with self.database.reading() as tx:
            case = cases.find_case(tx, run.id, attempt)
        assert case is not None
        return case

    def add_policy(self, document: dict[str, Any], now: datetime | None = None) -> StoredPolicy:
        """Add a policy, or the next version of one."""
        with self.database.transaction() as tx:
            project = projects.get_project(tx, self.id)
            return policies.add_policy(tx, project, document["name"], document, now or self.now)

    def add_endpoint(self, event_types: Sequence[str] = EVERY_EVENT, url: str = "http://127.0.0.1:9/") -> Endpoint:
        """Add an endpoint, by default one that nothing listens at."""
        with self.database.transaction() as tx:
            return endpoints.add_endpoint(tx, self.id, url=url, event_types=event_types, now=self.now)

    def change_settings(self, **changes: Any) -> None:
        """Change columns of the project."""
        with self.database.transaction() as tx:
            projects.update_project(tx, replace(projects.lock_project(tx, self.id), **changes))

    def drop_monitor_state(self, run: Run) -> None:
        """Delete the monitor's state from the cache and from the database."""
        self.evict_run(run)
        with self.database.transaction() as tx:
            tx.execute(tables.monitor_states.delete().where(tables.monitor_states.c.run_id == run.id))

    def evict_run(self, run: Run) -> None:
        """Remove the run from this process's cache."""
        self.cache.drop_states([run.id])

    def cached_state(self, run: Run) -> RunState:
        """Return the run's state from the cache, which must hold it."""
        state = self.cache.find_state(run.id)
        assert state is not None
        return state

    def cached_monitor(self, run: Run) -> MonitorState:
        """Return the run's monitor from the cache."""
        return self.cached_state(run).monitor

    def load_rows(self, table: sa.Table, run: Run) -> list[dict[str, Any]]:
        """Load a run's rows of a table, ordered by primary key."""
        query = sa.select(table).where(table.c.run_id == run.id).order_by(*table.primary_key)
        with self.database.reading() as tx:
            return [dict(row) for row in tx.execute(query).mappings()]

    def load_events(self, run: Run, event_type: str) -> list[dict[str, Any]]:
        """Load a run's events of one type."""
        return [row for row in self.load_rows(tables.events, run) if row["type"] == event_type]


def submit_message(
    database: Database, project_id: UUID, run_id: UUID, content: Content, now: datetime, cache: RunCache | None = None
) -> Receipt:
    """Commit one message, by default with the run not in the cache; raises the error if it is refused."""
    if cache is None:
        cache = share_cache(database)
        cache.drop_states([run_id])
    running = get_committer(database, cache)
    (answer,) = running.submit_all([Message(project_id, run_id, content)], now)
    if isinstance(answer, Exception):
        raise answer
    return answer


def insert_observations(
    tx: Transaction, observations: Sequence[tuple[UUID, PostedObservation]], now: datetime = NOW
) -> None:
    """Insert observations directly, without ingestion: no verdicts, no monitor state."""
    rows = [
        {
            "run_id": run_id,
            "metric": observation.metric,
            "step": observation.step,
            "superseded_by": 0,
            "value": observation.value,
            "stderr": observation.stderr,
            "attempt": 1,
            "observed_at": observation.time,
            "received_at": now,
        }
        for run_id, observation in observations
    ]
    if not rows:
        return
    if tx.dialect.name == "sqlite":
        tx.execute(tables.observations.insert(), rows)
        return
    # One array a column: as a statement a row, thousands take a second.
    columns = [tables.observations.c[name] for name in rows[0]]
    arrays = [sa.literal([row[column.name] for row in rows], postgresql.ARRAY(column.type)) for column in columns]
    unnested = sa.select(*map(sa.func.unnest, arrays))
    tx.execute(tables.observations.insert().from_select(columns, unnested))


def set_up_project(database: Database, mode: str = "enforce", veto_window_seconds: float = 0.0) -> ProjectFixture:
    """Create a project that also has the policy `watch-all-roles`."""
    project_id = create_project(database, uuid.uuid4().hex, mode, veto_window_seconds, NOW, "paper").id
    project = ProjectFixture(database, project_id, share_cache(database))
    project.add_policy(ALL_ROLES_POLICY)
    return project


def lift_stop_limits(database: Database) -> None:
    """Remove the guards that limit how many runs a project stops."""
    with database.transaction() as tx:
        tx.execute(tables.projects.update().values(stops_per_hour=None, stops_share=None))


def load_stop_delivery_states(project: ProjectFixture) -> list[str]:
    """The states of the deliveries of all stop requests of a project."""
    query = sa.select(tables.deliveries.c.state).join(tables.events, tables.events.c.id == tables.deliveries.c.event_id)
    query = query.where(tables.events.c.project_id == project.id, tables.events.c.type == "run.stop_requested")
    with project.database.reading() as tx:
        return list(tx.execute(query).scalars())


def _read_time(at: datetime, _tx: Transaction) -> datetime:
    return at
