"""Requests to evaluate now: the best checkpoint and the current one of a run, on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.domain.fields import doc
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.store.database import Transaction, insert_if_new
from evalstop_service.store.tables import eval_requests, runs


class EvalRequest(msgspec.Struct, frozen=True):
    """A request for a paired evaluation at a step, and its answer."""

    id: Annotated[UUID, doc("id of the request")]
    run_id: Annotated[UUID, doc("the run that is suspected to have turned")]
    project_id: UUID
    attempt: Annotated[int, doc("the attempt of the run")]
    step: Annotated[int, doc("evaluate the first checkpoint registered at or after this step")]
    number: Annotated[int, doc("1 for the run's first request")]
    multiplier: Annotated[int, doc("number of prompts, as a multiple of a usual eval")]
    best_step: int
    best_uri: str
    probability: Annotated[float | None, doc("probability that the run had turned, at the time of the request")]
    created_at: Annotated[datetime, doc("when it was requested")]
    deadline_at: Annotated[datetime, doc("it can be answered until then")]
    answered_at: Annotated[datetime | None, doc("null: not answered")] = None
    actor: Annotated[str | None, doc("who answered")] = None
    difference: Annotated[float | None, doc("the current score minus the best one, in the unit of the eval metric")] = (
        None
    )
    stderr: Annotated[float | None, doc("the standard error of the difference")] = None
    prompts: Annotated[int | None, doc("number of prompts on which both were scored")] = None
    probability_after: Annotated[float | None, doc("probability that the run had turned, including the answer")] = None

    @property
    def seed(self) -> int:
        """The seed from which both evaluations draw their prompts."""
        return self.id.int & 0x7FFF_FFFF

    def is_open(self, now: datetime) -> bool:
        """Whether it can still be answered."""
        return self.answered_at is None and now < self.deadline_at


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
    row = tx.execute(query).one_or_none()
    return EvalRequest(*row) if row is not None else None


def load_unanswered(tx: Transaction, places: Mapping[UUID, tuple[int, int]]) -> dict[UUID, EvalRequest]:
    """For each run the request of this attempt at this step, if it has no answer."""
    query = _ALL.where(eval_requests.c.run_id.in_(places), eval_requests.c.answered_at.is_(None))
    requests = [EvalRequest(*row) for row in tx.execute(query)]
    return {
        request.run_id: request for request in requests if (request.attempt, request.step) == places[request.run_id]
    }


def list_requests(tx: Transaction, run_id: UUID) -> list[EvalRequest]:
    """All requests of a run, by ascending attempt and step."""
    return [EvalRequest(*row) for row in tx.execute(_LIST, {"of_run": run_id})]


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


_ALL = sa.select(*(eval_requests.c[name] for name in EvalRequest.__struct_fields__))

_LIST = _ALL.where(eval_requests.c.run_id == sa.bindparam("of_run")).order_by(
    eval_requests.c.attempt, eval_requests.c.step
)
