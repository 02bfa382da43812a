"""Runs: what is known of each, and where its monitor stands."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.rules.decision_lifecycle import Mode
from evalstop_service.rules.eval_changes import EvalChange, find_version
from evalstop_service.rules.role_recognition import Recognition
from evalstop_service.rules.run_results import BestCheckpoint, Call, ChangePoint, RawMaximum, Verdict
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.store.database import Transaction, contains_text, insert_if_new
from evalstop_service.store.tables import (
    LIVE,
    attempts,
    checkpoints,
    decision_changes,
    decisions,
    outcomes,
    policies,
    run_health,
    runs,
)


class Run(msgspec.Struct, frozen=True):
    """A row of runs, with the name of its policy.

    `turn` is None while the run goes on. `recognition`: how the roles in `metrics` were found; None when the trainer
    said them, see `runs.metric_roles`. `pruned_at`: since then its details are gone, or on their way, and nothing can
    be added to it. `opened_as`: the name that its trainer asked for, where that was taken. `job`: where its trainer
    says that it runs. `opening`: the id of the request that opened it. `opened_by`: the key that did.
    `eval_share`: of its time, what one eval takes, 0 if nobody knows; None: nobody evaluates checkpoints on request.
    """

    id: UUID
    project_id: UUID
    name: str
    status: RunStatus
    attempt: int
    metrics: dict[str, dict[str, str]]
    labels: dict[str, str]
    policy_id: UUID
    policy_name: str
    policy_version: int
    mode: Mode
    total_steps: int | None
    last_step: int | None
    version: int
    verdict: Verdict
    best_checkpoint: BestCheckpoint | None
    raw_maximum: RawMaximum | None
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    turn: ChangePoint | None = None
    rewritten_version: int = 0
    recognition: Recognition | None = None
    pruned_at: datetime | None = None
    opened_as: str | None = None
    job: str | None = None
    opening: UUID | None = None
    opened_by: UUID | None = None
    eval_share: float | None = None
    eval_changes: tuple[EvalChange, ...] = ()

    @property
    def best_is_outdated(self) -> bool:
        """Whether the best checkpoint was measured before the eval changed: none has been measured since."""
        if self.best_checkpoint is None or self.last_step is None:
            return False
        newest = find_version(self.eval_changes, self.last_step)
        return find_version(self.eval_changes, self.best_checkpoint.step) != newest

    @property
    def length_known(self) -> bool:
        """Whether the planned length was told, and is not overrun: then decisions come sooner."""
        return self.total_steps is not None and (self.last_step or 0) <= self.total_steps


class RunChanges(TypedDict, total=False):
    """What of a run takes other values, when observations or a checkpoint came in or it goes on."""

    status: RunStatus
    attempt: int
    last_step: int | None
    verdict: Verdict
    best_checkpoint: BestCheckpoint | None
    raw_maximum: RawMaximum | None
    turn: ChangePoint | None
    rewritten_version: int
    ended_at: datetime | None


FOUND_AGAIN: RunChanges = {"status": RunStatus.RUNNING, "ended_at": None, "turn": None}
"""What changes when a lost run reports again."""


@dataclass(frozen=True)
class Attempt:
    """How an attempt of a run began: from a step of an earlier one, or, None, anew."""

    resumed_from_step: int | None
    started_at: datetime


def add_run(tx: Transaction, run: Run) -> bool:
    """Store a new run and its first attempt; False if the project has a run of that name."""
    if not insert_if_new(tx, runs, _columns_of(run), ["project_id", "name"]):
        return False
    tx.execute(attempts.insert().values(run_id=run.id, attempt=run.attempt, started_at=run.created_at))
    return True


def save_run(tx: Transaction, run: Run) -> None:
    """Store a run that was locked in this transaction."""
    tx.execute(runs.update().where(runs.c.id == run.id).values(**_columns_of(run)))


def add_attempt(tx: Transaction, run_id: UUID, attempt: int, resumed_from_step: int, now: datetime) -> None:
    """Record that an attempt began at a step of an earlier one."""
    tx.execute(
        attempts.insert().values(run_id=run_id, attempt=attempt, resumed_from_step=resumed_from_step, started_at=now)
    )


def get_attempt(tx: Transaction, run_id: UUID, attempt: int) -> Attempt:
    """How this attempt of a run, which there is, began."""
    query = sa.select(attempts.c.resumed_from_step, attempts.c.started_at)
    return Attempt(*tx.execute(query.where(attempts.c.run_id == run_id, attempts.c.attempt == attempt)).one())


def get_resumed_step(tx: Transaction, run: Run) -> int | None:
    """The step from which the present attempt was resumed; None for the first."""
    return get_attempt(tx, run.id, run.attempt).resumed_from_step


def load_attempt_starts(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, datetime]:
    """When the present attempt of each of these runs began."""
    query = sa.select(runs.c.id, attempts.c.started_at).join(
        attempts, (attempts.c.run_id == runs.c.id) & (attempts.c.attempt == runs.c.attempt)
    )
    return {row.id: row.started_at for row in tx.execute(query.where(runs.c.id.in_(run_ids)))}


def find_run(tx: Transaction, project_id: UUID, run_id: UUID) -> Run | None:
    """The project's run with this id."""
    return _one(tx, _SELECT.where(runs.c.project_id == project_id, runs.c.id == run_id))


