"""Combines several evals of a run into one score series, which all other code treats as the run's eval. Pure.

values past the last score ──> further scores, stored like posted observations
a late value, other roles, another measurement ──> the scores from there on are computed and stored again
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from evalstop_detectors import CombinedState, EvalValue, Score, combine_values
from msgspec.structs import replace

from evalstop_service.domain.run import COMBINED_METRIC
from evalstop_service.errors import Conflict
from evalstop_service.ingest.run_state import RunState, describe_failure
from evalstop_service.runs.watched_metrics import select_eval_values, start_run_combining
from evalstop_service.store.observations import PostedObservation

COMBINING_FAILED = "the combination of the evals failed"


class NewScores(msgspec.Struct, frozen=True):
    """Scores to store. `first_step`: stored scores from this step on are replaced; None: none are. `failure`: why they
    could not be computed."""

    points: Sequence[PostedObservation] = ()
    first_step: int | None = None
    failure: str | None = None


NO_SCORES = NewScores()


def refuse_own_scores(state: RunState, points: Sequence[PostedObservation]) -> None:
    """Raise Conflict when a trainer posts the metric that the service computes."""
    if any(point.metric == COMBINED_METRIC for point in points):
        raise Conflict(f"{COMBINED_METRIC} is computed from the evals {', '.join(state.watch.combined)}; rename it")


def append_values(state: RunState, points: Sequence[PostedObservation]) -> tuple[RunState, NewScores] | None:
    """The state with new values of its evals, and the scores that follow; None: all have to be combined again."""
    values = select_eval_values(state.run, points)
    if not values:
        return state, NO_SCORES
    if state.combined is None or not _is_in_order(state, state.combined, values):
        return None
    try:
        combined, scores = combine_values(_weights(state), state.combined, values)
    except Exception:  # so that the edit, which tries it again, records the failure
        return None
    return _with_scores(replace(state, combined=combined), scores, None)


def combine_anew(
    state: RunState, points: Iterable[PostedObservation], first_step: int | None
) -> tuple[RunState, NewScores]:
    """The state with the scores of all its evals. `first_step`: from here on stored ones are replaced; None: the new
    ones follow them."""
    if not state.watch.combined:
        is_stored = COMBINED_METRIC in state.last_steps
        last_steps = {metric: step for metric, step in state.last_steps.items() if metric != COMBINED_METRIC}
        return replace(state, combined=None, last_steps=last_steps), NewScores((), 0) if is_stored else NO_SCORES
    try:
        values = select_eval_values(state.run, points)
        combined, scores = combine_values(_weights(state), start_run_combining(state.run), values)
    except Exception as error:
        failure = describe_failure(state.run, COMBINING_FAILED, error)
        return replace(state, combined=None), NewScores(failure=failure)
    return _with_scores(replace(state, combined=combined), scores, first_step)


def _is_in_order(state: RunState, combined: CombinedState, values: Sequence[EvalValue]) -> bool:
    first = values[0].step
    pending = combined.pending[0].step if combined.pending else 0
    return first > state.last_steps.get(COMBINED_METRIC, -1) and first >= pending


def _with_scores(state: RunState, scores: Sequence[Score], first_step: int | None) -> tuple[RunState, NewScores]:
    first = state.last_steps.get(COMBINED_METRIC, -1) + 1 if first_step is None else first_step
    points = [
        PostedObservation(COMBINED_METRIC, score.step, score.value, score.stderr)
        for score in scores
        if score.step >= first
    ]
    if points:
        state = replace(state, last_steps={**state.last_steps, COMBINED_METRIC: points[-1].step})
    return state, NewScores(points, first_step)


def _weights(state: RunState) -> tuple[float, ...]:
    return tuple(state.watch.combined.values())
