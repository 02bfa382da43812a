"""Runs: what is known of each, and where its monitor stands."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.store.database import Transaction, driver, insert_if_new, like
from evalstop_service.store.tables import attempts, decision_changes, moment_text, outcomes, policies, pulses, runs


class Run(msgspec.Struct, frozen=True):
    """A row of runs, with the name of its policy.

    `verdict`, `best_checkpoint`, `raw_maximum` and `turn` are JSON values as they are answered; `turn` is None while
    the run goes on. `recognition`: how the roles in `metrics` were found; None when the trainer said them, see
    `evalstop_service.recognition`. `monitor_state` is opaque, and None when it was not asked for or has to be rebuilt.
    `pruned_at`: since then its details are gone, or on their way, and nothing can be added to it.
    """

    id: UUID
    project_id: UUID
    name: str
    status: str
    attempt: int
    metrics: dict[str, dict[str, str]]
    labels: dict[str, str]
    policy_id: UUID
    policy_name: str
    policy_version: int
    mode: str
    total_steps: int | None
    last_step: int | None
    version: int
    verdict: dict[str, Any]
    best_checkpoint: dict[str, Any] | None
    raw_maximum: dict[str, Any] | None
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    monitor_state: str | None = None
    turn: dict[str, Any] | None = None
    rewritten_version: int = 0
    recognition: dict[str, Any] | None = None
    pruned_at: datetime | None = None


@dataclass(frozen=True)
class Attempt:
    """How an attempt of a run began: from a step of an earlier one, or, None, anew."""

    resumed_from_step: int | None
    started_at: datetime


Stamp = tuple[int, datetime]
"""A run's `version` and `updated_at`: another stamp, another row."""


def add(tx: Transaction, run: Run) -> bool:
    """Store a new run and its first attempt; False if the project has a run of that name."""
    if not insert_if_new(tx, runs, _columns_of(run), ["project_id", "name"]):
        return False
    tx.execute(attempts.insert().values(run_id=run.id, attempt=run.attempt, started_at=run.created_at))
    return True


def save(tx: Transaction, run: Run) -> None:
    """Store a run that was locked in this transaction."""
    tx.execute(runs.update().where(runs.c.id == run.id).values(**_columns_of(run)))


def cast(
    tx: Transaction, run_id: UUID, metrics: Mapping[str, Mapping[str, str]], recognition: Mapping[str, Any]
) -> None:
    """Store which metrics of a run that is locked play which role, and how that was found."""
    tx.execute(runs.update().where(runs.c.id == run_id).values(metrics=metrics, recognition=recognition))


def add_attempt(tx: Transaction, run_id: UUID, attempt: int, resumed_from_step: int, now: datetime) -> None:
    """Record that an attempt began at a step of an earlier one."""
    tx.execute(
        attempts.insert().values(run_id=run_id, attempt=attempt, resumed_from_step=resumed_from_step, started_at=now)
    )


def attempt_of(tx: Transaction, run_id: UUID, attempt: int) -> Attempt:
    """How this attempt of a run, which there is, began."""
    query = sa.select(attempts.c.resumed_from_step, attempts.c.started_at)
    return Attempt(*tx.execute(query.where(attempts.c.run_id == run_id, attempts.c.attempt == attempt)).one())


def resumed_from(tx: Transaction, run: Run) -> int | None:
    """The step from which the present attempt was resumed; None for the first."""
    return attempt_of(tx, run.id, run.attempt).resumed_from_step


def attempts_began(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, datetime]:
    """When the present attempt of each of these runs began."""
    query = sa.select(runs.c.id, attempts.c.started_at).join(
        attempts, (attempts.c.run_id == runs.c.id) & (attempts.c.attempt == runs.c.attempt)
    )
    return {row.id: row.started_at for row in tx.execute(query.where(runs.c.id.in_(run_ids)))}


def find(tx: Transaction, project_id: UUID, run_id: UUID) -> Run | None:
    """The project's run with this id."""
    return _one(tx, _SELECT.where(runs.c.project_id == project_id, runs.c.id == run_id))


def find_by_name(tx: Transaction, project_id: UUID, name: str) -> Run | None:
    """The project's run with this name."""
    return _one(tx, _SELECT.where(runs.c.project_id == project_id, runs.c.name == name))


