"""The API's representation of runs and decisions, built from the rows of several tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from msgspec import structs
from pydantic import Field

from evalstop_service.decisions.commands import tell_trainer_of
from evalstop_service.domain.decision_lifecycle import Action
from evalstop_service.domain.fields import Mode
from evalstop_service.domain.liveness import Liveness
from evalstop_service.domain.metric_health import FaultKind
from evalstop_service.domain.role_recognition import RoleOrigin
from evalstop_service.domain.statuses import OPEN, UNENDED, DecisionOutcome, RunOutcome, RunStatus, Treatment
from evalstop_service.ingest.open_request import LimitedField
from evalstop_service.runs import health
from evalstop_service.runs import metric_roles as recognition
from evalstop_service.store import cases, decisions, job_runs, mlflow, outcomes, projects, run_details, run_health
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run
from evalstop_service.web.api.schemas import (
    Answer,
    BestCheckpointOut,
    DecisionStateOut,
    PolicyName,
    RawMaximumOut,
    Time,
    TurnOut,
    VerdictOut,
)
from evalstop_service.web.context import Context


class ChangeOut(Answer):
    """A change of a decision's state."""

    state: str = Field(description="the new state")
    at: Time = Field(description="when it changed")
    actor: str = Field(description="a person, a key, a receiver, or evalstop")
    reason: str = Field(description="why it changed")
    details: dict[str, Any] = Field(description="the receiver's report, or the guards that held it")


class WindowOut(Answer):
    """Consecutive evals: the steps of the first, the middle and the last one, and their mean."""

    first_step: int = Field(description="step of its first eval")
    middle_step: int = Field(description="step of its middle eval")
    last_step: int = Field(description="step of its last eval")
    mean: float = Field(description="in the unit of the metric")


class AssessmentOut(Answer):
    """Whether the eval of a run turned, and the means that were compared; null: too few evals."""

    run_outcome: RunOutcome = Field(
        description="turned: the eval fell for good; healthy: it did not; undecided: unknown"
    )
    reason: str = Field(description="the rule that applied, with its numbers")
    evals: int = Field(description="number of finite evals")
    window: int = Field(description="number of consecutive evals in a mean")
    best: WindowOut | None = Field(description="the evals around the peak")
    last: WindowOut | None = Field(description="the evals at the end")
    gain: float | None = Field(description="in the unit of the metric, higher is better; so are drop and stderr")
    drop: float | None = Field(description="from the best mean to the last")
    stderr: float | None = Field(description="the standard error of the drop")


class OutcomeOut(Answer):
    """The outcome of a decision, and who recorded it."""

    outcome: DecisionOutcome = Field(description="right, wrong or unknown")
    turn_step: int | None = Field(description="the step where the eval turned; null: it did not, or is unknown")
    derived: bool = Field(description="true: from later evals; false: by a person")
    actor: str = Field(description="who labeled it, or evalstop")
    note: str = Field(description="for people")
    assessment: AssessmentOut | None = Field(description="the numbers behind a derived outcome; null: by a person")
    at: Time = Field(description="when it was recorded")


class CaseOut(Answer):
    """An ended attempt as counted in the figures."""

    run_outcome: RunOutcome = Field(
        description="turned: the eval fell for good; healthy: it did not; undecided: unknown"
    )
    derived: bool = Field(description="true: from its evals; false: by a person")
    turn_step: int | None = Field(description="the step where it turned; null: it did not, or is unknown")
    outcome: DecisionOutcome = Field(
        description="outcome of the decision to stop it or, without one, of letting it run"
    )
    treatment: Treatment | None = Field(
        description="the stop was observed (held out or in shadow mode), carried out or prevented; null: no stop"
    )
    observed_probability: float | None = Field(description="probability of being observed after the decision")
    detectors: list[str] | None = Field(description="the detectors that wanted the stop")
    stated_risk: float | None = Field(description="the share of healthy runs that the policy states it stops")
    delay_steps: int | None = Field(description="from the turn to the decision")
    gpu_hours: float | None = Field(description="null: the run has no label gpus")
    gpu_hours_saved: float | None = Field(
        description="GPU-hours that a right stop saved, or that the run spent after the decision; null: unknown"
    )
    gpu_hours_lost: float | None = Field(
        description="GPU-hours since the best checkpoint, which a wrong stop causes to be repeated; null: unknown"
    )
    parked_seconds: float | None = Field(description="how long its job was parked; null: never")
    seconds: float = Field(description="how long it lasted")
    evals: int = Field(description="finite ones")
    ended_at: Time = Field(description="when the attempt ended")


