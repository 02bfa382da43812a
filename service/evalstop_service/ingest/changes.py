"""What messages change in a run: its row, its new observations, the answers. Pure, in memory.

`append` adds new observations in step order; nearly all messages contain nothing else. Whatever is not that is an edit
(`ingest.edits`): late and repeated observations, roles that may change, evals that have to be combined anew,
checkpoints, resumes; also observations of a run that has ended or whose row has to be corrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
from evalstop_detectors import MonitorState, Verdict, choose_best, find_highest, is_late, name_calls
from evalstop_detectors.roles.recognition import FIRST_EVALS, is_constant
from msgspec.structs import replace

from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.project_settings import LEAST_METRICS
from evalstop_service.domain.run import COMBINED_METRIC, BestCheckpoint, FirstCall, RawMaximum
from evalstop_service.domain.run import Verdict as RecordedVerdict
from evalstop_service.domain.statuses import OPEN, RunStatus
from evalstop_service.ingest.combined_evals import NO_SCORES, NewScores, append_values
from evalstop_service.ingest.messages import Answer, Content, Message, Observations, Receipt, ValueConflict
from evalstop_service.ingest.run_state import RunState, describe_failure, move_monitor
from evalstop_service.runs import metric_roles
from evalstop_service.runs.watched_metrics import OWN_METRICS, record_verdict, select_scores
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.run_details import EvalRequest
from evalstop_service.store.runs import FOUND_AGAIN, Run, RunChanges

MOST_UNWATCHED = 20
"""Metrics that a receipt lists as unwatched."""

LARGE = 1_000
"""A message of which detectors see more observations is made in a thread, as an edit: the event loop goes on."""

CHOICE_FAILED = "the choice of the best checkpoint failed"


class Changes(msgspec.Struct):
    """Messages applied to a run: what to save, and the answers to give once it is saved.

    `points`: new ones. `reached`: the verdicts at which the call changed. `request`: the paired evaluation that awaits
    its answer. `follows`: other rows than the run's and its observations' change too, see `ingest.consequences`. Of
    edits only: `content`, whose own rows are written; `scores`, of several combined evals, where stored scores are
    replaced; `kept`: a monitor to store; `settles_case`: evals or checkpoints arrived after the run's end; `seconds`:
    the processor time of the judgment.
    """

    before: RunState
    state: RunState
    answers: list[Answer]
    points: list[PostedObservation] = []
    reached: list[Verdict] = []
    request: EvalRequest | None = None
    follows: bool = False
    content: Content | None = None
    scores: NewScores = NO_SCORES
    kept: MonitorState | None = None
    settles_case: bool = False
    seconds: float = 0.0

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to save."""
        return self.state.run is not self.before.run

    @property
    def fails(self) -> bool:
        """Whether the run is no longer judged from here on."""
        return self.state.run.detector_failure is not None and self.before.run.detector_failure is None


def has_consequences(before: RunState, state: RunState, reached: Sequence[Verdict], *, has_eval: bool) -> bool:
    """Whether more has to be saved than new observations and the columns of the hot statement."""
    run, old, decision = state.run, before.run, state.decision
    return (
        bool(reached)
        or run.verdict.verdict is not old.verdict.verdict  # as where another release had judged it
        or (state.monitor.verdict.stops and decision is None and run.status == RunStatus.RUNNING)
        or (run.best_checkpoint is not old.best_checkpoint and place_of(run) != place_of(old))
        or state.keeps_monitor
        or run.detector_failure != old.detector_failure
        or run.calls is not old.calls
        or (bool(state.policy.asking) and state.requested_eval != before.requested_eval)
        # A new eval may change the decision: a stop on hold may be sent, a parked run may return.
        or (has_eval and decision is not None and decision.state == DecisionState.ON_HOLD)
        or (has_eval and decision is not None and decision.is_recovered(run.verdict))
    )


def place_of(run: Run) -> tuple[int, str] | None:
    """The step and address of the best checkpoint. Its smoothed score is left out: it changes with every eval."""
    best = run.best_checkpoint
    return (best.step, best.uri) if best else None


