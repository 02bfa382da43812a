"""What a run's numbers mean: its detectors' evidence over time, and gold over the distance from the initial policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from evalstop_detectors import MetricRole, Observation, Policy
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from evalstop_service.projects import policies
from evalstop_service.runs import watched_metrics
from evalstop_service.runs.watched_metrics import WatchedMetrics
from evalstop_service.store import observations, series, verdicts
from evalstop_service.store.database import Transaction
from evalstop_service.store.observations import MAX_STEP, Point
from evalstop_service.store.runs import Run
from evalstop_service.web.dashboard import evidence, gao_chart
from evalstop_service.web.dashboard.evidence import Track
from evalstop_service.web.dashboard.gao_chart import Picture
from evalstop_service.web.dashboard.responses import PageRoute
from evalstop_service.web.dashboard.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute)

MOST_REPLAYED = 3_000
"""Of a run with more observations the evidence is drawn at the changes of its verdict alone."""

MOST_PAIRS = 1_000
MOST_CHANGES = 100

REPLAYED = "Got by replaying the run; detectors that never moved are left out."
TOO_LONG = "The run is too long to be replayed for a page: drawn at the changes of its verdict alone."
UNREADABLE = "The policy is of a later release, which alone can replay it: drawn at the changes of its verdict alone."


@router.get("/analysis.json")
def show_analysis(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """What the charts of the evidence and of gold over the distance draw; what is not finite is null."""
    with site.database.reading() as tx:
        run = visitor.run(tx, run_id)
        policy = policies.read(tx, run.policy_id)
        paired = _paired(run)
        long = {metric for metric in run.metrics if series.is_long_series(tx, run.id, metric)}
    for metric in long & set(paired):
        series.catch_up_summaries(site.database, run.id, metric)
    with site.database.reading() as tx:
        tracks, note = _tracks(tx, run, policy, long)
        picture = gao_chart.picture(_pairs(tx, run, paired, long)) if len(paired) == 2 else None
    return JSONResponse(
        {
            "evidence": {"note": note, "tracks": [_track(track) for track in tracks if track.moves]},
            "gao": None if picture is None else _picture(picture, _sign(run)),
        }
    )


def _paired(run: Run) -> list[str]:
    """The metrics that are gold and KL, where there are both."""
    return [metric for metric, role in run.metrics.items() if role["role"] in (MetricRole.EVAL, MetricRole.KL)]


def _tracks(tx: Transaction, run: Run, policy: Policy | None, long: set[str]) -> tuple[list[Track], str]:
    """The evidence of each member, and how it was got."""
    if policy is not None:
        watch = WatchedMetrics(run, policy)
        if not long & set(watch.metrics):
            points = observations.load_series(tx, run.id, watch.metrics)
            if len(points) <= MOST_REPLAYED:
                return evidence.replayed(policy, watch.observations(points)), REPLAYED
    changes = verdicts.list_verdicts(tx, run.id, limit=MOST_CHANGES)
    present = [change.document for change in reversed(changes) if change.attempt == run.attempt]
    return evidence.told([*present, run.verdict]), UNREADABLE if policy is None else TOO_LONG


def _pairs(tx: Transaction, run: Run, metrics: Sequence[str], long: set[str]) -> list[Observation]:
    """Gold and KL in the order of their steps; of a long series the last value of each bucket, as it was observed."""
    points = observations.load_series(tx, run.id, [metric for metric in metrics if metric not in long])
    for metric in metrics:
        if metric in long:
            buckets = series.load_buckets(tx, run.id, metric, 0, MAX_STEP, MOST_PAIRS)
            points += [Point(metric, bucket.last_step, bucket.last) for bucket in buckets]
    gold = watched_metrics.find_eval_metric(run)
    evals = [point for point in points if point.metric == gold]
    every = -(-len(evals) // MOST_PAIRS)
    kept = {id(point) for point in evals[:: every or 1]}
    found = [
        Observation(
            MetricRole(run.metrics[point.metric]["role"]),
            point.step,
            watched_metrics.metric_sign(run.metrics, point.metric) * point.value,
            point.stderr,
        )
        for point in points
        if point.metric != gold or id(point) in kept
    ]
    return sorted(found, key=lambda item: item.order)


def _sign(run: Run) -> float:
    gold = watched_metrics.find_eval_metric(run)
    return 1.0 if gold is None else watched_metrics.metric_sign(run.metrics, gold)


def _track(track: Track) -> dict[str, Any]:
    points = evidence.thinned(track)
    return {
        "member": track.member,
        "kind": track.kind,
        "suspect_at": track.suspect_at,
        "stop_at": track.stop_at,
        "steps": [point.step for point in points],
        "values": [_finite(point.value) for point in points],
    }


def _picture(picture: Picture, sign: float) -> dict[str, Any]:
    """In gold's own direction."""
    line = picture.line
    sides = (line.low, line.high) if line is not None else ([], [])
    low, high = sides if sign > 0 else reversed(sides)
    return {
        "note": picture.note,
        "steps": [pair.step for pair in picture.pairs],
        "distances": [pair.distance for pair in picture.pairs],
        "gold": [_finite(sign * pair.gold) for pair in picture.pairs],
        "stderrs": [None if pair.stderr is None else _finite(pair.stderr) for pair in picture.pairs],
        "line": None
        if line is None
        else {
            "form": line.form,
            "distances": line.distances,
            "gold": [sign * value for value in line.gold],
            "low": [sign * value for value in low],
            "high": [sign * value for value in high],
            "peak": None if line.peak is None else {"distance": line.peak[0], "stderr": line.peak[1]},
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