def lock(tx: Transaction, project_id: UUID, run_id: UUID) -> Run | None:
    """The run with its monitor's state, locked until the transaction ends."""
    # Locked alone and read afterwards: in a join PostgreSQL finds no row when it had to wait for the lock and the run
    # came out of the wait with another policy.
    wanted = (runs.c.project_id == project_id, runs.c.id == run_id)
    tx.execute(sa.select(runs.c.id).where(*wanted).with_for_update())
    return _one(tx, _SELECT.add_columns(runs.c.monitor_state).where(*wanted))


def lock_many(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, Stamp]:
    """The stamps of those of these runs that exist, locked until the transaction ends, the lowest id first."""
    if tx.dialect.name == "postgresql":
        # The rows are sorted before they are locked; whoever locks many does it in this order, so that no two can
        # wait for each other.
        cursor = driver(tx).cursor(binary=True)
        cursor.execute(_LOCK_MANY, (list(run_ids),), prepare=True)
        return {run_id: (version, updated_at) for run_id, version, updated_at in cursor}
    query = sa.select(runs.c.id, runs.c.version, runs.c.updated_at).where(runs.c.id.in_(run_ids))
    return {run_id: (version, updated_at) for run_id, version, updated_at in tx.execute(query)}


def load_many(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, Run]:
    """Those of these runs that exist, with what release 0.1.0 left of their monitors."""
    if tx.dialect.name == "postgresql":
        rows = driver(tx).cursor(binary=True).execute(_LOAD_MANY, (list(run_ids),), prepare=True)
        found = (Run(**dict(zip(_LOADED, row, strict=True))) for row in rows)
        return {run.id: run for run in found}
    query = _SELECT.add_columns(runs.c.monitor_state).where(runs.c.id.in_(run_ids))
    return {row["id"]: Run(**row) for row in tx.execute(query).mappings()}


def save_many(tx: Transaction, changed: Sequence[Run]) -> None:
    """Store what ingestion changes of runs that are locked: all but names, terms, `created_at` and kept monitors."""
    if not changed:
        return
    if tx.dialect.name == "postgresql":
        driver(tx).execute(_SAVE_MANY, (msgspec.json.encode([moving(run) for run in changed]).decode(),), prepare=True)
        return
    tx.exec_driver_sql(_SAVE, [(*(_embedded(getattr(run, name)) for name in _MOVING), run.id.hex) for run in changed])


def moving(run: Run) -> dict[str, Any]:
    """What ingestion changes of a run, as the database reads it from JSON: see `MOVE`."""
    return {name: getattr(run, name) for name in ("id", *_MOVING)}


def listing(
    tx: Transaction,
    project_id: UUID,
    *,
    name: str | None = None,
    status: str | None = None,
    before: UUID | None = None,
    limit: int = 50,
) -> list[Run]:
    """A project's runs, newest first: those whose name contains `name`, made before the run `before`.

    One or two letters are looked for in the newest 20,000 runs from there on.
    """
    # The page first, from an index that is in its order: joined before, a planner without statistics sorts all runs.
    page = _page(sa.select(*_OWN), project_id, name, status, before, limit).subquery()
    query = sa.select(page, *_OF_POLICY).join(policies, policies.c.id == page.c.policy_id)
    return [Run(**row) for row in tx.execute(query.order_by(page.c.id.desc())).mappings()]


def count_running(tx: Transaction, project_id: UUID, most: int) -> int:
    """How many runs of a project have not ended, counted up to `most`."""
    query = sa.select(runs.c.id).where(runs.c.project_id == project_id, runs.c.status == "running").limit(most)
    return tx.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one()


def revision(tx: Transaction, project_id: UUID, run_id: UUID) -> str:
    """Differs whenever the run, its pulse, or anything on record about its decisions, has changed."""
    return _digest(tx, _REVISION.where(runs.c.project_id == project_id, runs.c.id == run_id))


def listing_revision(
    tx: Transaction,
    project_id: UUID,
    *,
    name: str | None = None,
    status: str | None = None,
    before: UUID | None = None,
    limit: int = 50,
) -> str:
    """Differs whenever `listing` of the same arguments would, or the decisions on those runs."""
    return _digest(tx, _page(_REVISION, project_id, name, status, before, limit))


