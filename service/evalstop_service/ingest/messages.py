"""What arrives about a run, and the receipt for it."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import Point
from evalstop_service.store.runs import Run


@dataclass(frozen=True, slots=True)
class Points:
    """News: a batch of observations, in any order, with or without repeats."""

    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """News: the trainer saved the model of this step."""

    step: int
    uri: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """News: the trainer goes on from the checkpoint of this step; what it observed past it no longer counts."""

    step: int


@dataclass(frozen=True, slots=True)
class Corrected:
    """News: a person says which metrics play which role, `actor` being what is written down of whom."""

    metrics: dict[str, dict[str, str]]
    actor: str


News = Points | Saved | Resumed | Corrected


@dataclass(frozen=True, slots=True)
class Arrival:
    """News of one run, as a caller with a key to its project brought them."""

    project_id: UUID
    run_id: UUID
    news: News


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A point whose identity is on record with another value, which stands."""

    point: Point
    stored_value: float


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of the news, and where the run stands after it."""

    run: Run
    decision: Decision | None
    accepted: int = 0
    duplicates: int = 0
    superseded: int = 0
    contradictions: tuple[Contradiction, ...] = ()
    created: bool = True
