"""What arrives about a run, and the receipt for it."""

from __future__ import annotations

from uuid import UUID

import msgspec

from evalstop_service.errors import ServiceError
from evalstop_service.rules.decision_lifecycle import SERVICE
from evalstop_service.rules.role_recognition import MetricFields
from evalstop_service.store.decisions import Decision
from evalstop_service.store.eval_requests import EvalRequest
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run


class Observations(msgspec.Struct, frozen=True):
    """A batch of observations, in any order, with or without repeats."""

    points: tuple[PostedObservation, ...]


class CheckpointSaved(msgspec.Struct, frozen=True):
    """The trainer saved the model of this step."""

    step: int
    uri: str


class Resumed(msgspec.Struct, frozen=True):
    """The trainer goes on from the checkpoint of this step; what it observed past it no longer counts.

    `actor`: who says so, for the audit log.
    """

    step: int
    actor: str = SERVICE


class RolesCorrected(msgspec.Struct, frozen=True):
    """A person says which metrics play which role; `actor` is written into the audit log."""

    metrics: dict[str, MetricFields]
    actor: str


class EvalChanged(msgspec.Struct, frozen=True):
    """From this step on the eval is measured otherwise; `version` is what that is called, if anything."""

    step: int
    reason: str
    version: str | None
    actor: str


class EvalAnswered(msgspec.Struct, frozen=True):
    """A request to evaluate now is answered.

    `point`: the difference, as an observation of the request's step. `actor`: who answers.
    """

    request_id: UUID
    attempt: int
    point: PostedObservation
    prompts: int | None
    actor: str


Content = Observations | CheckpointSaved | Resumed | RolesCorrected | EvalChanged | EvalAnswered


class Message(msgspec.Struct, frozen=True):
    """Something about one run, sent with a key to its project; `sender`: the key that pays for replays, if any."""

    project_id: UUID
    run_id: UUID
    content: Content
    sender: UUID | None = None

    @property
    def size(self) -> int:
        """The number of observations, at least 1."""
        return max(1, len(self.content.points)) if isinstance(self.content, Observations) else 1


class ValueConflict(msgspec.Struct, frozen=True):
    """A point whose identity is on record with another value, which stands."""

    point: PostedObservation
    stored_value: float


class Receipt(msgspec.Struct, frozen=True):
    """What became of a message, and where the run stands after it.

    `missing`: the roles of watched metrics that have no value yet; while there are any, or no metric is the eval,
    `unwatched`: metrics with values and without a role. `eval_request`: the paired evaluation that awaits its answer.
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
"""What became of a message, or why it was refused (NotFound, Conflict, Behind). Nothing of a refused one is stored."""
