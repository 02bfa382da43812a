"""What arrives about a run, and the receipt for it."""

from __future__ import annotations

from uuid import UUID

import msgspec

from evalstop_service.errors import ServiceError
from evalstop_service.store.decisions import Decision
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
    """The trainer goes on from the checkpoint of this step; what it observed past it no longer counts."""

    step: int


class RolesCorrected(msgspec.Struct, frozen=True):
    """A person says which metrics play which role; `actor` is written into the audit log."""

    metrics: dict[str, dict[str, str]]
    actor: str


Content = Observations | CheckpointSaved | Resumed | RolesCorrected


class Message(msgspec.Struct, frozen=True):
    """Something about one run, sent with a key to its project."""

    project_id: UUID
    run_id: UUID
    content: Content

    @property
    def size(self) -> int:
        """The number of observations, at least 1."""
        return max(1, len(self.content.points)) if isinstance(self.content, Observations) else 1


class ValueConflict(msgspec.Struct, frozen=True):
    """A point whose identity is on record with another value, which stands."""

    point: PostedObservation
    stored_value: float


class Receipt(msgspec.Struct, frozen=True):
    """What became of a message, and where the run stands after it."""

    run: Run
    decision: Decision | None
    accepted: int = 0
    duplicates: int = 0
    superseded: int = 0
    conflicts: tuple[ValueConflict, ...] = ()
    created: bool = True


Answer = Receipt | ServiceError
"""What became of a message, or why it was refused (NotFound, Conflict, Behind). Nothing of a refused one is stored."""