def choose_checkpoint(state: RunState) -> tuple[RunState, RunChanges]:
    """The state, and the columns of its best checkpoint and raw maximum.

    If the choice fails, the columns stay as they are, and the run is no longer judged.
    """
    scores, sign = state.scores, state.watch.eval_sign
    try:
        best, raw = choose_best(scores), find_highest(scores)
    except Exception as error:
        failure = describe_failure(state.run, CHOICE_FAILED, error)
        return replace(state, failure=state.failure or failure), {}
    chosen = None
    if best is not None:
        smoothed = None if best.smoothed is None else sign * best.smoothed
        address = scores.addresses[best.step]
        chosen = BestCheckpoint(best.step, address, sign * best.score, best.chosen_by, smoothed, best.smoothed_stderr)
    highest = None if raw is None else RawMaximum(raw.step, sign * raw.score)
    run = state.run  # what is the same object is not written
    return state, {
        "best_checkpoint": run.best_checkpoint if chosen == run.best_checkpoint else chosen,
        "raw_maximum": run.raw_maximum if highest == run.raw_maximum else highest,
    }


def settle_row(before: RunState, state: RunState, changes: RunChanges, now: datetime) -> Run:
    """The row of the run, updated to the state of its monitor."""
    verdict = state.monitor.verdict
    if verdict is not before.monitor.verdict or not before.agrees_with_row:
        changes["verdict"] = _record_changed(before, state)
    changes["detector_failure"] = state.failure
    if state.monitor.calls != before.monitor.calls:
        changes["calls"] = _record_calls(state, now)
    if before.run.status == RunStatus.LOST:
        changes = {**FOUND_AGAIN, **changes}
    return replace(state.run, version=before.run.version + 1, updated_at=now, **changes)


def _record_calls(state: RunState, now: datetime) -> dict[str, FirstCall]:
    """The first calls for the run's row; those that are known keep their time."""
    calls, known = name_calls(state.policy, state.monitor), state.run.calls
    return {
        name: known[name] if name in known and known[name].step == step else FirstCall(step, now)
        for name, step in calls.items()
        if step is not None
    }


def _record_changed(before: RunState, state: RunState) -> RecordedVerdict:
    """The verdict for the run's row; usually the recorded one at a later step."""
    verdict, recorded = state.monitor.verdict, before.monitor.verdict
    if (
        before.agrees_with_row
        and verdict.evidence is recorded.evidence
        and verdict.reason is recorded.reason
        and (verdict.verdict, verdict.turn_step) == (recorded.verdict, recorded.turn_step)
    ):
        return replace(state.run.verdict, step=verdict.step)
    return record_verdict(verdict)


def write_receipt(
    state: RunState,
    request: EvalRequest | None,
    accepted: int = 0,
    duplicates: int = 0,
    conflicts: tuple[ValueConflict, ...] = (),
) -> Receipt:
    """The receipt for observations that left the run in this state."""
    missing, unwatched = _list_unwatched(state)
    return Receipt(
        state.run,
        state.decision,
        accepted,
        duplicates,
        conflicts=conflicts,
        missing=missing,
        unwatched=unwatched,
        eval_request=request,
    )


def _list_unwatched(state: RunState) -> tuple[dict[str, str], list[str]]:
    """`Receipt.missing` and `Receipt.unwatched`."""
    metrics, last_steps = state.run.metrics, state.last_steps
    if state.watch.eval_metric is not None and metrics.keys() <= last_steps.keys():
        return {}, []
    missing = {metric: role["role"] for metric, role in metrics.items() if metric not in last_steps}
    unwatched = [metric for metric in last_steps if metric not in metrics and metric not in OWN_METRICS]
    return missing, unwatched[:MOST_UNWATCHED]


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
    if observations and (len(observations) > LARGE or is_late(state.monitor, observations[0])):
        return False
    state, reached = move_monitor(state, observations, pauses=False)
    columns: RunChanges = {"last_step": max(state.run.last_step or 0, *[point.step for point in points])}
    eval_metric = state.watch.eval_metric
    evals = [point for point in added if point.metric == eval_metric]
    if evals:
        before_evals = len(state.scores.steps)
        state = replace(state, scores=state.scores.add_scores(select_scores(state.run, evals)))
        if (
            before_evals < FIRST_EVALS
            and is_constant(state.scores.values.tolist())
            and metric_roles.is_open(state.run)
            and metric_roles.depends_on_values(state.run)
        ):
            return False  # another metric may be the eval
        state, chosen = choose_checkpoint(state)
        columns |= chosen
    state = replace(state, run=settle_row(before, state, columns, now))
    changes.state = state
    changes.points += added
    changes.reached += reached
    changes.follows = has_consequences(before, state, changes.reached, has_eval=bool(evals))
    changes.answers.append(write_receipt(state, changes.request, len(points)))
    return True


def find_last_steps(state: RunState, points: Sequence[PostedObservation]) -> dict[str, int] | None:
    """The last steps with these observations; None if one of them is late or repeated, or has a new metric that may
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
