"""Curves: the eval, the proxy and the KL of runs at the resolution of a chart, without averaging spikes away, and
outlines of them as SVG that works without scripts, such as the sparkline of a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self
from uuid import UUID

from evalstop_service.domain.run import BestCheckpoint
from evalstop_service.runs import watched_metrics
from evalstop_service.store import observations, series
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.store.series import Bucket, Point

WIDTH, HEIGHT, MARGIN = 132, 34, 4

SPARK_POINTS = 62  # one for every other pixel


@dataclass(frozen=True)
class Frame:
    """The range of steps and values of a drawing, and its size."""

    first: int
    last: int
    lowest: float
    highest: float
    width: int = WIDTH
    height: int = HEIGHT
    margin: int = MARGIN

    @classmethod
    def around(cls, points: Sequence[Point]) -> Self:
        """The frame that contains all of these points; there is at least one."""
        values = [value for _, value in points]
        return cls(points[0][0], points[-1][0], min(values), max(values))

    def x(self, step: int) -> float:
        """The x coordinate of a step."""
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return round(self.margin + min(1.0, max(0.0, share)) * (self.width - 2 * self.margin), 1)

    def y(self, value: float) -> float:
        """The y coordinate of a value."""
        # Halved, because the difference of two doubles may overflow.
        lowest, highest = self.lowest / 2, self.highest / 2
        share = (value / 2 - lowest) / (highest - lowest) if highest > lowest else 0.5
        return round(self.height - self.margin - min(1.0, max(0.0, share)) * (self.height - 2 * self.margin), 1)

    def line(self, points: Sequence[Point]) -> str:
        """The coordinates of a line through these points."""
        return " ".join(f"{self.x(step)},{self.y(value)}" for step, value in points)


@dataclass(frozen=True)
class Sparkline:
    """Coordinates for an SVG of WIDTH x HEIGHT, and the last eval."""

    line: str
    last: tuple[float, float]
    best: tuple[float, float] | None
    stop_x: float | None
    last_eval: float


def draw_sparklines(
    tx: Transaction, runs: Sequence[Run], decided: Mapping[UUID, Decision]
) -> dict[UUID, Sparkline | None]:
    """The evals of these runs with the best checkpoint and the stop; None for a run without evals."""
    outlines = load_eval_outlines(tx, runs, SPARK_POINTS)
    steps = {run_id: decision.step for run_id, decision in decided.items()}
    return {run.id: draw_sparkline(outlines.get(run.id, ()), run.best_checkpoint, steps.get(run.id)) for run in runs}


def draw_sparkline(points: Sequence[Point], best: BestCheckpoint | None, stop_step: int | None) -> Sparkline | None:
    """The sparkline of a run; None without evals."""
    if not points:
        return None
    frame = Frame.around(points)
    step, last_eval = points[-1]
    return Sparkline(
        line=frame.line(points),
        last=(frame.x(step), frame.y(last_eval)),
        best=(frame.x(best.step), frame.y(best.score)) if best else None,
        stop_x=frame.x(stop_step) if stop_step is not None else None,
        last_eval=last_eval,
    )


ROLES = ("eval", "proxy", "kl")


@dataclass(frozen=True)
class ChartedSeries:
    """A charted metric: its values by step, or of a long series the outline and the last value of each bucket."""

    metric: str
    role: str
    drawn: Sequence[PostedObservation]
    values: Sequence[PostedObservation]


def load_charted(database: Database, runs: Sequence[Run], most: int) -> dict[UUID, list[ChartedSeries]]:
    """The charted series of these runs, at most `most` observations per metric."""
    with database.reading() as tx:
        return {
            run.id: [_load_charted(tx, run.id, metric, role, most) for metric, role in list_charted(run).items()]
            for run in runs
        }


def _load_charted(tx: Transaction, run_id: UUID, metric: str, role: str, most: int) -> ChartedSeries:
    if not series.is_long_series(tx, run_id, metric, most):
        points = observations.load_series(tx, run_id, [metric])
        return ChartedSeries(metric, role, points, points)
    buckets = series.load_buckets(tx, run_id, metric, most // 3)
    values = [PostedObservation(metric, bucket.last_step, bucket.last) for bucket in buckets]
    return ChartedSeries(metric, role, outline_buckets(buckets, metric), values)


def list_turns(run: Run, decision: Decision | None) -> dict[str, int]:
    """The steps of the turn, by name: as estimated at the stop, or so far, and last in hindsight."""
    turns = {"estimated at the stop" if decision else "estimated so far": (decision or run).verdict.turn_step}
    turns["in hindsight"] = run.turn.step if run.turn else None
    return {f"turn ({how})": step for how, step in turns.items() if step is not None}


def find_turn(run: Run, decision: Decision | None) -> tuple[str, int] | None:
    """The best known turn, name and step."""
    return next(reversed(list_turns(run, decision).items()), None)


def list_charted(run: Run) -> dict[str, str]:
    """The charted metrics of a run, with their roles; several evals are charted as their mean."""
    combined = watched_metrics.find_combined_evals(run)
    return {
        metric: role["role"]
        for metric, role in watched_metrics.list_watched(run).items()
        if role["role"] in ROLES and metric not in combined
    }


def outline_buckets(buckets: Sequence[Bucket], metric: str) -> list[PostedObservation]:
    """The minimum and the maximum of each bucket, placed at its ends, and a gap where a value was not finite.

    Their true positions are lost, which is invisible: a bucket is as wide as the line.
    """
    points = []
    for bucket in buckets:
        if bucket.lowest is not None and bucket.highest is not None:
            points.append(PostedObservation(metric, bucket.first_step, bucket.lowest))
            points.append(PostedObservation(metric, bucket.last_step, bucket.highest))
        if bucket.gaps:
            points.append(PostedObservation(metric, bucket.last_step, math.nan))
    return points


CURVE_WIDTH, CURVE_HEIGHT = 1000, 400
CURVE_POINTS = 500


def load_eval_outlines(tx: Transaction, runs: Sequence[Run], most: int) -> dict[UUID, list[Point]]:
    """Points of the watched eval of each run that has one with values, at most so many of each."""
    evals = [(run.id, metric) for run in runs if (metric := watched_metrics.find_eval_metric(run)) is not None]
    return {run_id: points for (run_id, _), points in series.load_outlines(tx, evals, most).items()}


def draw_evals(outlines: Mapping[UUID, Sequence[Point]]) -> tuple[Frame | None, dict[UUID, str]]:
    """The lines of the evals of runs and their common frame, which is None without evals."""
    every = sorted(point for points in outlines.values() for point in points)
    if not every:
        return None, {}
    frame = _frame_curves(every)
    return frame, {run_id: frame.line(points) for run_id, points in outlines.items()}


@dataclass(frozen=True)
class Curve:
    """A metric: its points in an SVG of CURVE_WIDTH x CURVE_HEIGHT, and the frame that it fills."""

    role: str
    points: str
    frame: Frame


def load_curves(tx: Transaction, run: Run) -> list[Curve]:
    """The eval, the proxy and the KL of a run, those without finite values left out."""
    metric_of_role = {role: metric for metric, role in reversed(list_charted(run).items())}
    series_of_role = {role: (run.id, metric_of_role[role]) for role in ROLES if role in metric_of_role}
    outlines = series.load_outlines(tx, series_of_role.values(), CURVE_POINTS)
    drawable = [(role, outlines[series]) for role, series in series_of_role.items() if outlines.get(series)]
    steps = [step for _, points in drawable for step, _ in points]
    curves = []
    for role, points in drawable:
        frame = replace(_frame_curves(points), first=min(steps), last=max(steps))
        curves.append(Curve(role, frame.line(points), frame))
    return curves


def _frame_curves(points: Sequence[Point]) -> Frame:
    return replace(Frame.around(points), width=CURVE_WIDTH, height=CURVE_HEIGHT, margin=0)
