"""Combines several evals of a run into one score series, which all other code treats as the run's eval. Pure.

values past the last score ──> further scores, stored like posted observations
a late value, other roles, another measurement ──> the scores from there on are computed and stored again
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
from evalstop_detectors import CombinedState, EvalValue, Score, combine_values, start_combining
from evalstop_detectors.wording import format_percent
from msgspec.structs import replace

from evalstop_service.errors import Conflict
from evalstop_service.ingest.facts import NOTHING_NEEDED, Facts, Needs
from evalstop_service.ingest.run_state import RunState, describe_failure
from evalstop_service.rules.role_recognition import COMBINED_METRIC
from evalstop_service.runs.watched_metrics import select_eval_values
from evalstop_service.store.observations import PostedObservation

LEAST_SHARE = 0.1
"""The least share of the score's fall for which an eval is named."""

COMBINING_FAILED = "the combination of the evals failed"


class NewScores(msgspec.Struct, frozen=True):
    """Scores to store. `first_step`: stored scores from this step on are replaced; None: none are.

    `failure`: why they could not be computed.
    """

    points: Sequence[PostedObservation] = ()
    first_step: int | None = None
    failure: str | None = None

    def drop_outdated(self, facts: Facts) -> Facts:
        """The facts without the stored scores that are replaced."""
        first = self.first_step
        if first is None:
            return facts
        return replace(facts, points=tuple(p for p in facts.points if p.metric != COMBINED_METRIC or p.step < first))

    def replace_in(self, facts: Facts) -> Facts:
        """The facts with these scores merged into the stored ones."""
        current = self.drop_outdated(facts)
        return replace(current, points=(*current.points, *self.points))

    def pass_failure(self, state: RunState) -> RunState:
        """The state, no longer judged if the scores could not be computed."""
        return state if self.failure is None else replace(state, failure=state.failure or self.failure)


NO_SCORES = NewScores()


def refuse_own_scores(state: RunState, points: Sequence[PostedObservation]) -> None:
    """Raise Conflict when a trainer posts the metric that the service computes."""
    if any(point.metric == COMBINED_METRIC for point in points):
        raise Conflict(f"{COMBINED_METRIC} is computed from the evals {', '.join(state.watch.combined)}; rename it")


def needs_of_evals(state: RunState, fresh: Sequence[PostedObservation] | None) -> Needs:
    """The stored evals, if the scores cannot be continued from memory; `fresh` is None: they never can."""
    values = None if fresh is None else select_eval_values(state.run, fresh)
    if not state.watch.combined or (values is not None and (not values or _goes_on(state, values))):
        return NOTHING_NEEDED
    return Needs(series=tuple((metric, 0) for metric in state.watch.combined))


def add_values(state: RunState, facts: Facts, fresh: Sequence[PostedObservation]) -> tuple[RunState, NewScores]:
    """The state with new values of its evals, and the scores that follow."""
    values = select_eval_values(state.run, fresh)
    if not values:
        return state, NO_SCORES
    last = state.last_steps.get(COMBINED_METRIC, -1)
    try:
        if _goes_on(state, values):
            assert state.combined is not None, "a state that can be continued is in memory"
            combined, scores = combine_values(_weights(state), state.combined, values)
        else:
            combined, scores = _combine_all(state, [*facts.points, *fresh])
    except Exception as error:
        return _fail_to_combine(state, error)
    first = values[0].step
    is_late = first <= last
    points = _to_observations(scores, first if is_late else last + 1)
    last_steps = {**state.last_steps, COMBINED_METRIC: points[-1].step} if points else state.last_steps
    state = replace(state, combined=combined, last_steps=last_steps)
    return state, NewScores(points, first if is_late else None)


def combine_anew(state: RunState, facts: Facts, first_step: int = 0) -> tuple[RunState, NewScores]:
    """The state and its scores from this step on, after weights, metrics or measurements changed."""
    if not state.watch.combined:
        is_stored = COMBINED_METRIC in state.last_steps
        last_steps = {metric: step for metric, step in state.last_steps.items() if metric != COMBINED_METRIC}
        state = replace(state, combined=None, last_steps=last_steps)
        return state, NewScores((), 0) if is_stored else NO_SCORES
    try:
        combined, scores = _combine_all(state, facts.points)
    except Exception as error:
        return _fail_to_combine(state, error)
    points = _to_observations(scores, first_step)
    last_steps = dict(state.last_steps)
    if points:
        last_steps[COMBINED_METRIC] = points[-1].step
    return replace(state, combined=combined, last_steps=last_steps), NewScores(points, first_step)


def needs_of_reason(before: RunState, state: RunState) -> Needs:
    """The stored evals, if a stop was just reached: its reason names the evals that fell."""
    verdict = state.monitor.verdict
    return needs_of_evals(state, None) if verdict.stops and verdict is not before.monitor.verdict else NOTHING_NEEDED


def name_fallen_evals(before: RunState, state: RunState, points: Iterable[PostedObservation]) -> str | None:
    """The evals that lowered the score when the stop was reached, largest share first; None without a new stop."""
    verdict = state.monitor.verdict
    if needs_of_reason(before, state) is NOTHING_NEEDED or verdict.step is None:
        return None
    try:
        combined, _ = _combine_all(state, [point for point in points if point.step <= verdict.step])
    except Exception as error:  # the stop stands without this part of its reason
        describe_failure(state.run, COMBINING_FAILED, error)
        return None
    falls = zip(combined.falls, state.watch.combined, strict=True)
    fallen = sorted(((fall, metric) for fall, metric in falls if fall > 0), reverse=True)
    total = math.fsum(fall for fall, _ in fallen)
    shares = [(fall / total, metric) for fall, metric in fallen if fall >= LEAST_SHARE * total]
    descriptions = [f"{metric} ({format_percent(share)} of the fall)" for share, metric in shares]
    return f"fallen evals: {', '.join(descriptions)}" if descriptions else ""


def _fail_to_combine(state: RunState, error: Exception) -> tuple[RunState, NewScores]:
    failure = describe_failure(state.run, COMBINING_FAILED, error)
    return replace(state, combined=None), NewScores(failure=failure)


def _goes_on(state: RunState, values: Sequence[EvalValue]) -> bool:
    """Whether these values can be appended to the state in memory."""
    combined = state.combined
    if combined is None:
        return False
    first = values[0].step
    pending = combined.pending[0].step if combined.pending else 0
    return first > state.last_steps.get(COMBINED_METRIC, -1) and first >= pending


def _combine_all(state: RunState, points: Sequence[PostedObservation]) -> tuple[CombinedState, list[Score]]:
    values = select_eval_values(state.run, points)
    return combine_values(_weights(state), start_combining(len(state.watch.combined)), values)


def _weights(state: RunState) -> tuple[float, ...]:
    return tuple(state.watch.combined.values())


def _to_observations(scores: Sequence[Score], first_step: int) -> list[PostedObservation]:
    return [
        PostedObservation(COMBINED_METRIC, score.step, score.value, score.stderr)
        for score in scores
        if score.step >= first_step
    ]
