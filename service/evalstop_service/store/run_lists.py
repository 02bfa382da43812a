"""Lists of runs: filtered, ordered and paged; what needs a person's attention; and revisions that show a change."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import DecisionState, Mode
from evalstop_service.domain.health import Liveness
from evalstop_service.domain.run import Call, Verdict
from evalstop_service.domain.statuses import OPEN, RunStatus
from evalstop_service.store.database import Transaction, find_all, match_given, read_member
from evalstop_service.store.decisions import SELECT, Decision
from evalstop_service.store.runs import Run
from evalstop_service.store.tables import (
    decision_changes,
    decisions,
    outcomes,
    run_descriptions,
    run_health,
    running_runs,
    runs,
)
from evalstop_service.store.tables.decisions import ENDS_ATTEMPT
from evalstop_service.store.tables.runs import RunHealth

_TRIGRAM = 3
SEARCHED = 20_000


@dataclass(frozen=True)
class RunFilter:
    """Selects runs of a project: their name contains `name`, they have this status, and so on; None: any.

    `labels`, `tags`: the run must have all of them. `since`, `until`: opened at or after, and before.
    `order`: `newest`, `updated` or `step`, the highest first. `before`: runs opened before this one. `skipped`: so many
    runs at the beginning, in an order that changes, where no run marks the end of a page.
    """

    name: str | None = None
    status: RunStatus | None = None
    verdict: Call | None = None
    mode: Mode | None = None
    policy: str | None = None
    owner: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    order: str = "newest"
    before: UUID | None = None
    skipped: int = 0

    @property
    def bounded(self) -> bool:
        """Whether no index applies, so that only the newest runs are searched.

        Columns that change with every post have no index, which each post would have to update.
        """
        rare = self.name is not None and len(self.name) < _TRIGRAM
        unindexed = (self.verdict, self.mode, self.policy, self.tags, self.labels, self.since, self.until)
        return rare or self.order != "newest" or any(unindexed)


def list_runs(tx: Transaction, project_id: UUID, run_filter: RunFilter = RunFilter(), limit: int = 50) -> list[Run]:
    """A project's runs, newest first or in the requested order.

    Without a matching index the newest 20,000 runs are searched: see `RunFilter.bounded`.
    """
    return find_all(tx, Run, _select_page(tx, sa.select(runs), project_id, run_filter, limit))


class ListedVerdict(NamedTuple):
    """What a run is ranked by."""

    run_id: UUID
    name: str
    verdict: Verdict


def list_running_verdicts(tx: Transaction, project_id: UUID, limit: int) -> list[ListedVerdict]:
    """The verdicts of running runs: of those that may have turned, then of the others, both newest first."""
    first = sa.select(running_runs.c.run_id).where(running_runs.c.project_id == project_id).limit(limit)
    ids = first.order_by(running_runs.c.may_have_turned.desc(), running_runs.c.run_id.desc()).subquery()
    query = sa.select(runs.c.id, runs.c.name, runs.c.verdict).join(ids, ids.c.run_id == runs.c.id)
    return [ListedVerdict(*row) for row in tx.execute(query)]


def read_run_revision(tx: Transaction, project_id: UUID, run_id: UUID) -> str:
    """A value that changes whenever the run, its health, or its decisions change."""
    return _digest_rows(tx, _REVISION_OF_RUN, {"of_project": project_id, "of_id": run_id})


def read_list_revision(tx: Transaction, project_id: UUID, run_filter: RunFilter, limit: int) -> str:
    """A value that changes whenever the result of `list_runs` for the same arguments, or a decision on it, changes."""
    return _digest_rows(tx, _select_page(tx, _REVISION, project_id, run_filter, limit))


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
    sa.select(run_descriptions.c.changed_at).where(run_descriptions.c.run_id == runs.c.id).scalar_subquery(),
)

_REVISION_OF_RUN = _REVISION.where(runs.c.project_id == sa.bindparam("of_project"), runs.c.id == sa.bindparam("of_id"))


def _select_page(
    tx: Transaction, query: sa.Select[Any], project_id: UUID, run_filter: RunFilter, limit: int
) -> sa.Select[Any]:
    verdict = runs.c.verdict["verdict"].as_string()
    exact: dict[Any, Any] = {runs.c.status: run_filter.status, runs.c.mode: run_filter.mode}
    exact |= {verdict: run_filter.verdict, runs.c.policy_name: run_filter.policy}
    created = {"since": {runs.c.created_at: run_filter.since}, "before": {runs.c.created_at: run_filter.until}}
    query = query.where(runs.c.project_id == project_id, *match_given(exact, **created))
    if run_filter.name is not None:
        query = query.where(runs.c.name.icontains(run_filter.name, autoescape=True))
    for name, value in run_filter.labels:
        query = query.where(read_member(tx, runs.c.labels, name) == value)
    if run_filter.owner is not None or run_filter.group is not None or run_filter.tags:
        query = query.where(runs.c.id.in_(_select_described(tx, project_id, run_filter)))
    if run_filter.bounded:
        newest = sa.select(runs.c.id).where(runs.c.project_id == project_id)
        if run_filter.before is not None:
            newest = newest.where(runs.c.id < run_filter.before)
        oldest = newest.order_by(runs.c.id.desc()).offset(SEARCHED - 1).limit(1).scalar_subquery()
        query = query.where(runs.c.id >= sa.func.coalesce(oldest, sa.literal(UUID(int=0), sa.Uuid)))
    query = query.where(*match_given(before={runs.c.id: run_filter.before}))
    return query.order_by(*_list_order_columns(run_filter.order)).offset(run_filter.skipped).limit(limit)


def _select_described(tx: Transaction, project_id: UUID, run_filter: RunFilter) -> sa.Select[Any]:
    """The ids of the runs whose description matches."""
    table = run_descriptions.c
    exact = {table.owner: run_filter.owner, table.group: run_filter.group}
    query = sa.select(table.run_id).where(table.project_id == project_id, *match_given(exact))
    unfold = sa.func.json_array_elements_text if tx.dialect.name == "postgresql" else sa.func.json_each
    for tag in run_filter.tags:
        item = unfold(table.tags).table_valued("value")
        query = query.where(sa.select(item.c.value).where(item.c.value == tag).exists())
    return query


def _list_order_columns(order: str) -> tuple[sa.ColumnElement[Any], ...]:
    newest = runs.c.id.desc()
    match order:
        case "updated":
            return runs.c.updated_at.desc(), newest
        case "step":
            return sa.func.coalesce(runs.c.last_step, -1).desc(), newest
    return (newest,)


def _digest_rows(tx: Transaction, query: sa.Select[Any], parameters: dict[str, Any] | None = None) -> str:
    return hashlib.sha256(repr([tuple(row) for row in tx.execute(query, parameters)]).encode()).hexdigest()[:16]


TO_DECIDE = (
    DecisionState.PENDING,
    DecisionState.FAILED,
    DecisionState.ESCALATED,
    DecisionState.ON_HOLD,
    DecisionState.PARKED,
)
"""A person may have to act on decisions in these states, most urgent first."""


def list_stops_to_decide(tx: Transaction, project_id: UUID, limit: int) -> list[Decision]:
    """Stops of running runs that a person can act on, most urgent first.

    First those that will be sent unless somebody vetoes them, soonest first, then failed ones, unconfirmed ones, those
    on hold, and parked jobs.
    """
    of_attempt = (runs.c.id == decisions.c.run_id) & (runs.c.attempt == decisions.c.attempt) & sa.text(ENDS_ATTEMPT)
    is_listed = (runs.c.project_id == project_id, runs.c.status.in_(OPEN), decisions.c.state.in_(TO_DECIDE))
    urgency = sa.case({state: rank for rank, state in enumerate(TO_DECIDE)}, value=decisions.c.state)
    query = SELECT.join(runs, of_attempt).where(*is_listed).order_by(urgency, decisions.c.due_at)
    return find_all(tx, Decision, query.limit(limit))


class Running(NamedTuple):
    """The number of running runs, of those of them that may have turned, and of the GPUs of their jobs."""

    runs: int
    turned: int
    gpus: float


def count_running(tx: Transaction, project_id: UUID) -> Running:
    """What runs now; the GPUs of a job with several runs count once, those of runs without the label `gpus` as none."""
    table = running_runs.c
    number, turned = sa.func.count().label("number"), sa.func.count().filter(table.may_have_turned).label("turned")
    query = sa.select(table.job_key, table.gpus, number, turned).where(table.project_id == project_id)
    job = query.group_by(table.job_key, table.gpus).subquery().c
    gpus = job.gpus * sa.case((job.job_key.is_(None), job.number), else_=1)
    sums = (sa.func.coalesce(sa.func.sum(column), 0) for column in (job.number, job.turned, gpus))
    number_of_runs, may_have_turned, of_jobs = tx.execute(sa.select(*sums)).one()
    return Running(int(number_of_runs), int(may_have_turned), float(of_jobs))  # PostgreSQL sums to decimal numbers


def list_stale_runs(tx: Transaction, project_id: UUID, limit: int) -> list[RunHealth]:
    """The newest running runs that were late with their posts at their last check."""
    return _list_alerts(tx, project_id, run_health.c.state == Liveness.STALE, limit)


def list_runs_without_data(tx: Transaction, project_id: UUID, limit: int) -> list[RunHealth]:
    """The newest running runs that had a watched metric without data at their last check."""
    return _list_alerts(tx, project_id, sa.cast(run_health.c.metric_faults, sa.Text) != "[]", limit)


def _list_alerts(tx: Transaction, project_id: UUID, condition: sa.ColumnElement[bool], limit: int) -> list[RunHealth]:
    query = sa.select(run_health).join(running_runs, running_runs.c.run_id == run_health.c.run_id)
    query = query.where(running_runs.c.project_id == project_id, run_health.c.next_check_at.is_not(None), condition)
    return find_all(tx, RunHealth, query.order_by(run_health.c.run_id.desc()).limit(limit))
