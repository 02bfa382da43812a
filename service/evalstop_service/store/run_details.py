"""What is stored beside the row of a run: descriptions by people, checkpoints, each change of its verdict, requests to
evaluate it, and its health: whether it is alive, when to check it again, and which of its metrics have no data.

Ingestion changes the health only to record a step past its budget: a run's row says when it last posted. A change of
health that depends on the run's row locks that row first; a heartbeat locks only the health row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.domain.health import NEWEST, Liveness, Reading
from evalstop_service.domain.run import NOTHING_SAID, Call, RunDescription, Verdict
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.store.database import Transaction, append_row, find_all, find_one, insert_if_new, save_row
from evalstop_service.store.runs import Run
from evalstop_service.store.tables import (
    LIVE,
    checkpoints,
    eval_requests,
    observations,
    run_descriptions,
    run_health,
    runs,
    verdicts,
)
from evalstop_service.store.tables.columns import columns_of
from evalstop_service.store.tables.runs import Checkpoint as Checkpoint
from evalstop_service.store.tables.runs import EvalRequest as EvalRequest
from evalstop_service.store.tables.runs import RunHealth as RunHealth
from evalstop_service.store.tables.runs import VerdictChange as VerdictChange

_DESCRIPTION = columns_of(run_descriptions, RunDescription)


def load_descriptions(tx: Transaction, run_ids: Collection[UUID]) -> dict[UUID, RunDescription]:
    """The descriptions of these runs."""
    descriptions = dict.fromkeys(run_ids, NOTHING_SAID)
    table = run_descriptions.c
    query = sa.select(table.run_id, *_DESCRIPTION)
    for run_id, *columns in tx.execute(query.where(table.run_id.in_(run_ids))):
        descriptions[run_id] = RunDescription(*columns)
    return descriptions


def save_description(
    tx: Transaction, project_id: UUID, run_id: UUID, description: RunDescription, now: datetime
) -> None:
    """Store the description of a run."""
    key = {"run_id": run_id, "project_id": project_id, "changed_at": now}
    save_row(tx, run_descriptions, key | msgspec.structs.asdict(description))


def add_checkpoint(tx: Transaction, run_id: UUID, checkpoint: Checkpoint) -> None:
    """Store a checkpoint for a step that has no live one."""
    tx.execute(checkpoints.insert().values(run_id=run_id, superseded_by=LIVE, **vars(checkpoint)))


def list_checkpoints(tx: Transaction, run_id: UUID) -> list[Checkpoint]:
    """A run's live checkpoints by ascending step."""
    return load_checkpoints(tx, [run_id]).get(run_id, [])


def load_checkpoints(tx: Transaction, run_ids: Sequence[UUID]) -> dict[UUID, list[Checkpoint]]:
    """The live checkpoints of each of these runs that has any, by ascending step."""
    table = checkpoints.c
    query = sa.select(table.run_id, *columns_of(checkpoints, Checkpoint))
    query = query.where(table.run_id.in_(run_ids), table.superseded_by == LIVE).order_by(table.run_id, table.step)
    by_run: dict[UUID, list[Checkpoint]] = defaultdict(list)
    for run_id, *columns in tx.execute(query):
        by_run[run_id].append(Checkpoint(*columns))
    return by_run


def add_verdict(tx: Transaction, run_id: UUID, attempt: int, verdict: Verdict, now: datetime) -> None:
    """Append a change; the run is locked in this transaction."""
    append_row(tx, verdicts, {"run_id": run_id}, {"attempt": attempt, "verdict": verdict, "at": now})


def has_reached(tx: Transaction, run_id: UUID, attempt: int, call: Call) -> bool:
    """Whether any verdict on this attempt made this call."""
    query = sa.exists().where(
        verdicts.c.run_id == run_id, verdicts.c.attempt == attempt, verdicts.c.verdict["verdict"].as_string() == call
    )
    return tx.execute(sa.select(query)).scalar_one()


def list_verdicts(tx: Transaction, run_id: UUID, limit: int = 100) -> list[VerdictChange]:
    """A run's verdict changes, newest first."""
    query = sa.select(*columns_of(verdicts, VerdictChange)).where(verdicts.c.run_id == run_id)
    return find_all(tx, VerdictChange, query.order_by(verdicts.c.sequence.desc()).limit(limit))


def add_request(tx: Transaction, request: EvalRequest) -> bool:
    """Store a request; False if the attempt already has one for this step."""
    return insert_if_new(tx, eval_requests, msgspec.structs.asdict(request), ["run_id", "attempt", "step"])


def save_answer(tx: Transaction, request: EvalRequest) -> None:
    """Store the answer to a request that has none."""
    columns = ("answered_at", "actor", "difference", "stderr", "prompts", "probability_after")
    is_request = (eval_requests.c.run_id == request.run_id) & (eval_requests.c.id == request.id)
    query = eval_requests.update().where(is_request, eval_requests.c.answered_at.is_(None))
    tx.execute(query.values({name: getattr(request, name) for name in columns}))


def find_request(tx: Transaction, run_id: UUID, request_id: UUID) -> EvalRequest | None:
    """The run's request with this id."""
    query = _ALL.where(eval_requests.c.run_id == run_id, eval_requests.c.id == request_id)
    return find_one(tx, EvalRequest, query)