_OWN = [column for column in runs.c if column.name != "monitor_state"]
_OF_POLICY = (policies.c.name.label("policy_name"), policies.c.version.label("policy_version"))

_SELECT = sa.select(*_OWN, *_OF_POLICY).join(policies, policies.c.id == runs.c.policy_id)

_TRIGRAM = 3
_SEARCHED = 20_000

_MOVING = (
    *("version", "rewritten_version", "status", "attempt", "last_step"),
    *("verdict", "best_checkpoint", "raw_maximum", "turn", "updated_at", "ended_at"),
)

_SAVE = f"UPDATE runs SET monitor_state = NULL, {', '.join(f'{name} = ?' for name in _MOVING)} WHERE id = ?"  # noqa: S608

_LOCK_MANY = "SELECT id, version, updated_at FROM runs WHERE id = ANY(%b) ORDER BY id FOR UPDATE"

_LOADED = (*(column.name for column in runs.c), "policy_name", "policy_version")

_LOAD_MANY = f"""
SELECT {", ".join(f"runs.{column.name}" for column in runs.c)}, policies.name, policies.version
FROM runs JOIN policies ON policies.id = runs.policy_id WHERE runs.id = ANY(%b)
"""  # noqa: S608

MOVING_TYPES = """
    id uuid, version integer, rewritten_version integer, status text, attempt integer, last_step bigint, verdict json,
    best_checkpoint json, raw_maximum json, turn json, updated_at timestamptz, ended_at timestamptz
"""

MOVE = f"UPDATE runs SET monitor_state = NULL, {', '.join(f'{name} = new.{name}' for name in _MOVING)}"  # noqa: S608
"""On PostgreSQL, `FROM` something called `new`: rows of `MOVING_TYPES`."""

# JSON is what the driver hands over fastest, and most of a row is JSON anyway.
_SAVE_MANY = f"{MOVE} FROM json_to_recordset(%t::json) AS new ({MOVING_TYPES}) WHERE runs.id = new.id"

_REVISION = sa.select(
    runs.c.id,
    runs.c.version,
    runs.c.updated_at,
    runs.c.status,
    *(
        sa.select(sa.func.count()).where(table.c.run_id == runs.c.id).scalar_subquery()
        for table in (decision_changes, outcomes)
    ),
    *(
        sa.select(column).where(pulses.c.run_id == runs.c.id).scalar_subquery()
        for column in (pulses.c.state, sa.cast(pulses.c.dead, sa.Text))
    ),
)


def _page(
    query: sa.Select[Any], project_id: UUID, name: str | None, status: str | None, before: UUID | None, limit: int
) -> sa.Select[Any]:
    query = query.where(runs.c.project_id == project_id)
    if name is not None:
        query = query.where(like(runs.c.name, name))
    if name is not None and len(name) < _TRIGRAM:  # no index finds so little, and all runs are too many to read
        newest = sa.select(runs.c.id).where(runs.c.project_id == project_id)
        if before is not None:
            newest = newest.where(runs.c.id < before)
        oldest = newest.order_by(runs.c.id.desc()).offset(_SEARCHED - 1).limit(1).scalar_subquery()
        query = query.where(runs.c.id >= sa.func.coalesce(oldest, sa.literal(UUID(int=0), sa.Uuid)))
    if status is not None:
        query = query.where(runs.c.status == status)
    if before is not None:
        query = query.where(runs.c.id < before)
    return query.order_by(runs.c.id.desc()).limit(limit)


def _embedded(value: Any) -> Any:
    """A value as the embedded database holds it."""
    match value:
        case dict():
            return msgspec.json.encode(value).decode()
        case datetime():
            return moment_text(value)
    return value


def _digest(tx: Transaction, query: sa.Select[Any]) -> str:
    return hashlib.sha256(repr([tuple(row) for row in tx.execute(query)]).encode()).hexdigest()[:16]


def _one(tx: Transaction, query: sa.Select[Any]) -> Run | None:
    row = tx.execute(query).mappings().one_or_none()
    return Run(**row) if row else None


def _columns_of(run: Run) -> dict[str, Any]:
    return {column.name: getattr(run, column.name) for column in runs.c}
