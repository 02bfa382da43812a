"""The API's representation of runs and decisions, built from the rows of several tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from msgspec import structs
from pydantic import AliasPath, Field

from evalstop_service.decisions.commands import offer_exploit, tell_trainer_of
from evalstop_service.domain.decision_commands import ActionOfPerson, allowed_actions
from evalstop_service.domain.decision_lifecycle import Action
from evalstop_service.domain.health import MetricFault
from evalstop_service.domain.run import Recognition, RunAssessment, RunDescription, StepNote, Turn
from evalstop_service.domain.statuses import OPEN, UNENDED
from evalstop_service.runs import health
from evalstop_service.runs import metric_roles as recognition
from evalstop_service.store import cases, decisions, mlflow, projects, run_details, runs
from evalstop_service.store.cases import Case, Outcome
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision, DecisionChange
from evalstop_service.store.run_details import RunHealth
from evalstop_service.store.runs import Run
from evalstop_service.web.api.schemas import EXPLOIT, Answer, DecisionStateOut, ExploitOut, PolicyName, Time, answers
from evalstop_service.web.context import Context


@answers(DecisionChange)
class ChangeOut(Answer):
    """A change of a decision's state."""

    state: str = Field(description="the new state")


@answers(Turn)
class AssessedTurnOut(Answer):
    """Where a run turned, by its best evals."""


@answers(RunAssessment)
class AssessmentOut(Answer):
    """Whether the eval of a run turned, and where."""


@answers(Outcome)
class OutcomeOut(Answer):
    """The outcome of a decision, and who recorded it."""


@answers(Case, without="run_id attempt job_kind decision_id decided_step gpus")
class CaseOut(Answer):
    """An ended attempt as counted in the figures."""

    gpu_hours_saved: float | None = Field(
        None,
        validation_alias=AliasPath("hours", "saved"),
        description="GPU-hours that its stop saved: carried out and right; null: none, or not known",
    )
    gpu_hours_would_have_saved: float | None = Field(
        None,
        validation_alias=AliasPath("hours", "would_have_saved"),
        description="GPU-hours that its stop would have saved: right, and recorded only; null: none, or not known",
    )


class OutcomesOut(Answer):
    """All recorded outcomes of an attempt, oldest first; the last one counts."""

    attempt: int = Field(description="the attempt of the run")
    items: list[OutcomeOut] = Field(description="oldest first; the last one counts")
    case: CaseOut | None = Field(description="null until the attempt has ended")


@answers(Decision)
class DecisionOut(DecisionStateOut):
    """A decision to stop a run, with its history."""

    policy: PolicyName = Field(description="the policy that wanted the stop")
    outcome: OutcomeOut | None = Field(description="whether it was right; null: not yet known")
    history: list[ChangeOut] = Field(description="every change of its state, oldest first")


@answers(MetricFault)
class MetricFaultOut(Answer):
    """A watched metric without usable data."""


@answers(RunHealth, "state cadence_seconds metric_faults")
class RunHealthOut(Answer):
    """Whether a run is reporting."""

    last_report_at: Time = Field(description="time of the last observations or heartbeat")
    detector_failure: str | None = Field(
        description="the error after which the run is no longer judged, though still stored; null: it is judged"
    )


@answers(Recognition)
class RecognitionOut(Answer):
    """The origin of the roles of a run's metrics."""


@answers(StepNote)
class StepNoteOut(Answer):
    """A note of a person at a step; the run's chart shows it there."""


@answers(Run)
@answers(RunDescription, "owner group tags notes step_notes")
class RunOut(Answer):
    """A run and its state."""

    url: str | None = Field(description="the run's page; null without EVALSTOP_PUBLIC_URL")
    metrics: dict[str, dict[str, str | float | bool]] = Field(
        description="the watched metrics by name: role and direction; with several evals, weight and critical"
    )
    recognition: RecognitionOut = Field(description="the origin of these roles")
    params: dict[str, str] = Field({}, description="hyperparameters reported by the trainer; empty in lists")
    policy: PolicyName = Field(description="the policy that judges it")
    length_known: bool = Field(
        description="false: decisions come later, since total_steps was not reported or is exceeded; or the run "
        "completed in half of it, so that it was probably in another unit than the steps"
    )
    should_stop: bool = Field(description="true: a stop of this attempt was requested and handed over")
    best_is_outdated: bool = Field(description="true: it was measured before the eval changed, and no checkpoint since")
    decision: DecisionOut | None = Field(description="decision on the current attempt; null: none")
    exploit: ExploitOut | None = Field(description=EXPLOIT)
    health: RunHealthOut | None = Field(None, description="null after the run has ended")
    job_runs: list[str] = Field(
        [],
        description="other live runs in its job that are not to be stopped: its stop waits for them, unless it can end "
        "only a part of the job; empty in lists",
    )
    actions: list[ActionOfPerson] = Field(description="what people may do now: veto, release, undo or stop")
    limits: list[str] = Field(
        [], description="when it is opened: requested values that it did not get, and who can change that"
    )