class OutcomesOut(Answer):
    """All recorded outcomes of an attempt, oldest first; the last one counts."""

    attempt: int = Field(description="the attempt of the run")
    items: list[OutcomeOut] = Field(description="oldest first; the last one counts")
    case: CaseOut | None = Field(description="null until the attempt has ended")


class DecisionOut(DecisionStateOut):
    """A decision to stop a run, with its history."""

    run_id: UUID = Field(description="the run to be stopped")
    run_name: str = Field(description="the run's name")
    attempt: int = Field(description="the run's attempt")
    step: int = Field(description="the step at which the policy wanted the stop")
    due_at: Time = Field(description="the end of the veto window; it can be vetoed until it is handed over")
    handed_over_at: Time | None = Field(description="when the stop first went out; null: it can still be vetoed")
    handed_over_to: str | None = Field(description="to whom it went out first, a receiver or the trainer")
    deadline_at: Time | None = Field(
        description="next check: a stop on hold is tried again, an unconfirmed one is escalated"
    )
    escalations: int = Field(description="how often it was not confirmed in time")
    created_at: Time = Field(description="when the policy wanted the stop")
    verdict: VerdictOut = Field(description="the verdict at that time, with its evidence")
    best_checkpoint: BestCheckpointOut | None = Field(description="at the time of the decision")
    policy: PolicyName = Field(description="the policy that wanted the stop")
    outcome: OutcomeOut | None = Field(description="whether it was right; null: not yet known")
    history: list[ChangeOut] = Field(description="every change of its state, oldest first")


class MetricFaultOut(Answer):
    """A watched metric without usable data."""

    metric: str = Field(description="the name of the series")
    kind: FaultKind = Field(description="the kind of fault")
    reason: str = Field(description="the fault, for people")


class RunHealthOut(Answer):
    """Whether a run is reporting."""

    state: Liveness = Field(description="alive; stale: its reports are late; lost: considered ended")
    last_report_at: Time = Field(description="time of the last observations or heartbeat")
    cadence_seconds: float | None = Field(description="longest usual pause between reports; null: not yet known")
    metric_faults: list[MetricFaultOut] = Field(description="watched metrics without usable data, at the last check")
    costly_step_seconds: float | None = Field(
        description="detector time in one commit that exceeded the budget, so that the run is committed separately; "
        "null: within the budget so far"
    )
    detector_failure: str | None = Field(
        description="the error after which the run is no longer judged, though still stored; null: it is judged"
    )


class RecognitionOut(Answer):
    """The origin of the roles of a run's metrics."""

    open: bool = Field(description="true: new metrics can still change the roles")
    preset: str | None = Field(description="the known trainer whose metric names match")
    sources: dict[str, str] = Field(
        description="by metric: trainer, default, preset NAME, names (a common name), pattern (of the project), person"
    )
    origins: dict[str, RoleOrigin] = Field(
        description="by metric: declared, recognized (a known trainer's name), guessed: a guess never stops the run;"
        " confirm it by PATCH /runs/{run_id}/metrics"
    )
    reasons: dict[str, str] = Field(description="by metric: why it has this role, or none")
    warnings: list[str] = Field(description="what may be wrong with the roles, for people")


