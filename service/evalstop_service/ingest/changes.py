"""What messages change in a run: its row, its new observations, the answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
from evalstop_detectors import MonitorState, Verdict, choose_best, find_highest, find_request
from msgspec.structs import replace

from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.run import BestCheckpoint, RawMaximum
from evalstop_service.domain.run import Verdict as RecordedVerdict
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.ingest.combined_evals import NO_SCORES, NewScores
from evalstop_service.ingest.messages import Answer, Content, Receipt, ValueConflict
from evalstop_service.ingest.run_state import RunState, describe_failure, is_same_stop
from evalstop_service.runs.recorded_verdict import record_verdict
from evalstop_service.runs.watched_metrics import OWN_METRICS
from evalstop_service.store.eval_requests import EvalRequest
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import FOUND_AGAIN, Run, RunChanges

MOST_UNWATCHED = 20
"""Metrics that a receipt lists as unwatched."""

CHOICE_FAILED = "the choice of the best checkpoint failed"


class Changes(msgspec.Struct):
    """Messages applied to a run: what to save, and the answers to give once it is saved.

    `points`: new ones, of which `late` are not past the last step of their metric. `reached`: the verdicts at which the
    call changed. `request`: the paired evaluation that awaits its answer. `follows`: other rows than the run's and its
    observations' change too, see `ingest.consequences`. Of edits only: `content`, whose own rows are written;
    `scores`, of several combined evals, where stored scores are replaced; `kept`: a monitor to store; `settles_case`:
    evals or checkpoints arrived after the run's end; `seconds`: the processor time of the judgment.
    """

    before: RunState
    state: RunState
    answers: list[Answer]
    points: list[PostedObservation] = []
    reached: list[Verdict] = []
    request: EvalRequest | None = None
    follows: bool = False
    late: list[PostedObservation] = []
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
        or (state.monitor.verdict.stops and decision is None and run.status == RunStatus.RUNNING)
        or (run.best_checkpoint is not old.best_checkpoint and place_of(run) != place_of(old))
        or state.keeps_monitor
        or run.detector_failure != old.detector_failure
        or (bool(state.policy.asking) and find_request(state.policy, state.monitor) != _find_request(before))
        # A new eval may change the decision: a stop on hold may be sent, a parked run may return.
        or (has_eval and decision is not None and decision.state == DecisionState.ON_HOLD)
        or (has_eval and decision is not None and decision.is_recovered(run.verdict))
    )


def _find_request(state: RunState) -> object:
    return find_request(state.policy, state.monitor)


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


def settle_row(before: RunState, state: RunState, changes: RunChanges, now: datetime, fallen: str | None = None) -> Run:
    """The row of the run, updated to the state of its monitor; `fallen`: appended to the reason of a new stop."""
    verdict = state.monitor.verdict
    if verdict is not before.monitor.verdict or not before.agrees_with_row:
        changes["verdict"] = _record_changed(before, state, fallen)
    changes["detector_failure"] = state.failure
    if before.run.status == RunStatus.LOST:
        changes = {**FOUND_AGAIN, **changes}
    return replace(state.run, version=before.run.version + 1, updated_at=now, **changes)


def _record_changed(before: RunState, state: RunState, fallen: str | None) -> RecordedVerdict:
    """The verdict for the run's row; usually the recorded one at a later step."""
    verdict, recorded, in_row = state.monitor.verdict, before.monitor.verdict, state.run.verdict
    if (
        before.agrees_with_row
        and verdict.evidence is recorded.evidence
        and verdict.reason is recorded.reason
        and (verdict.verdict, verdict.turn_step) == (recorded.verdict, recorded.turn_step)
    ):
        return replace(in_row, step=verdict.step)
    if state.watch.combined and fallen is None and is_same_stop(verdict, in_row):
        return in_row
    changed = record_verdict(verdict)
    return replace(changed, reason=f"{changed.reason}; {fallen}") if fallen else changed


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
