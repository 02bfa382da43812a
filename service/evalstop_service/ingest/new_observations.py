"""Classifies a batch: observations past all stored ones, late ones, repeats and contradictions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from evalstop_service.errors import QuotaReached
from evalstop_service.ingest.facts import NOTHING_NEEDED, Facts, Needs
from evalstop_service.ingest.messages import ValueConflict
from evalstop_service.ingest.run_state import RunState
from evalstop_service.rules.quotas import LEAST_METRICS, Quota
from evalstop_service.runs import metric_roles
from evalstop_service.runs.watched_metrics import OWN_METRICS
from evalstop_service.store.observations import PostedObservation


class NewObservations(msgspec.Struct):
    """What a batch adds to a run.

    `points`: the new ones, of which `late` are not past the last step of their metric. `last_steps`: of each metric,
    with the new ones. `names`: all metrics of the run, if some are new and the roles have to be assigned again.
    """

    points: list[PostedObservation]
    late: list[PostedObservation]
    conflicts: tuple[ValueConflict, ...]
    last_steps: dict[str, int]
    names: set[str] | None


def find_new(state: RunState, points: Sequence[PostedObservation], facts: Facts) -> NewObservations | Needs:
    """What these observations add to the run. Raises QuotaReached if they have too many metrics; then none is stored.

    One past the last step of its metric is new; any other has to be looked up.
    """
    names = _find_new_names(state, points) if metric_roles.is_open(state.run) else None
    fresh, doubtful, last_steps = _sort(state, points)
    needs, quota_applies = NOTHING_NEEDED, len(last_steps) > max(LEAST_METRICS, len(state.last_steps))
    if doubtful or names is not None or quota_applies:
        identities = frozenset(point.identity for point in doubtful)
        needs = Needs(identities, role_patterns=names is not None, metrics_quota=quota_applies)
    if missing := facts.find_missing(needs):
        return missing
    if quota_applies and len(last_steps) > facts.metrics_quota:
        raise QuotaReached(Quota.METRICS_PER_RUN, facts.metrics_quota)
    late, conflicts = _compare_with_stored(fresh, doubtful, facts.values) if doubtful else ([], ())
    return NewObservations(fresh + late, late, conflicts, last_steps, names)


def _find_new_names(state: RunState, points: Sequence[PostedObservation]) -> set[str] | None:
    """All metric names of a run including those that these observations introduce; None when they introduce none."""
    last_steps, roles = state.last_steps, state.run.metrics
    new = {
        point.metric for point in points if point.metric not in last_steps and point.metric not in roles
    } - OWN_METRICS
    if not new:
        return None
    known_names = (last_steps.keys() | roles.keys()) - OWN_METRICS
    return known_names | new if len(known_names) < metric_roles.MOST_NAMES else None


def _sort(
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


def _compare_with_stored(
    fresh: Sequence[PostedObservation], doubtful: Sequence[PostedObservation], stored: Mapping[tuple[str, int], float]
) -> tuple[list[PostedObservation], tuple[ValueConflict, ...]]:
    """The looked-up observations that are new, and those that contradict stored ones; the others are repeats."""
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
