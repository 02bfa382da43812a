"""Classifies a batch: observations past all stored ones, late ones, repeats and contradictions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evalstop_service.ingest.messages import ValueConflict
from evalstop_service.ingest.run_state import RunState
from evalstop_service.runs import metric_roles
from evalstop_service.runs.watched_metrics import OWN_METRICS
from evalstop_service.store.observations import PostedObservation


def find_new_names(state: RunState, points: Sequence[PostedObservation]) -> set[str] | None:
    """All metric names of a run including those that these observations introduce; None when they introduce none."""
    last_steps, roles = state.last_steps, state.run.metrics
    new = {
        point.metric for point in points if point.metric not in last_steps and point.metric not in roles
    } - OWN_METRICS
    if not new:
        return None
    known_names = (last_steps.keys() | roles.keys()) - OWN_METRICS
    return known_names | new if len(known_names) < metric_roles.MOST_NAMES else None


def sort_observations(
    state: RunState, points: Sequence[PostedObservation]
) -> tuple[list[PostedObservation], list[PostedObservation], dict[str, int]]:
    """Observations past all stored ones, those whose identities have to be looked up, and the metrics' last steps."""
    last_steps = state.last_steps.copy()
    fresh: list[PostedObservation] = []
    doubtful: list[PostedObservation] = []
    for point in points:
        if point.step > last_steps.get(point.metric, -1):
            last_steps[point.metric] = point.step
            fresh.append(point)
        else:
            doubtful.append(point)
    return fresh, doubtful, last_steps


def compare_with_stored(
    fresh: Sequence[PostedObservation], doubtful: Sequence[PostedObservation], stored: Mapping[tuple[str, int], float]
) -> tuple[list[PostedObservation], tuple[ValueConflict, ...]]:
    """The looked-up observations that are new, and those that contradict stored ones; the others are repeats."""
    if not doubtful:
        return [], ()
    values = {**stored, **{point.identity: point.value for point in fresh}}
    new: list[PostedObservation] = []
    conflicts: list[ValueConflict] = []
    for point in doubtful:
        value = values.get(point.identity)
        if value is None:
            values[point.identity] = point.value
            new.append(point)
        elif value != point.value and not (value != value and point.value != point.value):  # NaN repeats NaN
            conflicts.append(ValueConflict(point, value))
    return new, tuple(conflicts)