class LimitOut(Answer):
    """A requested value that was not granted, and the project's setting that forbids it."""

    field: LimitedField = Field(description="the requested field: mode or policy")
    requested: str = Field(description="the requested value")
    used: str = Field(description="the value used instead")
    setting: str = Field(description="the project's setting that forbids it")


class EvalChangeOut(Answer):
    """The eval is measured differently from a step on; levels before and after it are not compared."""

    step: int = Field(description="the first step measured differently")
    reason: str = Field(description="what changed")
    version: str | None = Field(description="the eval version from there on; null: not reported")
    actor: str = Field(description="who reported it")
    at: Time = Field(description="when it was reported")


class RunOut(Answer):
    """A run and its state."""

    id: UUID = Field(description="id of the run; ids ascend with time")
    name: str = Field(description="unique in the project")
    url: str | None = Field(description="the run's page; null without EVALSTOP_PUBLIC_URL")
    status: RunStatus = Field(description="running, or how it ended: completed, failed, stopped or lost")
    attempt: int = Field(description="counts from 1, plus 1 for each resume")
    created_at: Time = Field(description="when it was opened")
    updated_at: Time = Field(description="when it last got observations or changed")
    ended_at: Time | None = Field(description="when it ended; null: running")
    pruned_at: Time | None = Field(None, description="when its observations and checkpoints were deleted")
    metrics: dict[str, dict[str, str | float | bool]] = Field(
        description="the watched metrics by name: role and direction; with several evals, weight and critical"
    )
    recognition: RecognitionOut = Field(description="the origin of these roles")
    labels: dict[str, str] = Field(description="receivers find the job by these")
    owner: str | None = Field(description="who is notified; null: nobody")
    group: str | None = Field(description="group of runs that it is compared with; null: none")
    tags: list[str] = Field(description="tags to find it by")
    notes: str = Field(description="notes by people")
    params: dict[str, str] = Field({}, description="hyperparameters reported by the trainer; empty in lists")
    policy: PolicyName = Field(description="the policy that judges it")
    mode: Mode = Field(description="shadow: decisions are only recorded; enforce: the run is stopped")
    total_steps: int | None = Field(description="the planned length; null: not reported")
    eval_share: float | None = Field(
        description="share of its time that one eval takes, 0 if unknown; null: no evaluation on request"
    )
    length_known: bool = Field(
        description="false: total_steps was not reported or is exceeded, so that decisions come later"
    )
    last_step: int | None = Field(description="the highest step with an observation; null: none")
    verdict: VerdictOut = Field(description="the policy's current verdict")
    should_stop: bool = Field(description="true: a stop of this attempt was requested and handed over")
    best_checkpoint: BestCheckpointOut | None = Field(description="the one to ship; null: no checkpoint has an eval")
    best_is_outdated: bool = Field(description="true: it was measured before the eval changed, and no checkpoint since")
    raw_maximum: RawMaximumOut | None = Field(
        description="the highest eval, with or without a checkpoint; null: no eval"
    )
    eval_changes: list[EvalChangeOut] = Field(description="the steps from which the eval is measured differently")
    turn: TurnOut | None = Field(None, description="null until the run has ended, and when the eval shows no fall")
    decision: DecisionOut | None = Field(description="decision on the current attempt; null: none")
    health: RunHealthOut | None = Field(None, description="null after the run has ended")
    job_runs: list[str] = Field(
        [],
        description="other live runs in its job that are not to be stopped: its stop waits for them, unless it can end "
        "only a part of the job; empty in lists",
    )
    limits: list[LimitOut] = Field(
        [],
        description="when it is opened: requested values that the project does not allow; a key with the scope admin "
        "can allow them",
    )


def view_decision(tx: Transaction, decision: Decision) -> DecisionOut:
    """A decision with its history and outcome."""
    return view_decisions(tx, [decision])[0]


