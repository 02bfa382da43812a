"""Replays of a run for its page: the evidence of each detector by step, and what another policy would have done.

Nothing is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Self
from uuid import UUID

from evalstop_detectors import (
    DetectorError,
    Evidence,
    Observation,
    Policy,
    Scores,
    advance,
    choose_best,
    policy_from_document,
    start,
)
from evalstop_detectors.policy.catalog import Action
from evalstop_detectors.policy.catalog import Verdict as ReplayedVerdict
from fastapi import APIRouter, Query, Response

from evalstop_service.errors import Invalid, NotFound
from evalstop_service.evaluation import change_point
from evalstop_service.evaluation.backtests import replay_run
from evalstop_service.projects import policies
from evalstop_service.runs import watched_metrics
from evalstop_service.runs.watched_metrics import WatchedMetrics, restrict_policy
from evalstop_service.store import observations, run_details, series
from evalstop_service.store.database import Transaction
from evalstop_service.store.runs import Run
from evalstop_service.web.pages.formatting import format_number, format_step
from evalstop_service.web.pages.responses import PageRoute, send_json
from evalstop_service.web.pages.visitor import SignedIn, SiteOf

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute)

MOST_REPLAYED = 10_000
"""Runs with more observations are not replayed: this many take half a second."""

MOST_POINTS = 500

TOO_LONG_TO_TRY = "The run is too long to replay here; a backtest replays it."


@router.get("/analysis.json")
def show_analysis(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """The lanes of detectors; values that are not finite are null."""
    with site.database.reading() as tx:
        run = visitor.load_run(tx, run_id)
        tracks = _load_tracks(tx, run, policies.read_policy(tx, run.policy_id))
    shown = [track.thin_out() for track in tracks or () if track.observes or any(track.values)]
    return send_json({"replayed": tracks is not None, "tracks": shown})


@router.get("/segments.json")
def show_segments(run_id: UUID, site: SiteOf, visitor: SignedIn) -> Response:
    """The rises, plateaus and falls of the eval in hindsight, as in the API."""
    with site.database.reading() as tx:
        segments = change_point.load_segments(tx, visitor.load_run(tx, run_id))
    return send_json({"available": change_point.AVAILABLE, "items": segments})


def _load_tracks(tx: Transaction, run: Run, policy: Policy) -> list[Track] | None:
    """The evidence of each member of the policy; None if the run cannot be replayed here."""
    policy = restrict_policy(policy, run)
    watch = WatchedMetrics(run, policy)
    # A detector that failed on it would fail again.
    if run.detector_failure or any(series.is_long_series(tx, run.id, metric) for metric in watch.metrics):
        return None
    points = observations.load_series(tx, run.id, watch.metrics)
    return replay_evidence(policy, watch.observations(points)) if len(points) <= MOST_REPLAYED else None


@dataclass
class Track:
    """A member of a policy: its evidence at each step where it changed, with its note; its thresholds (None: never);
    and the step of its first call for a stop. `observes`: it has no say."""

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
    tracks = list[Track]()
    for name, member in policy.panel.items():
        detector, limits, observes = member.detector, member.thresholds, len(tracks) >= len(policy.members)
        tracks.append(Track(name, detector.name, detector.kind, limits.suspect_at, limits.stop_at, observes))
    state = start(policy)
    previous: Sequence[Evidence | None] = [None] * len(tracks)
    for item in observations:
        state, _ = advance(policy, state, [item])
        for track, evidence, before in zip(tracks, state.evidence, previous, strict=True):
            if evidence is not None and evidence is not before:
                track.add_value(item.step, evidence.value, evidence.note)
        previous = state.evidence
    for track, call_step in zip(tracks, state.calls, strict=True):
        track.call_step = call_step
    return [track for track in tracks if track.steps]


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
            tried = policy_from_document(reference.document)
            replay = replay_run(tx, run, tried)
        except DetectorError as error:
            return _create_answer(f"{reference.name} cannot be replayed: {error}.")
    stop = next((verdict for verdict in replay.verdicts if verdict.stops), None)
    verb = "parked" if tried.action is Action.PARK else "stopped"
    if stop is None:
        until = "" if run.last_step is None else f" up to step {format_step(run.last_step)}, its last"
        return _create_answer(f"{tried.name} would not have {verb} this run{until}.", replay.verdicts[-1])
    return _create_answer(f"{tried.name} would have {verb} this run at step {format_step(stop.step or 0)}.", stop)


def _create_answer(sentence: str, verdict: ReplayedVerdict | None = None) -> Response:
    stops = verdict is not None and verdict.stops
    return send_json(
        {
            "sentence": sentence,
            "step": verdict.step if verdict is not None and stops else None,
            "reason": verdict.reason if verdict is not None else "",
        }
    )


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
