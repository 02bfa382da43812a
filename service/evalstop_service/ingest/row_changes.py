"""Updates a run's row with new evals, checkpoints and verdicts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter

from evalstop_detectors import Verdict, choose_best, find_highest
from msgspec.structs import replace

from evalstop_service.evaluation import change_point
from evalstop_service.ingest.facts import Facts
from evalstop_service.ingest.run_state import CHOICE_FAILED, RunState, Scores, describe_failure
from evalstop_service.rules import run_results
from evalstop_service.rules.run_results import BestCheckpoint, RawMaximum
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.runs import watched_metrics
from evalstop_service.runs.recorded_verdict import record_verdict
from evalstop_service.store.checkpoints import Checkpoint
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import FOUND_AGAIN, RunChanges


def add_evals(
    state: RunState,
    scores: Scores | None,
    facts: Facts,
    evals: Sequence[PostedObservation],
    saved: Sequence[Checkpoint] = (),
    *,
    turned: bool = False,
) -> tuple[RunState, RunChanges]:
    """The state with new evals and checkpoints in its scores, and the columns that they change.

    `scores`: extended; None: built from what was loaded. If this fails, the columns stay as they are, and the run is no
    longer judged.
    """
    try:
        return _add_evals(state, scores, facts, evals, saved, turned)
    except Exception as error:
        failure = describe_failure(state.run, CHOICE_FAILED, error)
        return replace(state, scores=None, scores_count=0, failure=state.failure or failure), {}


def _add_evals(
    state: RunState,
    scores: Scores | None,
    facts: Facts,
    evals: Sequence[PostedObservation],
    saved: Sequence[Checkpoint],
    turned: bool,
) -> tuple[RunState, RunChanges]:
    eval_metric, run = state.watch.eval_metric, state.run
    if eval_metric is None:
        return replace(state, scores=None), {"best_checkpoint": None, "raw_maximum": None}
    stored = [point for point in facts.points if point.metric == eval_metric]
    if scores is None:
        scores = Scores(watched_metrics.select_scores(run, sorted([*stored, *evals], key=_STEP)), facts.checkpoints)
    else:
        scores.add_scores(watched_metrics.select_scores(run, evals))
    scores.add_checkpoints(saved)
    raw, sign = find_highest(scores.all), state.watch.eval_sign
    changes: RunChanges = {
        "best_checkpoint": _describe_best(scores, sign),
        "raw_maximum": RawMaximum(raw.step, sign * raw.score) if raw else None,
    }
    if turned:
        changes["turn"] = change_point.find_change_point(
            watched_metrics.select_scores(run, sorted([*stored, *evals], key=_STEP))
        )
    return replace(state, scores=scores, scores_count=scores.count), changes


def _describe_best(scores: Scores, sign: float) -> BestCheckpoint | None:
    """The best checkpoint with its address; its scores are in the metric's own direction."""
    best = choose_best(scores.all)
    if best is None:
        return None
    smoothed = None if best.smoothed is None else sign * best.smoothed
    return BestCheckpoint(
        best.step, scores.uris[best.step], sign * best.score, best.chosen_by, smoothed, best.smoothed_stderr
    )


def settle_row(
    state: RunState,
    changes: RunChanges,
    version: int,
    now: datetime,
    *,
    rewritten: bool = False,
    fallen: str | None = None,
) -> RunState:
    """The state with its row updated to the state of its monitor.

    `fallen`: appended to the reason of a stop that was just reached.
    """
    run, verdict = state.run, state.monitor.verdict
    if verdict is not state.recorded:
        changes["verdict"] = _record_changed(state, verdict, fallen)
    if state.failure is not None or "best_checkpoint" in changes:  # a choice that failed must succeed first
        changes["detector_failure"] = state.failure
    if rewritten:
        changes["rewritten_version"] = version
    if run.status == RunStatus.LOST:
        changes |= FOUND_AGAIN
    return replace(state, run=replace(run, version=version, updated_at=now, **changes), recorded=verdict)


def _record_changed(state: RunState, verdict: Verdict, fallen: str | None) -> run_results.Verdict:
    """The verdict for the run's row; usually the recorded one at a later step."""
    recorded, in_row = state.recorded, state.run.verdict
    if (
        recorded is not None
        and verdict.evidence is recorded.evidence
        and verdict.reason is recorded.reason
        and (verdict.verdict, verdict.turn_step) == (recorded.verdict, recorded.turn_step)
    ):
        return replace(in_row, step=verdict.step)
    if state.watch.combined and fallen is None and is_same_stop(verdict, in_row):
        return in_row
    changed = record_verdict(verdict)
    return replace(changed, reason=f"{changed.reason}; {fallen}") if fallen else changed


def is_same_stop(verdict: Verdict, recorded: run_results.Verdict) -> bool:
    """Whether this is the recorded stop, whose reason may have been extended."""
    is_stop = verdict.stops and recorded.verdict is run_results.Call.STOP
    return is_stop and recorded.step == verdict.step and recorded.reason.startswith(verdict.reason)


_STEP = attrgetter("step")
