"""Cases: of every attempt that has ended, what was decided, what turned out to be true, and what it cost.

    an attempt ends, evals come after its end ──> settle: derive the truth, unless a person has said it ──┐
    a person says it, a decision moves on after the end ──> recount ──────────────────────────────────────┴──> a row

A case can be made anew at any time from what else is on record; it is kept because all figures are counted over cases.

GPU-hours are the hours of an attempt times the label `gpus` of its run. What a stop saves is the time from the decision
to the end: measured where the run was let go on, else estimated from the pace until the decision and `total_steps`. A
stop that was wrong saves nothing, because what was left has to be run all the same, and loses what has to be run once
more: the steps from the checkpoint that was best when it was decided, or from where the attempt began, to the decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from evalstop_detectors import Evidence, Kind
from evalstop_detectors.policy.risk import stated

from evalstop_service.evaluation import change_point
from evalstop_service.projects import policies
from evalstop_service.rules import decision_lifecycle
from evalstop_service.rules import outcome as truth
from evalstop_service.rules.decision_lifecycle import SERVICE, STOPPING, DecisionState
from evalstop_service.rules.outcome import DecisionOutcome, RunAssessment, RunOutcome
from evalstop_service.runs import watched_metrics
from evalstop_service.store import cases, decisions, observations, outcomes, runs
from evalstop_service.store.cases import Case
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.outcomes import Outcome
from evalstop_service.store.runs import Run

LET_RUN, STOPPED, PREVENTED = "let_run", "stopped", "prevented"
"""What became of a stop: it was deliberately not carried out, or carried out as far as it went, or kept from it."""

MOST_GPUS = 1e6


def record_case(tx: Transaction, run: Run, now: datetime) -> None:
    """Make the case of the present attempt of a run, which is locked and has ended, or is about to go on in another."""
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    said = outcomes.find_outcome(tx, run.id, run.attempt)
    if (said is None or said.derived) and run.pruned_at is None:
        said = _derive(tx, run, decision, said, now)
    _count(tx, run, run.attempt, decision, said, run.ended_at or now)


def recompute_case(tx: Transaction, run: Run, attempt: int) -> None:
    """Make the case of an attempt anew after something was said of it; nothing while it goes on. The run is locked."""
    known = cases.find_case(tx, run.id, attempt)
    ended_at = known.ended_at if known else run.ended_at if attempt == run.attempt else None
    if ended_at is not None:
        decision = decisions.find_decision_of_attempt(tx, run.id, attempt)
        _count(tx, run, attempt, decision, outcomes.find_outcome(tx, run.id, attempt), ended_at)


def remove_case(tx: Transaction, run: Run) -> None:
    """Take the case of the present attempt of a run back: it goes on after all. What was said of it stays."""
    cases.delete_case(tx, run.id, run.attempt)


def _derive(
    tx: Transaction, run: Run, decision: Decision | None, before: Outcome | None, now: datetime
) -> Outcome | None:
    """What the evals say of the attempt: a row of its own unless it is what they said before."""
    gold = watched_metrics.find_eval_metric(run)
    decided_step = decision.step if decision else None
    evals = watched_metrics.select_evals(run, observations.load_series(tx, run.id, [gold])) if gold is not None else []
    found = truth.assess_run(evals, decided_step)
    turned = _placed(tx, run, found)
    said = truth.judge_decision(found.run_outcome, decided_step, turned)
    turn_step = turned[0] if turned else None
    if before is not None and (before.outcome, before.turn_step, _truth_of(before)) == (
        said,
        turn_step,
        found.run_outcome,
    ):
        return before
    details = _numbers(found, watched_metrics.metric_sign(run.metrics, gold) if gold is not None else 1.0)
    outcomes.add_outcome(
        tx,
        run.id,
        run.attempt,
        outcome=said,
        turn_step=turn_step,
        actor=SERVICE,
        note=found.reason,
        now=now,
        derived=True,
        details=details,
    )
    return outcomes.find_outcome(tx, run.id, run.attempt)


def _placed(tx: Transaction, run: Run, found: RunAssessment) -> tuple[int, int] | None:
    """The step of the turn and the first at which the peak may have been, with hindsight if it sees one, too."""
    if found.run_outcome is not RunOutcome.TURNED:
        return None
    turn = run.turn if run.ended_at is not None else change_point.find_change_point(tx, run)
    return (turn["step"], turn["low_step"]) if turn else truth.locate_turn(found)


def _numbers(found: RunAssessment, sign: float) -> dict[str, Any]:
    """A judgement as JSON; means are in the metric's own direction."""
    document: dict[str, Any] = {key: value for key, value in msgspec.to_builtins(found).items() if value is not None}
    for name in ("best", "last"):
        if name in document:
            document[name]["mean"] *= sign
    return document


def _truth_of(said: Outcome | None, decision: Decision | None = None) -> RunOutcome:
    """What became of gold, as the evals or a person's word on the decision tell it."""
    if said is None:
        return RunOutcome.UNDECIDED
    if said.derived:
        return RunOutcome(said.details["run_outcome"])
    return truth.read_run_outcome(DecisionOutcome(said.outcome), said.turn_step, flagged=decision is not None)