def load_unanswered(tx: Transaction, places: Mapping[UUID, tuple[int, int]]) -> dict[UUID, EvalRequest]:
    """For each run the request of this attempt at this step, if it has no answer."""
    query = _ALL.where(eval_requests.c.run_id.in_(places), eval_requests.c.answered_at.is_(None))
    requests = [EvalRequest(*row) for row in tx.execute(query)]
    return {
        request.run_id: request for request in requests if (request.attempt, request.step) == places[request.run_id]
    }


def list_requests(tx: Transaction, run_id: UUID) -> list[EvalRequest]:
    """All requests of a run, by ascending attempt and step."""
    query = _ALL.where(eval_requests.c.run_id == run_id)
    return [EvalRequest(*row) for row in tx.execute(query.order_by(eval_requests.c.attempt, eval_requests.c.step))]


def list_open_requests(
    tx: Transaction, project_id: UUID, run_ids: Sequence[UUID], now: datetime, limit: int
) -> list[EvalRequest]:
    """The open requests of a project's running runs (if any are named, of these), earliest deadline first."""
    query = _ALL.join(runs, (runs.c.id == eval_requests.c.run_id) & (runs.c.attempt == eval_requests.c.attempt)).where(
        eval_requests.c.project_id == project_id,
        eval_requests.c.answered_at.is_(None),
        eval_requests.c.deadline_at > now,
        runs.c.status == RunStatus.RUNNING,
    )
    if run_ids:
        query = query.where(eval_requests.c.run_id.in_(run_ids))
    return [EvalRequest(*row) for row in tx.execute(query.order_by(eval_requests.c.deadline_at).limit(limit))]


_ALL = sa.select(*columns_of(eval_requests, EvalRequest))


def start_checks(
    tx: Transaction,
    run_id: UUID,
    project_id: UUID,
    next_check_at: datetime,
    now: datetime,
    *,
    heartbeat_at: datetime | None = None,
) -> None:
    """Start to check a run, as alive: it was opened, or it continues after its end."""
    fresh = RunHealth(run_id, project_id, Liveness.ALIVE, next_check_at, now, heartbeat_at)
    if not insert_if_new(tx, run_health, vars(fresh), ["run_id"]):
        restarted = {"state": Liveness.ALIVE, "next_check_at": next_check_at, "changed_at": now}
        tx.execute(run_health.update().where(run_health.c.run_id == run_id).values(restarted))


def record_heartbeat(tx: Transaction, run_id: UUID, project_id: UUID, now: datetime) -> None:
    """Record a heartbeat of a run that is or will be checked."""
    if tx.execute(run_health.update().where(run_health.c.run_id == run_id).values(heartbeat_at=now)).rowcount == 0:
        start_checks(tx, run_id, project_id, now, now, heartbeat_at=now)


def load_health(tx: Transaction, run_ids: Collection[UUID]) -> dict[UUID, RunHealth]:
    """The health of those of these runs that have a row."""
    query = sa.select(run_health).where(run_health.c.run_id.in_(list(run_ids)))
    return {health.run_id: health for health in find_all(tx, RunHealth, query)}


def save_health(tx: Transaction, health: RunHealth) -> None:
    """Store the result of checking a run, which is locked; heartbeats are left unchanged."""
    values = {name: value for name, value in vars(health).items() if name not in ("run_id", "heartbeat_at")}
    tx.execute(run_health.update().where(run_health.c.run_id == health.run_id).values(values))


def claim_due_checks(tx: Transaction, now: datetime, limit: int) -> list[RunHealth]:
    """Up to `limit` runs to check now, longest due first, whose health is locked until the transaction ends; rows that
    another transaction has locked are skipped."""
    query = sa.select(run_health).where(run_health.c.next_check_at <= now).order_by(run_health.c.next_check_at)
    return find_all(tx, RunHealth, query.limit(limit).with_for_update(skip_locked=True))


def postpone_checks(tx: Transaction, next_checks: Mapping[UUID, datetime | None]) -> None:
    """Postpone the next check of unchanged runs; None: no further check."""
    if next_checks:
        later = (
            run_health.update()
            .where(run_health.c.run_id == sa.bindparam("run"))
            .values(next_check_at=sa.bindparam("at"))
        )
        tx.execute(later, [{"run": run_id, "at": at} for run_id, at in next_checks.items()])


def load_readings(
    tx: Transaction, series: Sequence[tuple[Run, str]], most: int = NEWEST
) -> dict[tuple[UUID, str], list[Reading]]:
    """The newest readings of these metrics of runs, each by ascending step."""
    return {
        (run.id, metric): [Reading(*row) for row in tx.execute(_select_newest(run, metric, most))][::-1]
        for run, metric in series
    }


def _select_newest(run: Run, metric: str, most: int) -> sa.Select[Any]:
    """A metric's newest live observations. Those past the run's last step, possibly very many, are superseded."""
    table = observations.c
    last_step = -1 if run.last_step is None else run.last_step
    return (
        sa.select(table.step, table.received_at)
        .where(table.run_id == run.id, table.metric == metric, table.superseded_by == LIVE, table.step <= last_step)
        .order_by(table.step.desc())
        .limit(most)
    )
