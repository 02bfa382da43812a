"""The messages about a run, and their receipts."""

from __future__ import annotations

from uuid import UUID

import msgspec

from evalstop_service.domain.decision_lifecycle import SERVICE
from evalstop_service.domain.run import MetricFields
from evalstop_service.errors import NotFound, ServiceError
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.run_details import EvalRequest
from evalstop_service.store.runs import Run


class Observations(msgspec.Struct, frozen=True):
    """A batch of observations, in any order; repeats are allowed."""

    points: tuple[PostedObservation, ...]


class CheckpointSaved(msgspec.Struct, frozen=True):
    """The trainer saved a checkpoint of this step."""

    step: int
    uri: str


class Resumed(msgspec.Struct, frozen=True):
    """The trainer resumed from the checkpoint of this step; its observations past it no longer count.

    `actor`: for the audit log.
    """

    step: int
    actor: str = SERVICE


class RolesCorrected(msgspec.Struct, frozen=True):
    """A person assigned roles to metrics; `actor`: for the audit log."""

    metrics: dict[str, MetricFields]
    actor: str


class EvalChanged(msgspec.Struct, frozen=True):
    """The eval is measured differently from this step on; `version`: the name of the measurement, if any."""

    step: int
    reason: str
    version: str | None
    actor: str


class EvalAnswered(msgspec.Struct, frozen=True):
    """A request to evaluate now was answered.

    `point`: the difference, as an observation at the request's step. `actor`: who answered.
    """

    request_id: UUID
    attempt: int
    point: PostedObservation
    prompts: int | None
    actor: str


Content = Observations | CheckpointSaved | Resumed | RolesCorrected | EvalChanged | EvalAnswered


class Message(msgspec.Struct, frozen=True):
    """A message about one run, sent with a key of its project; `sender`: the key charged for replays, if any."""

    project_id: UUID
    run_id: UUID
    content: Content
    sender: UUID | None = None

    @property
    def size(self) -> int:
        """The number of observations, at least 1."""
        return max(1, len(self.content.points)) if isinstance(self.content, Observations) else 1


def not_found(message: Message) -> NotFound:
    """The error for a project that has no such run."""
    return NotFound(f"there is no run {message.run_id} in this project; create one with POST /api/v1/runs")


class ValueConflict(msgspec.Struct, frozen=True):
    """An observation that differs from the stored value of its identity, which is kept."""

    point: PostedObservation
    stored_value: float


class Receipt(msgspec.Struct, frozen=True):
    """The result of a message, and the state of the run after it.

    `missing`: the roles of watched metrics that have no value yet; while there are any, or no metric is the eval,
    `unwatched`: metrics with values and no role. `eval_request`: the paired evaluation that awaits its answer.
    """

    run: Run
    decision: Decision | None
    accepted: int = 0
    duplicates: int = 0
    superseded: int = 0
    conflicts: tuple[ValueConflict, ...] = ()
    created: bool = True
    missing: dict[str, str] = {}
    unwatched: list[str] = []
    eval_request: EvalRequest | None = None


Answer = Receipt | ServiceError
"""The receipt, or why the message was refused (NotFound, Conflict, UnreadableRow). A refused message stores nothing."""
