"""Replays of a run for its page: the evidence of each detector by step, the eval over the distance from the initial
policy, and what another policy would have done. Nothing is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self
from uuid import UUID

from evalstop_detectors import (
    DetectorError,
    Evidence,
    MetricRole,
    Observation,
    Policy,
    Scores,
    advance,
    choose_best,
    policy_from_document,
    start,
)
from evalstop_detectors.checkpoint import noise
from evalstop_detectors.detectors.gao_fit import GaoFit, GaoFitState
from evalstop_detectors.detectors.posterior import Posterior
from evalstop_detectors.policy.catalog import Action
from fastapi import APIRouter, Query, Response

from evalstop_service.domain.run import Verdict
from evalstop_service.errors import Invalid, NotFound
from evalstop_service.evaluation import change_point
from evalstop_service.evaluation.backtests import Replay, replay_run
from evalstop_service.projects import policies
from evalstop_service.runs import watched_metrics
from evalstop_service.runs.watched_metrics import WatchedMetrics, restrict_policy
from evalstop_service.store import decisions, observations, run_details, series
from evalstop_service.store.database import Transaction
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.pages.formatting import format_number, format_step
from evalstop_service.web.pages.responses import PageRoute, send_json
from evalstop_service.web.pages.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute)

MOST_REPLAYED = 3_000
"""Runs with more observations are not replayed: the chart shows the evidence stored with their verdict changes."""

MOST_PAIRS = 1_000
MOST_CHANGES = 100
MOST_POINTS = 500

REPLAYED = "Recomputed from all observations; deciding detectors without evidence are left out."
TOO_LONG = "The run is too long to replay here: shown at verdict changes only."
TOO_LONG_TO_TRY = "The run is too long to replay here; a backtest replays it in the background."
UNREADABLE = "This release cannot read the policy: shown at verdict changes only."
FAILED = "This run is not judged after an error: shown at verdict changes only."


@router.get("/analysis.json")
def show_analysis(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """The lanes of detectors, and the chart of eval over KL; values that are not finite are null."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)
        policy = policies.read_policy(tx, run.policy_id)
        kl = [metric for metric, role in run.metrics.items() if role["role"] == MetricRole.KL]
        paired = [metric for metric in (watched_metrics.find_eval_metric(run), *kl) if metric is not None]
        long = {metric for metric in {*run.metrics, *paired} if series.is_long_series(tx, run.id, metric)}
        tracks, note = _load_tracks(tx, run, policy, long)
        pairs = _load_pairs(tx, run, paired, long) if len(paired) == 2 else None
    chart = None if pairs is None else build_chart(pairs, watched_metrics.find_eval_sign(run))
    shown = [track.thin_out() for track in tracks if track.observes or track.covered.steps or any(track.values)]
    return send_json({"evidence": {"note": note, "tracks": shown}, "gao": chart})


@router.get("/segments.json")
def show_segments(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """The rises, plateaus and falls of the eval in hindsight, as in the API."""
    with site.database.reading() as tx:
        segments = change_point.load_segments(tx, visitor.load_run(tx, run_id))
    return send_json({"available": change_point.AVAILABLE, "items": segments})


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
            buckets = series.load_buckets(tx, run.id, metric, MOST_PAIRS)
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


@dataclass
class Covered:
    """The share of its final range of scores that a run has covered at each eval: 10, 50 and 90 % quantile."""

    steps: list[int] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, step: int, detector: Posterior, state: Any) -> None:
        """Add the estimate of a detector in this state."""
        low, middle, high = detector.outlook(state).to_gain
        self.steps.append(step)
        for quantiles, to_gain in ((self.low, high), (self.values, middle), (self.high, low)):
            quantiles.append(1 / (1 + to_gain))


