"""What ingestion has to reach, and whether it did: ratios of one run, computed from its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evalstop_lab.benchmarks import ingest_contenders as names
from evalstop_lab.benchmarks.rounds import ASKING, GRID, Cell, Shape

Cells = Mapping[tuple[str, Shape], Cell]

MANY_FLAT = 1.5
"""A cost counts as flat when it grows by less than this from the smallest size to the largest."""


@dataclass(frozen=True)
class Target:
    """One figure and its limit. `met` is None when what it needs was not measured.

    `lowest` and `highest` are of the same ratio round by round.
    """

    name: str
    measured: float | None
    bound: Literal[">=", "<="]
    limit: float
    unit: str = "x"
    lowest: float | None = None
    highest: float | None = None
    where: str = ""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.bound == ">=" else self.measured <= self.limit


def of_ingestion(cells: Cells) -> list[Target]:
    """The targets that throughput and latency of the grid decide."""
    return [
        _rate(cells, "100 a request, 8 clients, to MLflow", Shape(100, 8), names.EVALSTOP, names.MLFLOW, 15),
        _p50(cells, "the same, p50", Shape(100, 8), names.EVALSTOP, names.MLFLOW, 0.06),
        _rate(cells, "1 a request, 8 clients, to MLflow", Shape(1, 8), names.EVALSTOP, names.MLFLOW, 40),
        _rate(cells, "1 a request, a lone client, to MLflow", Shape(1, 1), names.EVALSTOP, names.MLFLOW, 8),
        _rate(
            cells, "1 a request, 64 clients, to a transaction a request", Shape(1, 64), names.EVALSTOP, names.ALONE, 2.5
        ),
        _p99(cells, "the same, p99", Shape(1, 64), names.EVALSTOP, 30),
        _worst(cells, "any load, to a transaction a request", names.EVALSTOP, names.ALONE, 0.9),
        _worst(cells, "the same, 2 ms added to each fsync", names.SLOW, names.SLOW_ALONE, 0.9),
        _rate(cells, "report and ask, 8 clients, to Optuna", ASKING, names.EVALSTOP, names.OPTUNA, 40),
        _of_copy(cells, "100 a request, 64 clients, to bare COPY over 8", 0.4),
        _rate(cells, "the same, to detectors off", Shape(100, 64), names.EVALSTOP, names.OFF, 0.85),
        _rate(
            cells,
            "on SQLite, 100 a request, 8 clients, to MLflow on SQLite",
            Shape(100, 8),
            names.EMBEDDED,
            names.MLFLOW_EMBEDDED,
            10,
        ),
    ]


def flat(name: str, costs: Sequence[float]) -> Target:
    """That a cost does not grow from the first size to the last."""
    return Target(name, costs[-1] / costs[0] if len(costs) > 1 else None, "<=", MANY_FLAT)


def _rate(cells: Cells, name: str, shape: Shape, ours: str, theirs: str, limit: float) -> Target:
    mine, other = cells.get((ours, shape)), cells.get((theirs, shape))
    if mine is None or other is None:
        return Target(name, None, ">=", limit)
    by_round = [a / b for a, b in zip(mine.rounds, other.rounds, strict=True)]
    return Target(
        name,
        mine.per_second / other.per_second,
        ">=",
        limit,
        lowest=min(by_round),
        highest=max(by_round),
        where=f"{mine.per_second:,.0f}/s to {other.per_second:,.0f}/s",
    )


def _p50(cells: Cells, name: str, shape: Shape, ours: str, theirs: str, limit: float) -> Target:
    mine, other = cells.get((ours, shape)), cells.get((theirs, shape))
    if mine is None or other is None:
        return Target(name, None, "<=", limit)
    return Target(name, mine.p50_ms / other.p50_ms, "<=", limit, where=f"{mine.p50_ms:.1f} ms to {other.p50_ms:.1f} ms")


def _p99(cells: Cells, name: str, shape: Shape, ours: str, limit: float) -> Target:
    mine = cells.get((ours, shape))
    return Target(name, mine.p99_ms if mine else None, "<=", limit, "ms")


def _worst(cells: Cells, name: str, ours: str, theirs: str, limit: float) -> Target:
    found = [_rate(cells, f"{shape}", shape, ours, theirs, limit) for shape in GRID]
    known = [(item.measured, item) for item in found if item.measured is not None]
    if not known:
        return Target(name, None, ">=", limit)
    measured, worst = min(known, key=lambda item: item[0])
    where = f"at {worst.name}: {worst.where}"
    return Target(name, measured, ">=", limit, lowest=worst.lowest, highest=worst.highest, where=where)


def _of_copy(cells: Cells, name: str, limit: float) -> Target:
    """To the best that COPY reached, whatever its batch."""
    mine = cells.get((names.EVALSTOP, Shape(100, 64)))
    copies = [cell for (contender, _), cell in cells.items() if contender == names.COPY]
    if mine is None or not copies:
        return Target(name, None, ">=", limit)
    best = max(copies, key=lambda cell: cell.per_second)
    by_round = [a / b for a, b in zip(mine.rounds, best.rounds, strict=True)]
    where = f"{mine.per_second:,.0f}/s to {best.per_second:,.0f}/s at {best.shape.batch} rows a COPY"
    return Target(
        name, mine.per_second / best.per_second, ">=", limit, lowest=min(by_round), highest=max(by_round), where=where
    )


def of_growth(sections: Mapping[str, Any]) -> list[Target]:
    """The targets that growth and reading back decide, where they were measured."""
    by_runs = [row for row in sections.get("live_runs", []) if row["remembers_all"]]
    by_points = sections.get("points", [])
    found = [
        flat("an observation, 10^3 to most live runs", [row["microseconds"] for row in by_runs]),
        flat("memory a live run, 10^3 to most", [row["bytes_a_run"] for row in by_runs]),
        flat("an observation, fewest to most points in a run", [row["microseconds"] for row in by_points]),
    ]
    for name, took in sections.get("reading", {}).items():
        if name.startswith("series"):
            found.append(Target(name, took and took["p50_ms"], "<=", 100, "ms"))
    return found
