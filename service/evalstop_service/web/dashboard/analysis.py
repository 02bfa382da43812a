"""The analysis charts of a run: evidence over steps, and the eval over the distance from the initial policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from evalstop_detectors import MetricRole, Observation, Policy
from fastapi import APIRouter, Response

from evalstop_service.projects import policies
from evalstop_service.runs import watched_metrics
from evalstop_service.runs.watched_metrics import WatchedMetrics, restrict_policy
from evalstop_service.store import observations, run_details, series
from evalstop_service.store.database import Transaction
from evalstop_service.store.observations import MAX_STEP, PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.dashboard import evidence, gao_chart
from evalstop_service.web.dashboard.downsampling import downsample
from evalstop_service.web.dashboard.evidence import Track
from evalstop_service.web.dashboard.responses import PageRoute, send_json
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
        kl = [metric for metric, role in run.metrics.items() if role["role"] == MetricRole.KL]
        paired = [metric for metric in (watched_metrics.find_eval_metric(run), *kl) if metric is not None]
        long = {metric for metric in {*run.metrics, *paired} if series.is_long_series(tx, run.id, metric)}
    for metric in long & set(paired):
        series.catch_up_summaries(site.database, run.id, metric)
    with site.database.reading() as tx:
        tracks, note = _load_tracks(tx, run, policy, long)
        pairs = _load_pairs(tx, run, paired, long) if len(paired) == 2 else None
    chart = None if pairs is None else gao_chart.build_chart(pairs, watched_metrics.find_eval_sign(run))
    encoded_tracks = [_encode_track(track) for track in tracks if track.has_evidence]
    return send_json({"evidence": {"note": note, "tracks": encoded_tracks}, "gao": chart})


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
    changes = run_details.list_verdicts(tx, run.id, limit=MOST_CHANGES)
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
    every = -(-len(evals) // MOST_PAIRS) or 1
    distances = [point for point in points if point.metric != eval_metric]
    paired = [
        Observation(role, point.step, watched_metrics.find_sign(run, point.metric) * point.value, point.stderr)
        for role, of_role in ((MetricRole.EVAL, evals[::every]), (MetricRole.KL, distances))
        for point in of_role
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
        "values": [point.value for point in points],
        "covered": {
            "steps": [share.step for share in covered],
            "low": [share.low for share in covered],
            "values": [share.middle for share in covered],
            "high": [share.high for share in covered],
        },
    }