@dataclass
class Track:
    """A member of a policy: its evidence at each step where it changed, with its note; its thresholds (None: never);
    and the step of its first call for a stop. `observes`: it has no say. `covered`: from a detector that expects how
    much is still to be gained."""

    member: str
    detector: str
    kind: str
    suspect_at: float | None
    stop_at: float | None
    observes: bool = False
    call_step: int | None = None
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    covered: Covered = field(default_factory=Covered)

    def add_value(self, step: int, value: float, note: str) -> None:
        """Record the value from this step on; the last one at a step counts."""
        if self.steps and self.steps[-1] == step:
            for column in (self.steps, self.values, self.notes):
                column.pop()
        self.steps.append(step)
        self.values.append(value)
        self.notes.append(note)

    def thin_out(self) -> Self:
        """Itself, with at most `MOST_POINTS` values, of adjacent ones the highest: no call is lost."""
        size = -(-len(self.steps) // MOST_POINTS) or 1
        blocks = (range(begin, min(begin + size, len(self.steps))) for begin in range(0, len(self.steps), size))
        kept = [max(block, key=self.values.__getitem__) for block in blocks]
        for name in ("steps", "values", "notes"):
            setattr(self, name, [getattr(self, name)[index] for index in kept])
        return self


def replay_evidence(policy: Policy, observations: Iterable[Observation]) -> list[Track]:
    """The evidence of each member, with a say or without, after every observation; these are given in step order."""
    members, tracks = list(policy.panel.values()), list[Track]()
    for name, member in policy.panel.items():
        detector, limits, observes = member.detector, member.thresholds, len(tracks) >= len(policy.members)
        tracks.append(Track(name, detector.name, detector.kind, limits.suspect_at, limits.stop_at, observes))
    state = start(policy)
    previous: Sequence[Evidence | None] = [None] * len(tracks)
    for item in observations:
        state, _ = advance(policy, state, [item])
        latest, states = (*state.evidence, *state.panel.evidence), (*state.states, *state.panel.states)
        for index, evidence in enumerate(latest):
            if evidence is None:
                continue
            if evidence is not previous[index]:
                tracks[index].add_value(item.step, evidence.value, evidence.note)
            detector = members[index].detector
            if item.role is MetricRole.EVAL and evidence.outlook is not None and isinstance(detector, Posterior):
                tracks[index].covered.add(item.step, detector, states[index])
        previous = latest
    for track, call_step in zip(tracks, state.panel.calls, strict=True):
        track.call_step = call_step
    return [track for track in tracks if track.steps]


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
            track.add_value(verdict.step, item.value, item.note)
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


@router.get("/what-if.json")
def replay_policy(
    run_id: UUID, site: SiteOf, visitor: SignedIn, policy: Annotated[str, Query(max_length=100)]
) -> Response:
    """Where a policy would have stopped the run."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)
        try:
            reference = policies.find_referred_policy(tx, run.project_id, policy)
        except Invalid as error:
            raise NotFound(str(error)) from error
        if any(series.is_long_series(tx, run.id, metric) for metric in watched_metrics.list_watched(run)):
            return _create_answer(TOO_LONG_TO_TRY)
        try:
            tried = policy_from_document(reference.document, stored=True)
            replay = replay_run(tx, run, tried)
        except DetectorError as error:
            return _create_answer(f"{reference.name} cannot be replayed: {error}.")
        sentence, step = _describe_stop(tx, run, tried, replay)
    final = replay.verdicts[-1]
    reason = next((verdict.reason for verdict in replay.verdicts if verdict.stops), final.reason)
    return _create_answer(sentence, step=step, reason=reason)


def _create_answer(sentence: str, *, step: int | None = None, reason: str = "") -> Response:
    return send_json({"sentence": sentence, "step": step, "reason": reason})


def _describe_stop(tx: Transaction, run: Run, policy: Policy, replay: Replay) -> tuple[str, int | None]:
    """What the policy would have done, in one sentence, and the step of its stop."""
    name, verb = policy.name, "parked" if policy.action is Action.PARK else "stopped"
    step = next((verdict.step for verdict in replay.verdicts if verdict.stops), None)
    if step is None:
        until = "" if run.last_step is None else f" up to step {format_step(run.last_step)}, its last"
        return f"{name} would not have {verb} this run{until}.", None
    description = f"{name} would have {verb} this run at step {format_step(step)}{_compare_steps(tx, run, step)}"
    if policy.action is Action.PARK and not replay.verdicts[-1].stops:
        description += ", to return later"
    return f"{description}; {_describe_best(tx, run, replay, step)}.", step


def _compare_steps(tx: Transaction, run: Run, step: int) -> str:
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    if decision is None:
        remaining_steps = (run.last_step or step) - step
        return f", {format_step(remaining_steps)} steps before its last" if remaining_steps > 0 else ""
    apart = decision.step - step
    if apart == 0:
        return ", as on record"
    return f", {format_step(abs(apart))} steps {'sooner' if apart > 0 else 'later'} than on record"


def explain_raw_maximum(tx: Transaction, run: Run) -> str:
    """Why the highest eval is not that of the best checkpoint; empty if it is, or if there is no best checkpoint."""
    best, highest, metric = run.best_checkpoint, run.raw_maximum, watched_metrics.find_eval_metric(run)
    if best is None or highest is None or metric is None or highest.step == best.step:
        return ""
    measured = f"Step {format_step(highest.step)} measured {format_number(highest.score)}, but"
    if all(checkpoint.step != highest.step for checkpoint in run_details.list_checkpoints(tx, run.id)):
        return f"{measured} no checkpoint was registered there."
    smoothed = None
    if not series.is_long_series(tx, run.id, metric):
        evals = watched_metrics.select_evals(run, observations.load_series(tx, run.id, [metric]))
        smoothed = choose_best(Scores().add_scores(evals).add_checkpoints({highest.step: ""}))
    if smoothed is None or smoothed.smoothed is None or best.smoothed is None:
        return f"{measured} that is lower, or less certain, once smoothed over its neighbors."
    sign = watched_metrics.find_eval_sign(run)
    scores = ((sign * smoothed.smoothed, smoothed.smoothed_stderr), (best.smoothed, best.smoothed_stderr))
    own, other = (f"{format_number(score)} ± {format_number(stderr)}" for score, stderr in scores)
    return f"{measured} smoothed over its neighbors that is {own}, against {other} at step {format_step(best.step)}."


def _describe_best(tx: Transaction, run: Run, replay: Replay, step: int) -> str:
    """The checkpoint that would have been the best at this step."""
    evals = [score for score in watched_metrics.select_evals(run, replay.observations) if score.step <= step]
    saved = run_details.list_checkpoints(tx, run.id)
    addresses = {checkpoint.step: checkpoint.uri for checkpoint in saved if checkpoint.step <= step}
    best = choose_best(Scores().add_scores(evals).add_checkpoints(addresses))
    if best is None:
        return "no checkpoint had an eval by then"
    return f"the best checkpoint would be that of step {format_step(best.step)}"
