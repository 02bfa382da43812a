"""Computes the results of `make bench-ingest`: medians, ratios within each round, and targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from evalstop_lab.benchmarks.ingest.load_generator import Load

EVALSTOP, BOUND, AGAINST, MLFLOW = "EvalStop", "bound", "the other checkout", "MLflow"
ON_SQLITE = " on SQLite"
DIRECT, HASHED, ROUND_ROBIN = (f"4 replicas, {routing}" for routing in ("sticky", "nginx hash", "nginx round robin"))


@dataclass(frozen=True, order=True)
class Shape:
    """A load: observations per request, and clients."""

    batch: int
    clients: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.clients}"


TARGETS_OF_BOUND = {Shape(1, 1): 0.75, Shape(1, 8): 0.75, Shape(1, 64): 0.65, Shape(100, 8): 0.65, Shape(100, 64): 0.65}
"""The measured loads, and the target for the service's rate as a share of the bound's."""

SHAPES = tuple(TARGETS_OF_BOUND)
REPLICA_SHAPES = (Shape(1, 64), Shape(100, 64))


@dataclass(frozen=True)
class Measurement:
    """One round of one contender: its load, and microseconds of CPU time per request, NaN if unknown."""

    load: Load
    server_us: float
    database_us: float


Figure = Callable[[Measurement], float]


def compute_rate(item: Measurement) -> float:
    return item.load.per_second


@dataclass(frozen=True)
class Cell:
    """The rounds of one contender under one load."""

    contender: str
    shape: Shape
    rounds: tuple[Measurement, ...]

    def median(self, figure: Figure) -> float:
        return statistics.median(map(figure, self.rounds))


Cells = Mapping[tuple[str, Shape], Cell]


@dataclass(frozen=True)
class Ratio:
    """The ratios of two contenders' figures within each round: median, minimum and maximum."""

    median: float
    lowest: float
    highest: float


def compute_ratio(cells: Cells, contender: str, baseline: str, shape: Shape, figure: Figure) -> Ratio | None:
    """The ratio of two contenders' figures; None if one was not measured, or if a divisor is 0."""
    our_cell, their_cell = cells.get((contender, shape)), cells.get((baseline, shape))
    if our_cell is None or their_cell is None or not all(map(figure, their_cell.rounds)):
        return None
    ratios = [figure(a) / figure(b) for a, b in zip(our_cell.rounds, their_cell.rounds, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


@dataclass(frozen=True)
class Target:
    """A ratio and its limit: `least` or `most`."""

    name: str
    ratio: Ratio
    least: float | None = None
    most: float | None = None
    met: bool = field(init=False)

    def __post_init__(self) -> None:
        met = (self.least is None or self.ratio.median >= self.least) and (
            self.most is None or self.ratio.median <= self.most
        )
        object.__setattr__(self, "met", met)


def compute_targets(cells: Cells) -> list[Target]:
    """The targets whose contenders were measured."""
    targets: list[Target] = []

    def add(
        name: str,
        contender: str,
        baseline: str,
        shape: Shape,
        figure: Figure,
        *,
        least: float | None = None,
        most: float | None = None,
    ) -> None:
        ratio = compute_ratio(cells, contender, baseline, shape, figure)
        if ratio is not None:
            targets.append(Target(f"{shape}: {name}", ratio, least, most))

    for shape, least in TARGETS_OF_BOUND.items():
        add("rate, relative to the bound", EVALSTOP, BOUND, shape, compute_rate, least=least)
    most_clients = Shape(1, 64)
    add("CPU time of the service", EVALSTOP, BOUND, most_clients, lambda item: item.server_us, most=2)
    add("CPU time of PostgreSQL", EVALSTOP, BOUND, most_clients, lambda item: item.database_us, most=1.3)
    for name, contender, least in (("hashed", HASHED, 0.75), ("round robin", ROUND_ROBIN, 0.35)):
        add(f"rate of replicas, {name} relative to sticky", contender, DIRECT, most_clients, compute_rate, least=least)
    for shape in SHAPES:
        add("p99, relative to the other checkout", EVALSTOP, AGAINST, shape, lambda item: item.load.p99_ms, most=1)
        name, ours, theirs = "rate on SQLite, relative to the other checkout", EVALSTOP + ON_SQLITE, AGAINST + ON_SQLITE
        add(name, ours, theirs, shape, compute_rate, least=1)
    return targets


def rotate(items: Sequence[str], turn: int) -> list[str]:
    """Rotate the items by one place per turn, so that no item is always first."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]
