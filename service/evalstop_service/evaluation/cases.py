"""Cases: for every attempt that has ended, what was decided, whether that was right, and what it cost.

    an attempt ends, late evals arrive ──> record: derive the outcome, unless a person has given it ──┐
    a person gives an outcome, a decision moves after the end ──> recompute ──────────────────────────┴──> a row

A case can be recomputed from other rows at any time; it is stored because all figures are counts of cases.

GPU-hours are the hours of an attempt times its share of the GPUs of its job, which the label `gpus` states. A stop
saves the time from the decision to the end: measured where the run continued, else, once it is confirmed or obeyed,
estimated from the pace until the decision and `total_steps`. A wrong stop saves nothing, because the rest has to be run
anyway, and loses what has to be run again: the steps from the best checkpoint at the decision, or from the start of the
attempt, to the decision.
While a job is parked its GPUs belong to others: those hours are not counted, even if it runs on idle GPUs meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from evalstop_detectors.policy.calibration import compute_stated_risk

from evalstop_service.domain import decision_lifecycle, outcome
from evalstop_service.domain.decision_lifecycle import SERVICE, STOPPED, STOPPING, DecisionState
from evalstop_service.domain.labels import read_gpus
from evalstop_service.domain.run import JudgedCall, RunAssessment, Turn, Verdict, find_version
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome, Treatment, read_run_outcome
from evalstop_service.evaluation import change_point
from evalstop_service.projects import policies
from evalstop_service.runs import watched_metrics
from evalstop_service.store import cases, decisions, observations, runs
from evalstop_service.store.cases import Case, Outcome
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision, DecisionChange
from evalstop_service.store.runs import Run


def record_case(tx: Transaction, run: Run, now: datetime) -> None:
    """Record the case of the current attempt of a run, which is locked and has ended or is about to be resumed.

    An outcome given by a person is kept. Otherwise it is derived from the evals, as long as they are stored.
    """
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    recorded = cases.find_outcome(tx, run.id, run.attempt)
    if (recorded is None or recorded.derived) and run.pruned_at is None:
        of_policy = None if decision is not None and decision.group is not None else decision
        recorded = _derive_outcome(tx, run, of_policy, recorded, now)
    _save_case(tx, run, run.attempt, decision, recorded, run.ended_at or now)


def recompute_case(tx: Transaction, run: Run, attempt: int) -> None:
    """Recompute the case of an attempt, unless the attempt continues. The run is locked."""
    case = cases.find_case(tx, run.id, attempt)
    ended_at = case.ended_at if case else run.ended_at if attempt == run.attempt else None
    if ended_at is not None:
        decision = decisions.find_decision_of_attempt(tx, run.id, attempt)
        _save_case(tx, run, attempt, decision, cases.find_outcome(tx, run.id, attempt), ended_at)


def remove_case(tx: Transaction, run: Run) -> None:
    """Delete the case of the current attempt of a run, which continues after all. Its recorded outcomes stay."""
    cases.delete_case(tx, run.id, run.attempt)


def estimate_hours_left(tx: Transaction, run: Run, decision: Decision) -> float | None:
    """The GPU-hours of the steps after a decision, at the pace until then; None: not known."""
    gpus = _read_share_of_gpus(tx, run, decision, decision.created_at)
    if gpus is None or run.total_steps is None:
        return None
    start = runs.get_attempt(tx, run.id, decision.attempt)
    hours = _GpuHours(gpus, start.started_at, start.resumed_from_step or 0, decision.created_at, 0.0)
    return hours.of_steps(decision, run.total_steps - decision.step)


def _derive_outcome(
    tx: Transaction, run: Run, decision: Decision | None, before: Outcome | None, now: datetime
) -> Outcome | None:
    """The outcome by the evals of the attempt, recorded if it has changed."""
    critical = decision.verdict.critical if decision else None
    metric = critical if critical in run.metrics else watched_metrics.find_eval_metric(run)
    decided_step = decision.step if decision else None
    evals = []
    if metric is not None:
        evals = watched_metrics.select_evals(run, observations.load_series(tx, run.id, [metric]), metric)
    assessment = outcome.assess_run(evals, decided_step)
    turn = _find_turn(tx, run, assessment, critical)
    derived = outcome.judge_decision(assessment.run_outcome, decided_step, turn)
    turn_step = turn.step if turn else None
    if before is not None:
        recorded = (before.outcome, before.turn_step, _find_run_outcome(before))
        if recorded == (derived, turn_step, assessment.run_outcome):
            return before
    recorded_now = Outcome(
        outcome=derived,
        turn_step=turn_step,
        derived=True,
        actor=SERVICE,
        note=assessment.reason,
        assessment=assessment,
        at=now,
    )
    cases.add_outcome(tx, run.id, run.attempt, recorded_now)
    return recorded_now


def _find_turn(tx: Transaction, run: Run, assessment: RunAssessment, critical: str | None) -> Turn | None:
    """The turn of a run: its change point in hindsight if there is one, else its best evals.

    `critical`: the turn of this eval, by its best values.
    """
    located = assessment.turn
    if located is None:
        return None
    turn = run.turn if run.ended_at is not None else change_point.load_change_point(tx, run)
    if (
        turn is None
        or critical is not None
        or find_version(run.eval_changes, turn.step) != find_version(run.eval_changes, located.step)
    ):
        return located
    return turn


def _find_run_outcome(recorded: Outcome | None, decision: Decision | None = None) -> RunOutcome:
    if recorded is None:
        return RunOutcome.UNDECIDED
    if recorded.assessment is not None:
        return recorded.assessment.run_outcome
    decision_outcome = DecisionOutcome(recorded.outcome)
    return read_run_outcome(decision_outcome, recorded.turn_step, flagged=decision is not None)


def _save_case(
    tx: Transaction, run: Run, attempt: int, decision: Decision | None, recorded: Outcome | None, ended_at: datetime
) -> None:
    gpus = _read_share_of_gpus(tx, run, decision, ended_at)
    start = runs.get_attempt(tx, run.id, attempt)
    changes = decisions.list_changes(tx, decision) if decision is not None else []
    parked = _measure_parked(changes, start.started_at, ended_at)  # without the parked time before this attempt
    hours = _GpuHours(gpus, start.started_at, start.resumed_from_step or 0, ended_at, parked or 0.0)
    is_flagged = decision is not None and decision.group is None
    run_outcome = _find_run_outcome(recorded, decision if is_flagged else None)
    case = Case(
        run_id=run.id,
        attempt=attempt,
        run_name=run.name,
        project_id=run.project_id,
        policy_name=run.policy_name,
        policy_version=run.policy_version,
        job_kind=run.labels.get("job_kind"),
        gpus=gpus,
        run_outcome=run_outcome,
        derived=recorded is None or recorded.derived,
        turn_step=recorded.turn_step if recorded else None,
        calls=_judge_calls(tx, run, attempt, recorded, run_outcome, hours),
        outcome=recorded.outcome if recorded else DecisionOutcome.UNKNOWN,
        gpu_hours=hours.total(),
        parked_seconds=_measure_parked(changes, None, ended_at),
        seconds=max((ended_at - start.started_at).total_seconds(), 0.0),
        evals=_count_evals(tx, run, attempt),
        key_id=run.opened_by,
        ended_at=ended_at,
    )
    if decision is None:
        cases.save_case(tx, case)
    elif decision.ordered or not is_flagged:  # by a person, or the rule of a group: the policy let the run continue
        judged = outcome.judge_decision(RunOutcome(case.run_outcome), None, None)
        cases.save_case(tx, replace(case, outcome=judged))
    else:
        cases.save_case(tx, _add_decision(tx, case, run, decision, hours))


def _judge_calls(
    tx: Transaction, run: Run, attempt: int, recorded: Outcome | None, run_outcome: RunOutcome, hours: _GpuHours
) -> dict[str, JudgedCall]:
    """The first calls of the policy's detectors in an attempt, each judged as if it had stopped the run.

    As with a decision, the evals that led to a call cannot confirm it: the last evals have to come after it.
    """
    calls = {name: (call.step, hours.after_step(call.step, run.last_step)) for name, call in run.calls.items()}
    if attempt != run.attempt:  # the row has the calls of the current attempt
        before = cases.find_case(tx, run.id, attempt)
        assert before is not None, "an earlier attempt has ended"
        calls = {name: (call.step, call.gpu_hours_after) for name, call in before.calls.items()}
    turn_step = recorded.turn_step if recorded else None
    judged_from = recorded.assessment.judged_from if recorded and recorded.assessment else None
    turn = None
    if turn_step is not None:
        turn = Turn(turn_step, run.turn.low_step if run.turn and run.turn.step == turn_step else turn_step)
    judged = {}
    for name, (step, hours_after) in calls.items():
        result = outcome.judge_decision(run_outcome, step, turn)
        if judged_from is not None and step >= judged_from:
            result = DecisionOutcome.UNKNOWN
        delay = step - turn_step if result is DecisionOutcome.RIGHT and turn_step is not None else None
        judged[name] = JudgedCall(step, result, delay, hours_after)
    return judged


def _measure_parked(changes: Sequence[DecisionChange], since: datetime | None, until: datetime) -> float | None:
    """How many seconds between these times the job was parked; None: it never was.

    A decision may be older than the attempt: a parked job that restarts keeps it.
    """
    ends = [*(change.at for change in changes[1:]), until]
    parked = [
        max((min(end, until) - max(change.at, since or change.at)).total_seconds(), 0.0)
        for change, end in zip(changes, ends, strict=False)  # without changes there is one end
        if change.state is DecisionState.PARKED
    ]
    return math.fsum(parked) if parked else None


def _count_evals(tx: Transaction, run: Run, attempt: int) -> int:
    """The finite evals of an attempt; after its details are removed, the number counted before."""
    if run.pruned_at is not None:
        before = cases.find_case(tx, run.id, attempt)
        return before.evals if before is not None else 0
    metric = watched_metrics.find_eval_metric(run)
    return 0 if metric is None else observations.count_finite(tx, run.id, metric, attempt)


def _add_decision(tx: Transaction, case: Case, run: Run, decision: Decision, hours: _GpuHours) -> Case:
    treatment = classify_treatment(decision.state)
    right, turn_step = case.outcome == DecisionOutcome.RIGHT, case.turn_step
    delay_steps = None
    if right and turn_step is not None and turn_step <= decision.step:  # a person may place the turn later
        delay_steps = decision.step - turn_step
    saves = treatment is Treatment.OBSERVED or decision.state in STOPPED | {DecisionState.PARKED}
    prevented = treatment is Treatment.PREVENTED
    return replace(
        case,
        decision_id=decision.id,
        treatment=treatment,
        observed_probability=decision.observed_probability,
        decided_step=decision.step,
        detectors=_list_stopping_detectors(decision.verdict),
        stated_risk=compute_stated_risk(policies.read_policy(tx, decision.policy_id)),
        delay_steps=delay_steps,
        gpu_hours_saved=None if not saves else hours.saved(decision, treatment, case.outcome, run.total_steps),
        gpu_hours_lost=None if prevented else hours.lost(decision, case.outcome),
    )


@dataclass(frozen=True)
class _GpuHours:
    """The GPU-hours of an attempt; None where they are not known."""

    gpus: float | None
    started_at: datetime
    first_step: int
    ended_at: datetime
    parked_seconds: float

    def total(self) -> float | None:
        return self._until_end(self.started_at)

    def saved(self, decision: Decision, treatment: Treatment, outcome: str, total_steps: int | None) -> float | None:
        """The hours that the stop saved or would have saved; a wrong one saves nothing."""
        if outcome == DecisionOutcome.WRONG:
            return None if self.gpus is None else 0.0
        after = self._until_end(decision.created_at)
        if treatment is Treatment.OBSERVED:
            return after
        if total_steps is None:
            return None
        remaining_hours = self.of_steps(decision, total_steps - decision.step)
        return None if remaining_hours is None or after is None else max(remaining_hours - after, 0.0)

    def lost(self, decision: Decision, outcome: str) -> float | None:
        """The hours that a wrong stop lost or would have lost: the work since the best checkpoint has to be redone."""
        if outcome == DecisionOutcome.UNKNOWN:
            return None
        if outcome == DecisionOutcome.RIGHT:
            return None if self.gpus is None else 0.0
        checkpoint = decision.best_checkpoint
        resumed_at = max(checkpoint.step, self.first_step) if checkpoint else self.first_step
        return self.of_steps(decision, decision.step - resumed_at)

    def after_step(self, step: int, last_step: int | None) -> float | None:
        """The hours after this step, by its share of the steps until the end."""
        hours = self.total()
        if hours is None or last_step is None or last_step <= self.first_step:
            return None
        return hours * min((last_step - step) / (last_step - self.first_step), 1.0)

    def of_steps(self, decision: Decision, steps: int) -> float | None:
        """The hours of this many steps, at the pace of the attempt until the decision."""
        hours_spent, steps_done = self._between(self.started_at, decision.created_at), decision.step - self.first_step
        return hours_spent * max(steps, 0) / steps_done if hours_spent is not None and steps_done > 0 else None

    def _until_end(self, start: datetime) -> float | None:
        """The hours until the end except parked time, which always follows a decision."""
        hours = self._between(start, self.ended_at)
        return None if hours is None or self.gpus is None else max(hours - self.gpus * self.parked_seconds / 3600, 0.0)

    def _between(self, start: datetime, end: datetime) -> float | None:
        return None if self.gpus is None else self.gpus * max((end - start).total_seconds(), 0.0) / 3600


def _read_share_of_gpus(tx: Transaction, run: Run, decision: Decision | None, ended_at: datetime) -> float | None:
    """The run's share of the GPUs of its job: all runs of a job save or lose the same GPUs, which count once.

    The runs counted are those that ran when the run was to be stopped, else at its end.
    """
    gpus = read_gpus(run.labels)
    if gpus is None:
        return None
    return gpus / runs.count_runs_alive(tx, run, decision.created_at if decision is not None else ended_at)


def classify_treatment(state: DecisionState) -> Treatment:
    """The treatment of a stop whose decision was in this state when its run ended."""
    if state in decision_lifecycle.OBSERVED:
        return Treatment.OBSERVED
    return Treatment.STOPPED if state in STOPPING else Treatment.PREVENTED


def _list_stopping_detectors(verdict: Verdict) -> list[str]:
    """The detectors whose evidence reached the threshold to stop."""
    stopping = (item.detector for item in verdict.evidence if item.stop_at is not None and item.value >= item.stop_at)
    return list(dict.fromkeys(stopping))
