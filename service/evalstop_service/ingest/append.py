"""Appends new observations in step order to a run, which is what nearly all messages bring. Pure, in memory.

Whatever is not that is an edit (`ingest.edits`): late and repeated observations, roles that may change, evals that have
to be combined anew, checkpoints, resumes; also observations of a run that has ended or whose row has to be corrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from evalstop_detectors import is_late
from msgspec.structs import replace

from evalstop_service.domain.quotas import LEAST_METRICS
from evalstop_service.domain.run import COMBINED_METRIC
from evalstop_service.domain.statuses import OPEN
from evalstop_service.ingest.changes import Changes, choose_checkpoint, has_consequences, settle_row, write_receipt
from evalstop_service.ingest.combined_evals import NO_SCORES, append_values
from evalstop_service.ingest.messages import Message, Observations
from evalstop_service.ingest.run_state import RunState, move_monitor
from evalstop_service.runs import metric_roles
from evalstop_service.runs.watched_metrics import OWN_METRICS, select_scores
from evalstop_service.store.eval_requests import EvalRequest
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import RunChanges


def append(before: RunState, messages: Sequence[Message], request: EvalRequest | None, now: datetime) -> Changes:
    """Append the messages of a run in order, up to the first with consequences, or that is an edit: without an answer.

    `request`: the paired evaluation that awaits its answer.
    """
    run = before.run
    changes = Changes(before, before, [], request=request)
    if run.status not in OPEN or run.pruned_at is not None or not before.agrees_with_row:
        return changes
    for message in messages:
        content = message.content
        if not isinstance(content, Observations) or message.project_id != run.project_id:
            break
        if not _append_observations(changes, content.points, now) or changes.follows:
            break
    return changes


def _append_observations(changes: Changes, points: Sequence[PostedObservation], now: datetime) -> bool:
    """Add a batch to the changes; False, and nothing added, if it is an edit.

    1. Each observation is past the last step of its metric, and no metric's name may change the roles.
    2. Several evals are combined into one score, which is treated as the eval from here on.
    3. Step the detectors.
    4. Add new evals to the scores, and choose the best checkpoint.
    5. Update the row, and determine whether other rows follow from it.
    """
    before, state = changes.before, changes.state
    last_steps = find_last_steps(state, points)
    if last_steps is None:
        return False
    state = replace(state, last_steps=last_steps)
    added: Sequence[PostedObservation] = points
    if state.watch.combined:
        appended = append_values(state, points)
        if appended is None or COMBINED_METRIC in {point.metric for point in points}:
            return False
        state, scores = appended
        added = [*points, *scores.points] if scores is not NO_SCORES else points
    observations = state.watch.observations(added)
    if observations and is_late(state.monitor, observations[0]):
        return False
    state, reached = move_monitor(state, observations)
    verdict = state.monitor.verdict
    if state.watch.combined and verdict.stops and verdict is not before.monitor.verdict:
        return False  # its reason names the evals that fell, for which all are needed
    columns: RunChanges = {"last_step": max(before.run.last_step or 0, *[point.step for point in points])}
    eval_metric = state.watch.eval_metric
    evals = [point for point in added if point.metric == eval_metric]
    if evals:
        state = replace(state, scores=state.scores.add_scores(select_scores(state.run, evals)))
        state, chosen = choose_checkpoint(state)
        columns |= chosen
    columns["last_step"] = max(columns["last_step"] or 0, changes.state.run.last_step or 0)
    state = replace(state, run=settle_row(before, state, columns, now))
    changes.state = state
    changes.points += added
    changes.reached += reached
    changes.follows = has_consequences(before, state, changes.reached, has_eval=bool(evals))
    changes.answers.append(write_receipt(state, changes.request, len(points)))
    return True


def find_last_steps(state: RunState, points: Sequence[PostedObservation]) -> dict[str, int] | None:
    """The last steps with these observations; None if one of them is not past them, or brings a metric whose name may
    change the roles or exceed the quota."""
    if not points:
        return None
    last_steps = state.last_steps.copy()
    for point in points:
        if point.step <= last_steps.get(point.metric, -1):
            return None
        last_steps[point.metric] = point.step
    if len(last_steps) > len(state.last_steps):
        if len(last_steps) > LEAST_METRICS:
            return None
        roles = state.run.metrics.keys() | OWN_METRICS
        new = last_steps.keys() - state.last_steps.keys() - roles
        if new and metric_roles.is_open(state.run):
            return None
    return last_steps
