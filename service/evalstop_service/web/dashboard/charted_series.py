"""The eval, the proxy and the KL of runs, read at the resolution of a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from evalstop_service.runs import watched_metrics
from evalstop_service.store import observations, series
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import MAX_STEP, PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.dashboard.downsampling import downsample, outline_buckets

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