def find_run_by_name(tx: Transaction, project_id: UUID, name: str) -> Run | None:
    """The project's run with this name."""
    return _one(tx, _SELECT.where(runs.c.project_id == project_id, runs.c.name == name))


def find_run_by_opening(tx: Transaction, project_id: UUID, opening: UUID) -> Run | None:
    """The project's run that was opened by the request with this id."""
    return _one(tx, _SELECT.where(runs.c.project_id == project_id, runs.c.opening == opening))


def find_opened_run(tx: Transaction, project_id: UUID, name: str, job: str | None, *, ended: bool) -> Run | None:
    """The run that was opened by this name, whatever name it got: the newest of this job, else the newest of any.

    Unless `ended`, only runs that have not ended count, and of other jobs only where `job` is None.
    """
    query = _SELECT.where(runs.c.project_id == project_id, (runs.c.name == name) | (runs.c.opened_as == name))
    if not ended:
        query = query.where(runs.c.status == RunStatus.RUNNING)
        if job is not None:
            query = query.where(runs.c.job == job)
    return _one(tx, query.order_by(runs.c.job.is_not_distinct_from(job).desc(), runs.c.id.desc()).limit(1))


def lock_run(tx: Transaction, project_id: UUID, run_id: UUID) -> Run | None:
    """The run, locked until the transaction ends."""
    # Locked alone and read afterwards: in a join PostgreSQL finds no row when it had to wait for the lock and the run
    # came out of the wait with another policy.
    wanted = (runs.c.project_id == project_id, runs.c.id == run_id)
    tx.execute(sa.select(runs.c.id).where(*wanted).with_for_update())
    return _one(tx, _SELECT.where(*wanted))


def lock_runs(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, int]:
    """The versions of those of these runs that exist, locked until the transaction ends, the lowest id first."""
    # Whoever locks many does it in this order, so that no two can wait for each other.
    query = sa.select(runs.c.id, runs.c.version).where(runs.c.id.in_(run_ids)).order_by(runs.c.id)
    return {row.id: row.version for row in tx.execute(query.with_for_update())}


def load_versions(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, int]:
    """The versions of those of these runs that exist."""
    query = sa.select(runs.c.id, runs.c.version).where(runs.c.id.in_(run_ids))
    return {row.id: row.version for row in tx.execute(query)}


def load_runs(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, Run]:
    """Those of these runs that exist."""
    return {row["id"]: Run(**row) for row in tx.execute(_SELECT.where(runs.c.id.in_(run_ids))).mappings()}


class RunWithCounts(NamedTuple):
    """A run, whether its present attempt has a decision, and how many live checkpoints it has."""

    run: Run
    has_decision: bool
    checkpoints: int


def load_runs_with_counts(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, RunWithCounts]:
    """Those of these runs that exist, with what tells whether more has to be read of them."""
    rows = tx.execute(_SELECT_WITH_COUNTS.where(runs.c.id.in_(run_ids))).mappings()
    return {row["id"]: _with_counts(**row) for row in rows}


def _with_counts(*, has_decision: bool, checkpoint_count: int, **columns: Any) -> RunWithCounts:
    return RunWithCounts(Run(**columns), has_decision, checkpoint_count)


def save_changes(tx: Transaction, before: Run, run: Run) -> None:
    """Store all in which a run differs from what it was, in a transaction that has saved it already."""
    names = [name for name in _INGESTED if getattr(run, name) != getattr(before, name)]
    if names:
        tx.execute(runs.update().where(runs.c.id == run.id).values({name: getattr(run, name) for name in names}))


@dataclass(frozen=True)
class RunFilter:
    """Which runs of a project: those whose name contains `name`, of this status, and so on; None: any.

    `order`: `newest`, `updated` or `step`, the highest first. `before`: those that come after this run, as it stood
    when its `place` in the order (its `updated_at` or `last_step`) was told; with `newest` the id is enough.
    """

    name: str | None = None
    status: RunStatus | None = None
    verdict: Call | None = None
    mode: Mode | None = None
    policy: str | None = None
    job_kind: str | None = None
    order: str = "newest"
    before: UUID | None = None
    place: datetime | int | None = None

    @property
    def bounded(self) -> bool:
        """Whether no index finds them, so that only the newest runs are looked at.

        What changes with every post has no index: each post would have to write to it.
        """
        rare = self.name is not None and len(self.name) < _TRIGRAM
        return rare or self.order != "newest" or any((self.verdict, self.mode, self.policy, self.job_kind))


def list_runs(
    tx: Transaction,
    project_id: UUID,
    wanted: RunFilter = RunFilter(),
    limit: int = 50,
) -> list[Run]:
    """A project's runs, newest first, or as they are wanted.

    What no index finds is looked for in the newest 20,000 runs: see `RunFilter.bounded`.
    """
    # The page first, from an index that is in its order: joined before, a planner without statistics sorts all runs.
    page = _page(sa.select(*runs.c), project_id, wanted, limit).subquery()
    query = sa.select(page, *_OF_POLICY).join(policies, policies.c.id == page.c.policy_id)
    return [Run(**row) for row in tx.execute(query.order_by(*_ordered(page.c, wanted.order))).mappings()]


