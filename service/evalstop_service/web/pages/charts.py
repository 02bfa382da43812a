"""The eval, the proxy and the KL of runs at the resolution of a chart, without averaging spikes away, and as curves
that the server draws, which work without scripts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from evalstop_service.runs import watched_metrics
from evalstop_service.store import observations, series
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import MAX_STEP, PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.store.series import Bucket, Segment
from evalstop_service.web.pages.sparkline import Frame

ROLES = ("eval", "proxy", "kl")


@dataclass(frozen=True)
class ChartedSeries:
    """A charted metric and its values by step: all of them, or for a long series the last of each bucket."""

    metric: str
    role: str
    drawn: Sequence[PostedObservation]
    values: Sequence[PostedObservation]


def load_charted(database: Database, runs: Sequence[Run], most: int) -> dict[UUID, list[ChartedSeries]]:
    """The charted series of these runs, at most `most` observations per metric; first updates their summaries."""
    charted = [(run.id, metric, role) for run in runs for metric, role in list_charted(run).items()]
    with database.reading() as tx:
        long = {(run_id, metric) for run_id, metric, _ in charted if series.is_long_series(tx, run_id, metric)}
    for run_id, metric in long:
        series.catch_up_summaries(database, run_id, metric)
    charted_by_run: dict[UUID, list[ChartedSeries]] = {run.id: [] for run in runs}
    with database.reading() as tx:
        for run_id, metric, role in charted:
            if (run_id, metric) in long:
                buckets = series.load_buckets(tx, run_id, metric, 0, MAX_STEP, most // 3)
                values = [PostedObservation(metric, bucket.last_step, bucket.last) for bucket in buckets]
                points = outline_buckets(buckets, metric)
            else:
                points = values = observations.load_series(tx, run_id, [metric])
            charted_by_run[run_id].append(ChartedSeries(metric, role, downsample(points, most), values))
    return charted_by_run


def find_turn_step(run: Run, decision: Decision | None) -> int | None:
    """The step of the turn: the change point in hindsight, else that of the decision, else that of the verdict."""
    if run.turn is not None:
        return run.turn.step
    return (decision or run).verdict.turn_step


def list_charted(run: Run) -> dict[str, str]:
    """The charted metrics of a run, with their roles; several evals are charted as their mean."""
    combined = watched_metrics.find_combined_evals(run)
    return {
        metric: role["role"]
        for metric, role in watched_metrics.list_watched(run).items()
        if role["role"] in ROLES and metric not in combined
    }


def downsample(points: Sequence[PostedObservation], limit: int) -> list[PostedObservation]:
    """At most `limit` (8 or more) points of a series, in order: the minimum, the maximum and a gap of each bucket.

    The first and the last point are always kept. A gap is a value that is not finite.
    """
    if len(points) <= limit:
        return list(points)
    keep = {0, len(points) - 1}
    buckets = (limit - 2) // 3
    for bucket in range(buckets):
        indices = range(bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets)
        finite = [index for index in indices if math.isfinite(points[index].value)]
        gap = next((index for index in indices if not math.isfinite(points[index].value)), None)
        if finite:
            keep.add(min(finite, key=lambda index: points[index].value))
            keep.add(max(finite, key=lambda index: points[index].value))
        if gap is not None:
            keep.add(gap)
    return [points[index] for index in sorted(keep)]


def outline_buckets(buckets: Sequence[Bucket], metric: str) -> list[PostedObservation]:
    """The minimum and the maximum of each bucket, placed at its ends, and a gap where a value was not finite.

    Their true positions are lost, which is invisible: a bucket is as wide as the line.
    """
    points = []
    for bucket in buckets:
        if bucket.lowest is not None and bucket.highest is not None:
            points.append(PostedObservation(metric, bucket.first_step, bucket.lowest))
            points.append(PostedObservation(metric, bucket.last_step, bucket.highest))
        if bucket.nan_count or bucket.infinite_count:
            points.append(PostedObservation(metric, bucket.last_step, math.nan))
    return points


WIDTH, HEIGHT = 1000, 400
STRETCHES = 500


@dataclass(frozen=True)
class Curve:
    """A metric: its points in an SVG of WIDTH x HEIGHT, and the frame that it fills."""

    role: str
    points: str
    frame: Frame


def load_curves(tx: Transaction, run: Run) -> list[Curve]:
    """The eval, the proxy and the KL of a run, those without finite values left out."""
    metric_of_role = {role: metric for metric, role in reversed(list_charted(run).items())}
    series_of_role = {role: (run.id, metric_of_role[role]) for role in ROLES if role in metric_of_role}
    segments = series.load_segments(tx, series_of_role.values(), STRETCHES)
    drawable = [(role, segments[series]) for role, series in series_of_role.items() if segments.get(series)]
    steps = [item.step for _, stretches in drawable for item in stretches]
    return [_draw_curve(role, stretches, min(steps), max(steps)) for role, stretches in drawable]


def _draw_curve(role: str, stretches: Sequence[Segment], first: int, last: int) -> Curve:
    frame = replace(Frame.around(stretches), first=first, last=last, width=WIDTH, height=HEIGHT, margin=0)
    return Curve(role, frame.line(stretches), frame)
