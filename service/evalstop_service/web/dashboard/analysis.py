"""The analysis charts of a run: evidence over steps, and the eval over the distance from the initial policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from evalstop_detectors import MetricRole, Observation, Policy
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from evalstop_service.projects import policies
from evalstop_service.runs import watched_metrics
from evalstop_service.runs.watched_metrics import WatchedMetrics, restrict_policy
from evalstop_service.store import observations, series, verdicts
from evalstop_service.store.database import Transaction
from evalstop_service.store.observations import MAX_STEP, PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.dashboard import evidence, gao_chart
from evalstop_service.web.dashboard.charted_series import finite_or_none
from evalstop_service.web.dashboard.downsampling import downsample
from evalstop_service.web.dashboard.evidence import Track
from evalstop_service.web.dashboard.gao_chart import GaoChart
from evalstop_service.web.dashboard.responses import PageRoute
from evalstop_service.web.dashboard.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute)

MOST_REPLAYED = 3_000
"""Runs with more observations are not replayed: the chart shows the evidence stored with their verdict changes."""

MOST_PAIRS = 1_000
MOST_CHANGES = 100
MOST_POINTS = 500

REPLAYED = "Recomputed from all observations; detectors without evidence are left out."
TOO_LONG = "The run is too long to replay here: shown at verdict changes only."
UNREADABLE = "This release cannot read the policy: shown at verdict changes only."
FAILED = "This run is not judged after an error: shown at verdict changes only."


@router.get("/analysis.json")
def show_analysis(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """The data of both charts; values that are not finite are null."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)
        policy = policies.read_policy(tx, run.policy_id)
        paired = _find_paired_metrics(run)
        long = {metric for metric in {*run.metrics, *paired} if series.is_long_series(tx, run.id, metric)}
    for metric in long & set(paired):
        series.catch_up_summaries(site.database, run.id, metric)
    with site.database.reading() as tx:
        tracks, note = _load_tracks(tx, run, policy, long)
        chart = gao_chart.build_chart(_load_pairs(tx, run, paired, long)) if len(paired) == 2 else None
    return JSONResponse(
        {
            "evidence": {"note": note, "tracks": [_encode_track(track) for track in tracks if track.has_evidence]},
            "gao": None if chart is None else _encode_chart(chart, watched_metrics.find_eval_sign(run)),
        }
    )


def _find_paired_metrics(run: Run) -> list[str]:
    """The metrics with the roles eval and KL."""
    kl = [metric for metric, role in run.metrics.items() if role["role"] == MetricRole.KL]
    return [metric for metric in (watched_metrics.find_eval_metric(run), *kl) if metric is not None]


def _load_tracks(tx: Transaction, run: Run, policy: Policy | None, long: set[str]) -> tuple[list[Track], str]:
    """The evidence of each member of the policy, and a note on where it comes from."""
    note = UNREADABLE if policy is None else FAILED if run.detector_failure else TOO_LONG
    if policy is not None and not run.detector_failure:
        policy = restrict_policy(policy, run)
        watch = WatchedMetrics(run, policy)
        if not long & set(watch.metrics):
            points = observations.load_series(tx, run.id, watch.metrics)
            if len(points) <= MOST_REPLAYED:
                return evidence.replay_evidence(policy, watch.observations(points)), REPLAYED
    changes = verdicts.list_verdicts(tx, run.id, limit=MOST_CHANGES)
    present = [change.verdict for change in reversed(changes) if change.attempt == run.attempt]
    return evidence.read_evidence([*present, run.verdict]), note


def _load_pairs(tx: Transaction, run: Run, metrics: Sequence[str], long: set[str]) -> list[Observation]:
    """Evals and KL by step; of a long series the last value of each bucket."""
    points = observations.load_series(tx, run.id, [metric for metric in metrics if metric not in long])
    for metric in metrics:
        if metric in long:
            buckets = series.load_buckets(tx, run.id, metric, 0, MAX_STEP, MOST_PAIRS)
            points += [PostedObservation(metric, bucket.last_step, bucket.last) for bucket in buckets]
    eval_metric = watched_metrics.find_eval_metric(run)
    evals = [point for point in points if point.metric == eval_metric]
    every = -(-len(evals) // MOST_PAIRS)
    sampled_ids = {id(point) for point in evals[:: every or 1]}
    paired = [
        Observation(
            MetricRole.EVAL if point.metric == eval_metric else MetricRole.KL,
            point.step,
            watched_metrics.find_sign(run, point.metric) * point.value,
            point.stderr,
        )
        for point in points
        if point.metric != eval_metric or id(point) in sampled_ids
    ]
    return sorted(paired, key=lambda item: item.order)


def _encode_track(track: Track) -> dict[str, Any]:
    points = downsample(track.points, MOST_POINTS)
    covered = track.covered[:: -(-len(track.covered) // MOST_POINTS) or 1]
    return {
        "member": track.member,
        "detector": track.detector,
        "kind": track.kind,
        "suspect_at": track.suspect_at,
        "stop_at": track.stop_at,
        "steps": [point.step for point in points],
        "values": [finite_or_none(point.value) for point in points],
        "covered": {
            "steps": [share.step for share in covered],
            "low": [share.low for share in covered],
            "values": [share.middle for share in covered],
            "high": [share.high for share in covered],
        },
    }


def _encode_chart(chart: GaoChart, sign: float) -> dict[str, Any]:
    """The chart in the eval's own direction."""
    line = chart.line
    sides = (line.low, line.high) if line is not None else ([], [])
    low, high = sides if sign > 0 else reversed(sides)
    return {
        "note": chart.note,
        "steps": [pair.step for pair in chart.pairs],
        "distances": [pair.distance for pair in chart.pairs],
        "eval_scores": [finite_or_none(sign * pair.eval_score) for pair in chart.pairs],
        "stderrs": [finite_or_none(pair.stderr) for pair in chart.pairs],
        "line": None
        if line is None
        else {
            "form": line.form,
            "trusted": line.trusted,
            "distances": line.distances,
            "eval_scores": [sign * value for value in line.eval_scores],
            "low": [sign * value for value in low],
            "high": [sign * value for value in high],
            "peak": None if line.peak is None else {"distance": line.peak[0], "stderr": line.peak[1]},
        },
    }