def view_decisions(tx: Transaction, listed: Sequence[Decision]) -> list[DecisionOut]:
    """Decisions with their histories and outcomes."""
    histories = decisions.load_changes(tx, listed)
    judged = cases.load_outcomes(tx, [(decision.run_id, decision.attempt) for decision in listed])
    return [
        DecisionOut.model_validate(
            vars(decision)
            | {
                "policy": PolicyName(name=decision.policy_name, version=decision.policy_version),
                "outcome": None if decision.group else judged.get((decision.run_id, decision.attempt)),
                "history": histories[decision.id],
            }
        )
        for decision in listed
    ]


def view_outcomes(tx: Transaction, run_id: UUID, attempt: int) -> OutcomesOut:
    """The outcomes of an attempt, and its case."""
    items, case = cases.load_history(tx, [(run_id, attempt)])[run_id, attempt], cases.find_case(tx, run_id, attempt)
    return OutcomesOut.model_validate({"attempt": attempt, "items": items, "case": case})


def view_run(tx: Transaction, run: Run, context: Context, now: datetime) -> RunOut:
    """A run with the decision on its current attempt."""
    params = mlflow.load_mlflow_runs(tx, [run.id])[run.id].params
    others = [other.name for other in runs.list_spared_runs(tx, run, Action.STOP)] if run.status in OPEN else []
    return view_runs(tx, [run], context, now)[0].model_copy(update={"params": params, "job_runs": others})


def answer_trainer(run: Run, context: Context, now: datetime) -> RunOut:
    """A run for its trainer: the first answer with `should_stop` hands the stop over, and that with a copy the copy."""
    tell_trainer_of(context.database, context.clock, run)
    exploit = offer_exploit(context.database, context.clock, run)
    with context.database.reading() as tx:
        return view_run(tx, run, context, now).model_copy(
            update={"exploit": exploit and ExploitOut.model_validate(exploit)}
        )


def view_runs(tx: Transaction, listed: Sequence[Run], context: Context, now: datetime) -> list[RunOut]:
    """Runs of one project with the decisions on their current attempts."""
    health_by_run = _view_health(tx, listed, now)
    on_record = decisions.load_decisions(tx, [run.id for run in listed])
    decision_views = dict(zip(on_record, view_decisions(tx, list(on_record.values())), strict=True))
    descriptions = run_details.load_descriptions(tx, [run.id for run in listed])
    return [
        RunOut.model_validate(
            structs.asdict(run)
            | structs.asdict(descriptions[run.id])
            | {
                "exploit": None,
                "url": context.locate_run(run.id),
                "recognition": recognition.describe_roles(run),
                "length_known": run.length_known,
                "best_is_outdated": run.best_is_outdated,
                "policy": PolicyName(name=run.policy_name, version=run.policy_version),
                "should_stop": run.id in on_record and on_record[run.id].should_stop,
                "decision": decision_views.get(run.id),
                "actions": allowed_actions(on_record.get(run.id), now, run.heard_at),
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
    stored = run_details.load_health(tx, [run.id for run in living])
    return {
        run.id: RunHealthOut(
            state=health.find_liveness(run, row := stored.get(run.id), stale_seconds, now).value,
            last_report_at=health.last_report_at(run, row),
            cadence_seconds=row.cadence_seconds if row else None,
            metric_faults=[MetricFaultOut.model_validate(item) for item in row.metric_faults] if row else [],
            detector_failure=run.detector_failure,
        )
        for run in living
    }