def _count(
    tx: Transaction, run: Run, attempt: int, decision: Decision | None, said: Outcome | None, ended_at: datetime
) -> None:
    gpus = read_gpus(run.labels)
    began = runs.get_attempt(tx, run.id, attempt)
    hours = _Hours(gpus, began.started_at, began.resumed_from_step or 0, ended_at)
    case = Case(
        run_id=run.id,
        attempt=attempt,
        project_id=run.project_id,
        policy_id=run.policy_id,
        job_kind=run.labels.get("job_kind"),
        gpus=gpus,
        run_outcome=_truth_of(said, decision),
        derived=said is None or said.derived,
        turn_step=said.turn_step if said else None,
        decision_id=None,
        treatment=None,
        observed_probability=None,
        decided_step=None,
        detectors=None,
        stated_risk=None,
        outcome=said.outcome if said else DecisionOutcome.UNKNOWN,
        delay_steps=None,
        gpu_hours=hours.of_all(),
        gpu_hours_saved=None,
        gpu_hours_lost=None,
        ended_at=ended_at,
    )
    if decision is None:
        cases.save_case(tx, case)
    elif decision.ordered:  # by a person: the policy has let the run go on, and is held to that
        cases.save_case(tx, replace(case, outcome=truth.judge_decision(RunOutcome(case.run_outcome), None, None)))
    else:
        cases.save_case(tx, _with_decision(tx, case, run, decision, hours))


def _with_decision(tx: Transaction, case: Case, run: Run, decision: Decision, hours: _Hours) -> Case:
    treatment = classify_treatment(DecisionState(decision.state))
    right = case.outcome == DecisionOutcome.RIGHT
    stops = treatment != PREVENTED
    return replace(
        case,
        policy_id=decision.policy_id,
        decision_id=decision.id,
        treatment=treatment,
        observed_probability=decision.observed_probability,
        decided_step=decision.step,
        detectors=_called(decision.verdict),
        stated_risk=_stated_risk(tx, decision.policy_id),
        delay_steps=decision.step - case.turn_step if right and case.turn_step is not None else None,
        gpu_hours_saved=hours.saved(decision, treatment, case.outcome, run.total_steps) if stops else None,
        gpu_hours_lost=hours.lost(decision, case.outcome) if stops else None,
    )


@dataclass(frozen=True)
class _Hours:
    """The GPU-hours of an attempt; None where they cannot be known."""

    gpus: float | None
    started_at: datetime
    first_step: int
    ended_at: datetime

    def of_all(self) -> float | None:
        return self._between(self.started_at, self.ended_at)

    def saved(self, decision: Decision, treatment: str, outcome: str, total_steps: int | None) -> float | None:
        """By the stop, or by the one that there would have been; nothing by a wrong one."""
        if outcome == DecisionOutcome.WRONG:
            return None if self.gpus is None else 0.0
        after = self._between(decision.created_at, self.ended_at)
        if treatment == LET_RUN:
            return after
        if total_steps is None:
            return None
        left = self._of_steps(decision, total_steps - decision.step)
        return None if left is None or after is None else max(left - after, 0.0)

    def lost(self, decision: Decision, outcome: str) -> float | None:
        """By a wrong stop, or one that would have been: what was done since the best checkpoint is to be done again."""
        if outcome == DecisionOutcome.UNKNOWN:
            return None
        if outcome == DecisionOutcome.RIGHT:
            return None if self.gpus is None else 0.0
        checkpoint = decision.best_checkpoint
        kept = max(checkpoint["step"], self.first_step) if checkpoint else self.first_step
        return self._of_steps(decision, decision.step - kept)

    def _of_steps(self, decision: Decision, steps: int) -> float | None:
        """By the pace of the attempt until the decision."""
        spent, done = self._between(self.started_at, decision.created_at), decision.step - self.first_step
        return spent * max(steps, 0) / done if spent is not None and done > 0 else None

    def _between(self, begun: datetime, ended: datetime) -> float | None:
        return None if self.gpus is None else self.gpus * max((ended - begun).total_seconds(), 0.0) / 3600


def read_gpus(labels: Mapping[str, str]) -> float | None:
    """How many GPUs a job has, by the label `gpus` of its run; None where it says nothing, or nothing sensible."""
    try:
        gpus = float(labels["gpus"])
    except (KeyError, ValueError):
        return None
    return gpus if 0 < gpus <= MOST_GPUS else None


def classify_treatment(state: DecisionState) -> str:
    """What became of a stop that stands so when its run has ended."""
    if state in decision_lifecycle.LET_RUN:
        return LET_RUN
    return STOPPED if state in STOPPING else PREVENTED


def _called(verdict: Mapping[str, Any]) -> list[str]:
    """The detectors that called for a stop."""
    called = (one["detector"] for one in verdict["evidence"] if _evidence(one).reaches(one["stop_at"]))
    return list(dict.fromkeys(called))


def _evidence(finding: Mapping[str, Any]) -> Evidence:
    # All that counts here is which way a number alarms: only p-values do so by being small. A later release, gone back
    # from since, may have left kinds that are not known here.
    kind = Kind.P_VALUE if finding["kind"] == Kind.P_VALUE else Kind.STATISTIC
    return Evidence(kind, math.nan if finding["value"] is None else finding["value"])


def _stated_risk(tx: Transaction, policy_id: UUID) -> float | None:
    policy = policies.read(tx, policy_id)
    return None if policy is None else stated(policy)