def view_decisions(tx: Transaction, listed: Sequence[Decision]) -> list[DecisionOut]:
    """Decisions with their histories and outcomes."""
    histories = decisions.load_changes(tx, listed)
    judged = outcomes.load_outcomes(tx, [(decision.run_id, decision.attempt) for decision in listed])
    return [
        DecisionOut.model_validate(
            vars(decision)
            | {
                "policy": PolicyName(name=decision.policy_name, version=decision.policy_version),
                "outcome": judged.get((decision.run_id, decision.attempt)),
                "history": histories[decision.id],
            }
        )
        for decision in listed
    ]


def view_outcomes(tx: Transaction, run_id: UUID, attempt: int) -> OutcomesOut:
    """The outcomes of an attempt, and its case."""
    items, case = outcomes.list_outcomes(tx, run_id, attempt), cases.find_case(tx, run_id, attempt)
    return OutcomesOut.model_validate({"attempt": attempt, "items": items, "case": case})


def view_run(tx: Transaction, run: Run, context: Context, now: datetime) -> RunOut:
    """A run with the decision on its current attempt."""
    params = mlflow.load_mlflow_runs(tx, [run.id])[run.id].params
    others = [other.name for other in job_runs.list_spared_runs(tx, run, Action.STOP)] if run.status in OPEN else []
    return view_runs(tx, [run], context, now)[0].model_copy(update={"params": params, "job_runs": others})


def answer_trainer(database: Database, run: Run, context: Context, now: datetime) -> RunOut:
    """A run for its trainer: the first answer that tells it to stop hands the stop over."""
    tell_trainer_of(database, context.clock, run)
    with database.reading() as tx:
        return view_run(tx, run, context, now)


def view_runs(tx: Transaction, listed: Sequence[Run], context: Context, now: datetime) -> list[RunOut]:
    """Runs of one project with the decisions on their current attempts."""
    health_by_run = _view_health(tx, listed, now)
    on_record = decisions.load_decisions(tx, [run.id for run in listed])
    decision_views = {view.run_id: view for view in view_decisions(tx, list(on_record.values()))}
    descriptions = run_details.load_descriptions(tx, [run.id for run in listed])
    return [
        RunOut.model_validate(
            structs.asdict(run)
            | structs.asdict(descriptions[run.id])
            | {
                "url": context.locate_run(run.id),
                "recognition": recognition.describe_roles(run),
                "length_known": run.length_known,
                "best_is_outdated": run.best_is_outdated,
                "policy": PolicyName(name=run.policy_name, version=run.policy_version),
                "should_stop": run.id in on_record and on_record[run.id].should_stop,
                "decision": decision_views.get(run.id),
                "health": health_by_run.get(run.id),
            }
        )
        for run in listed
    ]


def _view_health(tx: Transaction, listed: Sequence[Run], now: datetime) -> dict[UUID, RunHealthOut]:
    """The health of the runs that have not ended or may not have ended."""
    living = [run for run in listed if run.status in UNENDED]
    if not living:
        return {}
    stale_seconds = projects.get_project(tx, living[0].project_id).stale_seconds
    stored = run_health.load_health(tx, [run.id for run in living])
    return {
        run.id: RunHealthOut(
            state=health.find_liveness(run, row := stored.get(run.id), stale_seconds, now).value,
            last_report_at=health.last_report_at(run, row),
            cadence_seconds=row.cadence_seconds if row else None,
            metric_faults=[MetricFaultOut.model_validate(item) for item in row.metric_faults] if row else [],
            costly_step_seconds=row.costly_step_seconds if row else None,
            detector_failure=run.detector_failure,
        )
        for run in living
    }


class _Listed(Protocol):
    @property
    def id(self) -> UUID: ...


def make_cursor(items: Sequence[_Listed], limit: int) -> str | None:
    """The cursor of the next page, None if this page is not full."""
    return str(items[-1].id) if len(items) == limit else None
