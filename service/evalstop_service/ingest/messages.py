"""The messages about a run, their receipts, and how much of what they cost is committed together."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import msgspec

from evalstop_service.domain.decision_lifecycle import SERVICE
from evalstop_service.domain.run import MetricFields
from evalstop_service.errors import NotFound, ServiceError, TooOften
from evalstop_service.security.rate_limits import Rate, RateLimit
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


class Exploited(msgspec.Struct, frozen=True):
    """The trainer has made a copy that it was asked to make; `actor`: for the audit log."""

    decision_id: UUID
    actor: str


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


Content = Observations | CheckpointSaved | Resumed | Exploited | RolesCorrected | EvalChanged | EvalAnswered


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
"""The receipt, or why the message was refused (NotFound, Conflict). A refused message stores nothing."""


REPLAYS = Rate(burst=500, per_second=100)
"""CPU milliseconds that a key's edits may spend on replays: a tenth of one CPU. Its project may spend twice that.

Time is measured, because a stored observation costs one policy many times what it costs another.
"""


@dataclass(frozen=True)
class Limits:
    """Limits on the size of a commit and of the queue.

    `commits`: concurrent commits, started when earlier ones are slow; the embedded database has one writer.
    `slow_seconds`: after this long the next commit may start; the slow one is probably waiting for a row lock.
    `edits`: concurrent edits, each in a thread. `requests`, `observations`: in one commit. `waiting`: observations
    waiting or in a commit. `step_seconds`: new observations of a run whose detectors took longer are judged in a thread
    of their own. `replays`: per key.
    """

    commits: int = 4
    edits: int = 2
    requests: int = 1000
    observations: int = 20_000
    waiting: int = 200_000
    step_seconds: float = 0.2
    slow_seconds: float = 0.05
    replays: Rate = REPLAYS


class EditCosts:
    """The share of processor time that the edits of each key, and of each project, may spend on replays."""

    def __init__(self, limits: Limits) -> None:
        self._limit = RateLimit(limits.replays)
        self._limit_of_project = RateLimit(Rate(2 * limits.replays.burst, 2 * limits.replays.per_second))

    def require_share(self, message: Message) -> None:
        """Raise TooOften when a message would replay its run, and its key or project has used up its share."""
        if message.sender is not None:
            self.require_room(message.sender, message.project_id)

    def require_room(self, key_id: UUID, project_id: UUID) -> None:
        """Raise TooOften when a key or its project has used up its share, as before it changes the plan of a run."""
        if wait := max(self._limit.find_wait(key_id), self._limit_of_project.find_wait(project_id)):
            detail = "edits of this key or project, such as late observations or changed plans, caused too many replays"
            raise TooOften(f"{detail}; retry later", wait)

    def charge(self, message: Message, seconds: float) -> None:
        """Charge a key and its project for the processor time of the replay that its message caused."""
        if message.sender is not None:
            self._limit.charge(message.sender, seconds * 1000)
            self._limit_of_project.charge(message.project_id, seconds * 1000)
