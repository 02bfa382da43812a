"""Who is measured when, and what the rounds come to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from evalstop_lab.benchmarks.generator import Load

T = TypeVar("T")

BATCHES = (1, 10, 100, 1000)
CLIENTS = (1, 8, 64)


@dataclass(frozen=True, order=True)
class Shape:
    """A load: observations a request, clients at a time; `asking`, each observation is an eval and wants a verdict."""

    batch: int
    clients: int
    asking: bool = False

    def __str__(self) -> str:
        return f"{self.batch} x {self.clients}{', asking' if self.asking else ''}"


GRID = tuple(Shape(batch, clients) for clients in CLIENTS for batch in BATCHES)
ASKING = Shape(1, 8, asking=True)
LARGEST_COPY = Shape(10_000, 8)


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items beginning with another one each turn, so that nobody is always first."""
    begin = turn % len(items) if items else 0
    return [*items[begin:], *items[:begin]]


@dataclass(frozen=True)
class Cell:
    """What all rounds of one contender under one load came to: medians, and the extremes of the rate."""

    contender: str
    shape: Shape
    per_second: float
    lowest: float
    highest: float
    p50_ms: float
    p99_ms: float
    refused: int
    generator_cpu: float
    rounds: tuple[float, ...]


def cell(contender: str, shape: Shape, loads: Sequence[Load]) -> Cell:
    """Put the rounds together."""
    rates = [load.per_second for load in loads]
    return Cell(
        contender=contender,
        shape=shape,
        per_second=statistics.median(rates),
        lowest=min(rates),
        highest=max(rates),
        p50_ms=statistics.median(load.p50_ms for load in loads),
        p99_ms=statistics.median(load.p99_ms for load in loads),
        refused=sum(load.refused for load in loads),
        generator_cpu=statistics.median(load.generator_cpu for load in loads),
        rounds=tuple(rates),
    )


def document(cell: Cell) -> dict[str, Any]:
    """A cell as JSON values."""
    found = asdict(cell)
    shape: dict[str, Any] = found.pop("shape")
    return found | shape
