"""Edits: whatever changes a run's past, or needs more than its state in memory. A kind of edit is one function.

`group_commit` carries them out in threads. Nothing here writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from evalstop_detectors import Scores, is_late, start
from msgspec.structs import replace

from evalstop_service.domain.decision_lifecycle import AWAITING_CONFIRMATION, STOPPING, DecisionState
from evalstop_service.domain.project_settings import LEAST_METRICS
from evalstop_service.domain.run import COMBINED_METRIC, MOST_CHANGES, EvalChange, add_change, carry_into_attempt
from evalstop_service.domain.statuses import OPEN, RunStatus
from evalstop_service.errors import Conflict, NotFound, QuotaReached
from evalstop_service.evaluation import change_point
from evalstop_service.ingest.changes import Changes, choose_checkpoint, settle_row, write_receipt
from evalstop_service.ingest.combined_evals import (
    NO_SCORES,
    NewScores,
    append_values,
    combine_anew,
    refuse_own_scores,
)
from evalstop_service.ingest.load import compare_with_stored, find_stored_monitor
from evalstop_service.ingest.messages import (
    CheckpointSaved,
    Content,
    EvalAnswered,
    EvalChanged,
    Exploited,
    Observations,
    Receipt,
    Resumed,
    RolesCorrected,
)
from evalstop_service.ingest.run_state import RunState, move_monitor, observations_past, with_eval_changes, with_roles
from evalstop_service.runs import metric_roles
from evalstop_service.runs.watched_metrics import OWN_METRICS, select_scores
from evalstop_service.store import decisions, ingest, observations, projects, run_details, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.run_details import EvalRequest
from evalstop_service.store.runs import RunChanges

BEGINNING = (-1, -1)
"""Before every observation."""


class Edit:
    """One edit: the state of a run before it, the rows that it reads, and what it changes.

    `require_share` is called before a replay; it raises TooOften if the key may not cause another one.
    """

    def __init__(
        self,
        tx: Transaction,
        before: RunState,
        request: EvalRequest | None,
        now: datetime,
        require_share: Callable[[], None],
    ) -> None:
        self._tx, self._before, self._now = tx, before, now
        self._require_share = require_share
        self._changes = Changes(before, before, [], request=request)
        self.has_replayed = False

    def apply(self, content: Content) -> Changes:
        """The changes that a message makes. Raises Conflict, QuotaReached and TooOften; then nothing changes."""
        self._changes.content, self._changes.follows = content, True
        match content:
            case Observations(points):
                self._add_observations(points)
            case EvalAnswered():
                self._answer_request(content)
            case CheckpointSaved():
                self._add_checkpoint(content)
            case Resumed():
                self._resume(content)
            case Exploited():
                self._exploit(content)
            case RolesCorrected():
                self._correct_roles(content)
            case EvalChanged():
                self._change_eval(content)
        return self._changes

    def _add_observations(self, points: Sequence[PostedObservation]) -> None:
        """Store new observations, in any order.

        1. Find out which are new, repeats, or contradict stored ones.
        2. Assign roles to new metrics, and combine several evals into one score.
        3. Judge the run from the first observation that the detectors have not seen.
        """
        before = self._before
        new, conflicts = compare_with_stored(self._tx, before, points)
        state = self._assign_roles(points, new)
        last_steps = dict(state.last_steps)
        for point in new:
            last_steps[point.metric] = max(point.step, last_steps.get(point.metric, -1))
        state, scores = self._combine(replace(state, last_steps=last_steps), points, new)
        duplicates = len(points) - len(new) - len(conflicts)
        if not new and before.agrees_with_row:
            self._changes.answers = [write_receipt(before, self._changes.request, 0, duplicates, conflicts)]
            return
        if not new:
            self._changes.content = None
        added, watch = [*new, *scores.points], state.watch
        recast = watch is not before.watch
        seen = watch.observations(added)
        evals = [point for point in added if point.metric == watch.eval_metric]
        since = BEGINNING if recast else seen[0].order if seen and is_late(state.monitor, seen[0]) else None
        if since is not None:
            state = self._replay(state, since, added, scores, rescored=recast)
        else:
            state, self._changes.reached = move_monitor(state, seen)
        if evals and not recast:
            kept = state.scores if scores.first_step is None else state.scores.before(scores.first_step)
            state = replace(state, scores=kept.add_scores(select_scores(state.run, evals)))
        state = replace(state, failure=state.failure or scores.failure)
        changes: RunChanges = {}
        if new:
            changes["last_step"] = max(before.run.last_step or 0, *[point.step for point in new])
        is_rewritten = since is not None or any(
            point.step <= before.last_steps.get(point.metric, -1) for point in evals
        )
        self._changes.points = new if scores.first_step is not None else added
        self._changes.scores = scores
        self._settle(state, changes, is_rewritten=is_rewritten, is_rescored=recast or bool(evals))
        self._changes.answers = [
            write_receipt(self._changes.state, self._changes.request, len(new), duplicates, conflicts)
        ]

    def _answer_request(self, content: EvalAnswered) -> None:
        """Store the difference found by a paired evaluation, usually a late observation at the step of its request."""
        run = self._before.run
        if content.attempt != run.attempt:
            raise Conflict(f"the request is of attempt {content.attempt}, but the run is in attempt {run.attempt}")
        self._add_observations([content.point])

    def _add_checkpoint(self, content: CheckpointSaved) -> None:
        """Add a checkpoint unless it is known, and choose the best one again."""
        state, step = self._before, content.step
        uri = state.scores.addresses.get(step)
        if uri is not None and uri != content.uri:
            raise Conflict(f"the checkpoint of step {step} is already stored at {uri!r}; its address cannot change")
        if uri is not None:
            self._leave_unchanged(created=False)
            return
        state = replace(state, scores=state.scores.add_checkpoints({step: content.uri}))
        self._settle(state, {}, is_rescored=True)

    def _resume(self, content: Resumed) -> None:
        """Begin a new attempt at a step unless it was already begun there: observations past the step no longer count.

        The first attempt was begun at step 0.
        """
        tx, run, step = self._tx, self._before.run, content.step
        saved = run_details.list_checkpoints(tx, run.id)
        is_empty = not any(item.attempt == run.attempt for item in saved)
        is_empty = is_empty and not observations.has_observations(tx, run.id, run.attempt)
        if run.status in OPEN and (runs.get_resumed_step(tx, run) or 0) == step and is_empty:
            self._leave_unchanged()
            return
        self._begin_attempt(step, carry_into_attempt(run.eval_changes, step))

    def _exploit(self, content: Exploited) -> None:
        """Begin a new attempt at the step of the copied checkpoint: evals after it are measured of another lineage.

        A copy that was confirmed before changes nothing. Raises Conflict where it may not be made any more.
        """
        run = self._before.run
        decision = decisions.load_decision(self._tx, run.project_id, content.decision_id)
        copy = decision.exploit
        if copy is None or decision.run_id != run.id:
            raise NotFound(f"there is no copy {content.decision_id} of this run")
        if decision.state is DecisionState.CONFIRMED:
            self._leave_unchanged()
            return
        if decision.attempt != run.attempt:
            raise Conflict(f"the copy is of attempt {decision.attempt}, but the run is in attempt {run.attempt}")
        if decision.handed_over_at is None or decision.state not in AWAITING_CONFIRMATION | {DecisionState.FAILED}:
            raise Conflict(
                f"the copy is {decision.state} ({decision.state_reason}); go on from the run's own checkpoint"
            )
        if self._before.decision is not None and self._before.decision.state in STOPPING:
            raise Conflict(f"the run is to stop ({self._before.decision.state_reason}), not to copy another")
        step, kept = copy.source_step, [item for item in run.eval_changes if item.step <= copy.source_step]
        version = run.eval_changes[-1].version if run.eval_changes else None
        reason = f"copy of {copy.source_name} at step {step}"
        self._begin_attempt(step, (*kept, EvalChange(step + 1, reason, content.actor, self._now, version)))

    def _begin_attempt(self, step: int, eval_changes: tuple[EvalChange, ...]) -> None:
        """Begin a new attempt after this step, with these changes of the eval."""
        tx, before, run = self._tx, self._before, self._before.run
        saved = run_details.list_checkpoints(tx, run.id)
        follows = before.decision is not None and before.decision.follows_run
        last_steps = observations.load_last_steps(tx, [run], until=step)[run.id]
        scores = Scores().add_checkpoints({item.step: item.uri for item in saved if item.step <= step})
        state = with_eval_changes(before, eval_changes)
        state = replace(state, scores=scores, last_steps=last_steps, combined=None)
        if not follows:
            state = replace(state, decision=None)
        state = self._replay(state, (step + 1, -1), [], NO_SCORES, rescored=True, until=step)
        changes: RunChanges = {
            "attempt": run.attempt + 1,
            "exploit": None,
            "status": run.status if run.status in OPEN and follows else RunStatus.RUNNING,
            "ended_at": None,
            "turn": None,
            "last_step": max(last_steps.values(), default=None),
        }
        self._settle(state, changes, is_rewritten=True, is_rescored=True, is_settled=False)
        self._changes.answers = [Receipt(self._changes.state.run, None)]

    def _correct_roles(self, content: RolesCorrected) -> None:
        """Assign the roles that a person gives, and judge the run again with them."""
        run, roles = self._before.run, metric_roles.correct_roles(self._before.run, content.metrics)
        if (run.metrics, run.recognition) == roles:
            self._leave_unchanged()
            return
        self._judge_again(with_roles(self._before, roles), BEGINNING)

    def _change_eval(self, content: EvalChanged) -> None:
        """Add a change of the eval's measurement, and judge the run again from its step; a known one has no effect."""
        run = self._before.run
        change = EvalChange(content.step, content.reason, content.actor, self._now, content.version)
        changes = add_change(run.eval_changes, change)
        if changes == run.eval_changes:
            self._leave_unchanged(created=False)
            return
        if len(changes) > MOST_CHANGES:
            raise Conflict(f"the eval of run {run.name!r} has changed {MOST_CHANGES} times; no more changes are stored")
        self._judge_again(with_eval_changes(self._before, changes), (content.step, -1))

    def _judge_again(self, state: RunState, since: tuple[int, int]) -> None:
        """Judge the run with what changed from `since` on, where several evals are combined again."""
        state, scores = combine_anew(state, self._load_evals(state), max(since[0], 0))
        last = state.monitor.last
        if since == BEGINNING or (last is not None and since <= last):
            state = self._replay(state, since, scores.points, scores, rescored=True)
        elif state.watch.eval_metric is not None:  # the policy does not watch it, or has not seen it yet
            points = self._load_observations({state.watch.eval_metric: 0})
            state = _collect_scores(state, [*_keep_valid(points, scores), *scores.points])
        state = replace(state, failure=state.failure or scores.failure)
        self._changes.scores = scores
        self._settle(state, {}, is_rewritten=True, is_rescored=True)

    def _leave_unchanged(self, *, created: bool = True) -> None:
        """Answer a message that was applied before."""
        self._changes.answers = [Receipt(self._before.run, self._before.decision, created=created)]

    def _assign_roles(self, points: Sequence[PostedObservation], new: Sequence[PostedObservation]) -> RunState:
        """The state with the roles of its metrics, whose names may be new, as the first values of a guessed eval.
        Raises QuotaReached if they are too many."""
        state, run = self._before, self._before.run
        seen = state.last_steps.keys() | {point.metric for point in new}
        names = seen | run.metrics.keys() | {point.metric for point in points}
        known = (state.last_steps.keys() | run.metrics.keys()) - OWN_METRICS
        is_open = (
            metric_roles.is_open(run)
            and (bool(names - known - OWN_METRICS) or (bool(new) and metric_roles.depends_on_values(run)))
            and len(known) < metric_roles.MOST_NAMES
        )
        if len(seen) > max(LEAST_METRICS, len(state.last_steps)):
            most = projects.get_project(self._tx, run.project_id).quotas.metrics_per_run
            if len(seen) > most:
                raise QuotaReached("metrics_per_run", most)
        if not is_open:
            return state

        def load_values(metric: str) -> list[float]:
            stored = self._load_observations({metric: 0})
            points = sorted(
                (*stored, *(point for point in new if point.metric == metric)), key=lambda point: point.step
            )
            return [point.value for point in points]

        return with_roles(state, metric_roles.assign_roles(names - OWN_METRICS, run.labels, load_values))

    def _combine(
        self, state: RunState, points: Sequence[PostedObservation], new: Sequence[PostedObservation]
    ) -> tuple[RunState, NewScores]:
        """The state with the scores of several evals, as far as the new observations change them."""
        if not state.watch.combined:
            return state, NO_SCORES
        refuse_own_scores(state, points)
        appended = append_values(state, new)
        if appended is not None:
            return appended
        first = min(point.step for point in new if point.metric in state.watch.combined)
        is_late = first <= state.last_steps.get(COMBINED_METRIC, -1)
        return combine_anew(state, [*self._load_evals(state), *new], first if is_late else None)

    def _load_evals(self, state: RunState) -> list[PostedObservation]:
        """The stored values of all evals that are combined."""
        return self._load_observations(dict.fromkeys(state.watch.combined, 0))

    def _load_observations(self, first_steps: dict[str, int], until: int | None = None) -> list[PostedObservation]:
        if not first_steps:
            return []
        points = observations.load_each_after(self._tx, self._before.run.id, first_steps)
        return points if until is None else [point for point in points if point.step <= until]

    def _rewind(self, state: RunState, since: tuple[int, int]) -> RunState:
        """The state with the last stored monitor that is older, or at the beginning."""
        monitor = None
        if since != BEGINNING:
            run_id = state.run.id
            stored = ingest.load_states(self._tx, [run_id]).get(run_id)
            monitor = find_stored_monitor(state.policy, state.run, stored)
        if monitor is None or (monitor.last is not None and monitor.last >= since):
            monitor = start(state.policy)
        return replace(state, monitor=monitor, unsaved=0)

    def _replay(
        self,
        state: RunState,
        since: tuple[int, int],
        added: Sequence[PostedObservation],
        scores: NewScores,
        *,
        rescored: bool,
        until: int | None = None,
    ) -> RunState:
        """The state after its monitor has seen the stored observations and the added ones, again from `since` on.

        The monitor as it was before is stored: what was late once is often late again. With `rescored`, the scores are
        collected again too.
        """
        self._require_share()
        self.has_replayed = True
        state = self._rewind(replace(state, failure=None), since)
        last = state.monitor.last
        first_steps = dict.fromkeys(state.watch.metrics, 0 if last is None else last[0])
        if rescored and state.watch.eval_metric is not None:
            first_steps[state.watch.eval_metric] = 0
        points = [*_keep_valid(self._load_observations(first_steps, until), scores), *added]
        seen = observations_past(state.monitor, state.watch.observations(points))
        earlier = [item for item in seen if item.order < since]
        state, _ = move_monitor(state, earlier)
        if state.monitor.last is not None and state.failure is None:
            self._changes.kept, state = state.monitor, replace(state, unsaved=0)
        state, _ = move_monitor(state, seen[len(earlier) :])
        self._changes.reached = [state.monitor.verdict]
        return _collect_scores(state, points) if rescored else state

    def _settle(
        self,
        state: RunState,
        changes: RunChanges,
        *,
        is_rewritten: bool = False,
        is_rescored: bool = False,
        is_settled: bool = True,
    ) -> None:
        """Choose the best checkpoint again, and update the row to the new state."""
        before = self._before
        if not before.agrees_with_row and not self._changes.reached:
            self._changes.reached = [state.monitor.verdict]
        if is_rescored:
            state, chosen = choose_checkpoint(state)
            changes |= chosen
            if is_settled and before.run.has_ended:
                changes["turn"] = change_point.find_change_point(state.scores.list_scores())
                self._changes.settles_case = True
        if is_rewritten:
            changes["rewritten_version"] = before.run.version + 1
        self._changes.state = replace(state, run=settle_row(before, state, changes, self._now))
        if not self._changes.answers:
            self._changes.answers = [Receipt(self._changes.state.run, state.decision)]


def _keep_valid(stored: Sequence[PostedObservation], scores: NewScores) -> Sequence[PostedObservation]:
    """The stored observations without the scores that are replaced."""
    first = scores.first_step
    if first is None:
        return stored
    return [point for point in stored if point.metric != COMBINED_METRIC or point.step < first]


def _collect_scores(state: RunState, points: Sequence[PostedObservation]) -> RunState:
    """The state with the scores of all its evals, which are among these observations."""
    scores = Scores().add_scores(select_scores(state.run, points))
    return replace(state, scores=scores.add_checkpoints(state.scores.addresses))
