"""The analysis charts of a run: evidence over steps, and the eval over the distance from the initial policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from evalstop_detectors import Evidence, MetricRole, MonitorState, Observation, Policy, advance, start
from evalstop_detectors.checkpoint import noise
from evalstop_detectors.detectors.gao_fit import GaoFit, GaoFitState
from evalstop_detectors.detectors.posterior import Posterior
from fastapi import APIRouter, Response

from evalstop_service.domain.run import Verdict
from evalstop_service.projects import policies
from evalstop_service.runs import watched_metrics
from evalstop_service.runs.watched_metrics import WatchedMetrics, restrict_policy
from evalstop_service.store import observations, run_details, series
from evalstop_service.store.database import Transaction
from evalstop_service.store.observations import MAX_STEP, PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.pages.charts import downsample
from evalstop_service.web.pages.responses import PageRoute, send_json
from evalstop_service.web.pages.visitor import SignedIn, SiteOf

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
    chart = None if pairs is None else build_chart(pairs, watched_metrics.find_eval_sign(run))
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
                return replay_evidence(policy, watch.observations(points)), REPLAYED
    changes = run_details.list_verdicts(tx, run.id, limit=MOST_CHANGES)
    present = [change.verdict for change in reversed(changes) if change.attempt == run.attempt]
    return read_evidence([*present, run.verdict]), note


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


@dataclass(frozen=True)
class Covered:
    """The share of its final range of scores that a run has covered at a step: 10, 50 and 90 % quantile."""

    step: int
    low: float
    middle: float
    high: float


@dataclass
class Track:
    """One member of the policy: its detector, the kind of its evidence, its thresholds (None: never), and its value at
    each step. `covered`: at each eval, from a detector that expects how much is still to be gained."""

    member: str
    detector: str
    kind: str
    suspect_at: float | None
    stop_at: float | None
    points: list[PostedObservation] = field(default_factory=list)
    covered: list[Covered] = field(default_factory=list)

    def add_value(self, step: int, value: float) -> None:
        """Record the value from this step on; the last one at a step counts."""
        if self.points and self.points[-1].step == step:
            self.points.pop()
        self.points.append(PostedObservation(self.member, step, value))

    @property
    def has_evidence(self) -> bool:
        """Whether any value differs from 0, or the run's covered share is known."""
        return bool(self.covered) or any(point.value != 0 for point in self.points)


def replay_evidence(policy: Policy, observations: Iterable[Observation]) -> list[Track]:
    """The evidence after every observation, given in step order."""
    tracks: list[Track | None] = [None] * len(policy.members)
    state = start(policy)
    previous: Sequence[Evidence | None] = state.evidence
    for item in observations:
        state, _ = advance(policy, state, (item,))
        for index, evidence in enumerate(state.evidence):
            if evidence is None:
                continue
            track = tracks[index]
            if track is None:
                member = policy.members[index]
                limits = member.thresholds
                tracks[index] = track = Track(
                    policy.ids[index], member.detector.name, evidence.kind, limits.suspect_at, limits.stop_at
                )
            if evidence is not previous[index]:
                track.add_value(item.step, evidence.value)
            if item.role is MetricRole.EVAL and evidence.outlook is not None:
                track.covered += _read_covered(policy, state, index, item.step)
        previous = state.evidence
    return [track for track in tracks if track is not None]


def _read_covered(policy: Policy, state: MonitorState, index: int, step: int) -> list[Covered]:
    """A member's estimate of the share that the run has covered; empty if its detector has none."""
    detector = policy.members[index].detector
    if not isinstance(detector, Posterior):
        return []
    low, middle, high = detector.outlook(state.states[index]).to_gain
    return [Covered(step, 1 / (1 + high), 1 / (1 + middle), 1 / (1 + low))]


def read_evidence(verdicts: Iterable[Verdict]) -> list[Track]:
    """The evidence stored with the changes of a verdict, oldest first, for a run that is too long to replay."""
    tracks: dict[int, Track] = {}
    for verdict in verdicts:
        for index, item in enumerate(verdict.evidence):
            if verdict.step is None:
                continue
            track = tracks.get(index)
            if track is None:
                tracks[index] = track = Track(item.detector, item.detector, item.kind, item.suspect_at, item.stop_at)
            track.add_value(verdict.step, item.value)
    return list(tracks.values())


FORMS = {2: "reinforcement learning: d (a − b ln d)", 3: "best-of-n: d (a − b d)"}
LINE_POINTS = 80
"""Points of the line, from distance 0 to the largest observed."""


@dataclass(frozen=True)
class Pair:
    """An eval score and its distance: the square root of the last KL before it."""

    step: int
    distance: float
    eval_score: float
    stderr: float | None


@dataclass(frozen=True)
class Line:
    """The form that fits better, its 95 % band (`low` to `high`), and its peak with a standard error.

    `trusted`: whether the detector uses it; its note says why it does not.
    """

    form: str
    trusted: bool
    distances: list[float]
    eval_scores: list[float]
    low: list[float]
    high: list[float]
    peak: tuple[float, float] | None


@dataclass(frozen=True)
class GaoChart:
    """The pairs, the fitted line if there is one, and the detector's note."""

    pairs: list[Pair]
    line: Line | None
    note: str


def build_chart(observations: Iterable[Observation], sign: float = 1.0) -> GaoChart:
    """The chart of evals and KL, given in step order and with higher evals being better; `sign` restores their own
    direction."""
    detector = GaoFit()
    state, pairs = detector.start(), []
    for item in observations:
        before = state.pairs
        state, _ = detector.step(state, item)
        if state.pairs > before:
            pairs.append(Pair(item.step, state.recent[-1][1], sign * item.value, item.stderr))
    line = _fit_line(detector, state, sign) if state.pairs >= detector.least_evals else None
    return GaoChart(pairs, line, state.evidence.note)


def _fit_line(detector: GaoFit, state: GaoFitState, sign: float) -> Line | None:
    if not state.fits or state.sd <= 0:
        return None
    farthest = max(d for _, d in (*state.path, *state.recent))
    best = min(state.fits, key=lambda fit: fit.misfit)
    dof = state.pairs - 3
    # As in the detector: at least the variance of the noise, and more if the noise is autocorrelated.
    sound = noise.estimate(state.noise)
    variance = max(best.misfit / dof, (state.sd / 4) ** 2) * sound.inflation**2
    distances = [farthest * index / (LINE_POINTS - 1) for index in range(LINE_POINTS)]
    origin = state.noise.origin  # the detector measures evals from the first one
    eval_scores = [sign * (origin + best.combined(best.vector(d))) for d in distances]
    widths = [_quantile(dof) * math.sqrt(variance * best.leverage(best.vector(d))) for d in distances]
    if not all(map(math.isfinite, (*eval_scores, *widths))):
        return None
    peak = best.peak(variance)
    return Line(
        FORMS[best.term],
        detector.find_fault(state, state.fits, sound) is None,
        distances,
        eval_scores,
        [value - width for value, width in zip(eval_scores, widths, strict=True)],
        [value + width for value, width in zip(eval_scores, widths, strict=True)],
        peak if peak is not None and peak[0] <= 2 * farthest else None,  # farther out, the form cannot be trusted
    )


def _quantile(dof: int) -> float:
    """The 97.5 % quantile of Student's t (Cornish-Fisher), within 1 % from five degrees of freedom on."""
    z = 1.959964
    return z + (z**3 + z) / (4 * dof) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * dof**2)
