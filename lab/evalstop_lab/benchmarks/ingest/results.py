"""What the rounds of `make bench-ingest` come to: medians, ratios within each round, targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from evalstop_lab.benchmarks.ingest.load_generator import Load

EVALSTOP, BOUND, AGAINST, MLFLOW = "EvalStop", "bound", "the other checkout", "MLflow"
ON_SQLITE = " on SQLite"
DIRECT, HASHED, ROUND_ROBIN = (f"4 replicas, {way}" for way in ("sticky", "nginx hash", "nginx round robin"))


@dataclass(frozen=True, order=True)
class Shape:
    """A load: observations a request, and clients."""

    batch: int
    clients: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.clients}"


WANTED_OF_BOUND = {
    Shape(1, 1): 0.75,
    Shape(1, 8): 0.75,
    Shape(1, 64): 0.65,
    Shape(100, 8): 0.65,
    Shape(100, 64): 0.65,
}
"""The loads that are measured, and the share of the bound's rate that the service has to reach."""

SHAPES = tuple(WANTED_OF_BOUND)
REPLICA_SHAPES = (Shape(1, 64), Shape(100, 64))


@dataclass(frozen=True)
class Measurement:
    """One round of one contender: the load, and microseconds of processor time a request; NaN where it is unknown."""

    load: Load
    server_us: float
    database_us: float


Figure = Callable[[Measurement], float]


def rate(item: Measurement) -> float:
    """Observations a second."""
    return item.load.per_second


@dataclass(frozen=True)
class Cell:
    """All rounds of one contender under one load."""

    contender: str
    shape: Shape
    rounds: tuple[Measurement, ...]

    def median(self, figure: Figure) -> float:
        return statistics.median(map(figure, self.rounds))


Cells = Mapping[tuple[str, Shape], Cell]


@dataclass(frozen=True)
class Ratio:
    """A figure of one contender divided by that of another within each round: median, lowest, highest."""

    median: float
    lowest: float
    highest: float


def compute_ratio(cells: Cells, ours: str, theirs: str, shape: Shape, figure: Figure) -> Ratio | None:
    """The ratio; None when one of the two was not measured, or too briefly for a figure above zero."""
    our_cell, their_cell = cells.get((ours, shape)), cells.get((theirs, shape))
    if our_cell is None or their_cell is None or not all(map(figure, their_cell.rounds)):
        return None
    ratios = [figure(a) / figure(b) for a, b in zip(our_cell.rounds, their_cell.rounds, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


@dataclass(frozen=True)
class Target:
    """A ratio and its limit: the least that it has to be, or the most that it may be."""

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
        ours: str,
        theirs: str,
        shape: Shape,
        figure: Figure,
        *,
        least: float | None = None,
        most: float | None = None,
    ) -> None:
        ratio = compute_ratio(cells, ours, theirs, shape, figure)
        if ratio is not None:
            targets.append(Target(f"{shape}: {name}", ratio, least, most))

    for shape, wanted in WANTED_OF_BOUND.items():
        add("rate, to the bound", EVALSTOP, BOUND, shape, rate, least=wanted)
    most_clients = Shape(1, 64)
    add("processor time of the service", EVALSTOP, BOUND, most_clients, lambda item: item.server_us, most=2)
    add(
        "processor time of PostgreSQL",
        EVALSTOP,
        BOUND,
        most_clients,
        lambda item: item.database_us,
        most=1.3,
    )
    for name, contender, least in (("hashed", HASHED, 0.75), ("round robin", ROUND_ROBIN, 0.35)):
        add(f"replicas, {name} to sticky, rate", contender, DIRECT, most_clients, rate, least=least)
    for shape in SHAPES:
        add("p99, to the other checkout", EVALSTOP, AGAINST, shape, lambda item: item.load.p99_ms, most=1)
        add("rate on SQLite, to the other checkout", EVALSTOP + ON_SQLITE, AGAINST + ON_SQLITE, shape, rate, least=1)
    return targets


def rotate(items: Sequence[str], turn: int) -> list[str]:
    """The items starting with another one each turn, so that nobody is always first."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]