def count_running_runs(tx: Transaction, project_id: UUID, most: int) -> int:
    """How many runs of a project have not ended, counted up to `most`."""
    query = sa.select(runs.c.id).where(runs.c.project_id == project_id, runs.c.status == RunStatus.RUNNING).limit(most)
    return tx.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one()


def read_run_revision(tx: Transaction, project_id: UUID, run_id: UUID) -> str:
    """Differs whenever the run, its pulse, or anything on record about its decisions, has changed."""
    return _digest(tx, _REVISION.where(runs.c.project_id == project_id, runs.c.id == run_id))


def read_list_revision(
    tx: Transaction,
    project_id: UUID,
    wanted: RunFilter = RunFilter(),
    limit: int = 50,
) -> str:
    """Differs whenever `list_runs` of the same arguments would, or the decisions on those runs."""
    return _digest(tx, _page(_REVISION, project_id, wanted, limit))


_OF_POLICY = (policies.c.name.label("policy_name"), policies.c.version.label("policy_version"))

_SELECT = sa.select(*runs.c, *_OF_POLICY).join(policies, policies.c.id == runs.c.policy_id)

_SELECT_WITH_COUNTS = _SELECT.add_columns(
    sa.exists().where(decisions.c.run_id == runs.c.id, decisions.c.attempt == runs.c.attempt).label("has_decision"),
    sa.select(sa.func.count())
    .where(checkpoints.c.run_id == runs.c.id, checkpoints.c.superseded_by == LIVE)
    .scalar_subquery()
    .label("checkpoint_count"),
)

_TRIGRAM = 3
_SEARCHED = 20_000

_INGESTED = (
    *("status", "attempt", "metrics", "recognition", "eval_changes", "rewritten_version", "last_step"),
    *("best_checkpoint", "raw_maximum", "turn", "ended_at"),
)

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
        sa.select(column).where(run_health.c.run_id == runs.c.id).scalar_subquery()
        for column in (run_health.c.state, sa.cast(run_health.c.metric_faults, sa.Text))
    ),
)


def _page(query: sa.Select[Any], project_id: UUID, wanted: RunFilter, limit: int) -> sa.Select[Any]:
    query = query.where(runs.c.project_id == project_id)
    if wanted.name is not None:
        query = query.where(contains_text(runs.c.name, wanted.name))
    if wanted.status is not None:
        query = query.where(runs.c.status == wanted.status)
    if wanted.verdict is not None:
        query = query.where(runs.c.verdict["verdict"].as_string() == wanted.verdict)
    if wanted.mode is not None:
        query = query.where(runs.c.mode == wanted.mode)
    if wanted.policy is not None:
        of_name = sa.select(policies.c.id).where(policies.c.project_id == project_id, policies.c.name == wanted.policy)
        query = query.where(runs.c.policy_id.in_(of_name))
    if wanted.job_kind is not None:
        query = query.where(runs.c.labels["job_kind"].as_string() == wanted.job_kind)
    if wanted.bounded:
        newest = sa.select(runs.c.id).where(runs.c.project_id == project_id)
        if wanted.before is not None and wanted.order == "newest":
            newest = newest.where(runs.c.id < wanted.before)
        oldest = newest.order_by(runs.c.id.desc()).offset(_SEARCHED - 1).limit(1).scalar_subquery()
        query = query.where(runs.c.id >= sa.func.coalesce(oldest, sa.literal(UUID(int=0), sa.Uuid)))
    if wanted.before is not None:
        query = query.where(_after(wanted))
    return query.order_by(*_ordered(runs.c, wanted.order)).limit(limit)


def _ordered(columns: Any, order: str) -> tuple[sa.ColumnElement[Any], ...]:
    newest = columns.id.desc()
    match order:
        case "updated":
            return columns.updated_at.desc(), newest
        case "step":
            return sa.func.coalesce(columns.last_step, -1).desc(), newest
    return (newest,)


def _after(wanted: RunFilter) -> sa.ColumnElement[bool]:
    """Those that come after the run `before` in the order."""
    older = runs.c.id < wanted.before
    if wanted.order == "newest" or wanted.place is None:
        return older
    key = runs.c.updated_at if wanted.order == "updated" else sa.func.coalesce(runs.c.last_step, -1)
    return (key < wanted.place) | ((key == wanted.place) & older)


def _digest(tx: Transaction, query: sa.Select[Any]) -> str:
    return hashlib.sha256(repr([tuple(row) for row in tx.execute(query)]).encode()).hexdigest()[:16]


def _one(tx: Transaction, query: sa.Select[Any]) -> Run | None:
    row = tx.execute(query).mappings().one_or_none()
    return Run(**row) if row else None


def _columns_of(run: Run) -> dict[str, Any]:
    return {column.name: getattr(run, column.name) for column in runs.c}
