"""How runs and decisions are answered: the rows of several tables as one object."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, Protocol
from uuid import UUID

from msgspec import structs
from pydantic import Field

from evalstop_service.rules.decision_lifecycle import DecisionState
from evalstop_service.rules.liveness import Liveness
from evalstop_service.rules.statuses import DecisionOutcome, RunOutcome, RunStatus, Treatment
from evalstop_service.runs import health
from evalstop_service.runs import metric_roles as recognition
from evalstop_service.store import cases, decisions, outcomes, projects, run_health
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run
from evalstop_service.web.api.schemas import (
    Answer,
    BestOut,
    Mode,
    Page,
    PolicyName,
    RawMaximumOut,
    Time,
    TurnOut,
    VerdictOut,
)


class ChangeOut(Answer):
    """One step in the life of a decision."""

    state: str
    at: Time
    actor: str
    reason: str
    details: dict[str, Any]


class OutcomeOut(Answer):
    """What turned out to be true of a decision, and who said so."""

    outcome: DecisionOutcome
    turn_step: int | None
    derived: bool = Field(description="from later evals; else a person said so")
    actor: str
    note: str
    details: dict[str, Any] = Field(description="of a derived one the numbers that it rests on")
    at: Time


class CaseOut(Answer):
    """An attempt that has ended, as it is counted."""

    run_outcome: RunOutcome
    derived: bool = Field(description="from its evals; else a person said so")
    turn_step: int | None
    outcome: DecisionOutcome = Field(
        description="of the decision to stop it or, where there was none, of letting it go on"
    )
    treatment: Treatment | None = Field(
        description="of the stop: deliberately not carried out, carried out, or kept from it; null: there was none"
    )
    observed_probability: float | None = Field(description="with which it was let run after the decision")
    detectors: list[str] | None = Field(description="those that called for the stop")
    stated_risk: float | None = Field(description="the share of healthy runs that its policy says it stops")
    delay_steps: int | None = Field(description="from the turn to the decision")
    gpu_hours: float | None = Field(description="null: the run says no number of GPUs by its label gpus")
    gpu_hours_saved: float | None
    gpu_hours_lost: float | None
    ended_at: Time


class OutcomesOut(Answer):
    """All that was ever said of an attempt, oldest first: the last counts."""

    attempt: int
    items: list[OutcomeOut]
    case: CaseOut | None = Field(description="what follows from it; null while the attempt goes on")


class DecisionOut(Answer):
    """A stop verdict on record, with its life."""

    id: UUID
    run_id: UUID
    run_name: str
    attempt: int
    state: DecisionState
    step: int
    due_at: Time = Field(description="the end of the veto window, within which it can be vetoed")
    deadline_at: Time | None = Field(
        description="when it is looked after next: on hold, it is weighed again; handed out, it is escalated"
    )
    escalations: int = Field(description="how often it was not confirmed in time: asked for again, then harder")
    created_at: Time
    verdict: VerdictOut
    best_checkpoint: BestOut | None = Field(description="as it was when the decision was made")
    policy: PolicyName
    outcome: OutcomeOut | None
    history: list[ChangeOut]


class DecisionPage(Page):
    """Decisions, newest first."""

    items: list[DecisionOut]


class DeadOut(Answer):
    """A metric that tells the run's detectors nothing."""

    metric: str
    kind: Literal["missing", "ceased", "constant", "not_finite"]
    reason: str


class PulseOut(Answer):
    """Whether anything is heard of a run."""

    state: Liveness
    heard_at: Time = Field(description="the last post or heartbeat")
    cadence_seconds: float | None = Field(description="the longest usual pause between two posts, once it is known")
    dead: list[DeadOut] = Field(description="of the metrics that may stop the run, as of the last look at it")


class RecognitionOut(Answer):
    """How a run's metrics came by their roles."""

    open: bool = Field(description="metrics that come in for the first time may still change the roles")
    preset: str | None = Field(description="the trainer whose names they are")
    sources: dict[str, str] = Field(
        description="by metric: trainer (it said so), default, preset NAME, names (nobody's in particular), pattern "
        "(of the project), person"
    )
    reasons: dict[str, str] = Field(description="by metric: why it has its role, or why it has none")
    warnings: list[str]


class RunOut(Answer):
    """A run and where it stands."""

    id: UUID
    name: str
    status: RunStatus
    attempt: int
    created_at: Time
    updated_at: Time
    ended_at: Time | None
    pruned_at: Time | None = Field(None, description="since then its observations and checkpoints are gone")
    metrics: dict[str, dict[str, str]]
    recognition: RecognitionOut
    labels: dict[str, str]
    policy: PolicyName
    mode: Mode
    total_steps: int | None
    last_step: int | None
    verdict: VerdictOut
    should_stop: bool = Field(description="true once a stop of this attempt was requested")
    best_checkpoint: BestOut | None
    raw_maximum: RawMaximumOut | None
    turn: TurnOut | None = Field(None, description="null while the run goes on, and where gold shows no fall")
    decision: DecisionOut | None
    pulse: PulseOut | None = Field(None, description="null once the run has ended")


class RunPage(Page):
    """Runs, newest first."""

    items: list[RunOut]


def decision_out(tx: Transaction, decision: Decision) -> DecisionOut:
    """A decision with its history and its outcome."""
    policy = PolicyName(name=decision.policy_name, version=decision.policy_version)
    outcome = outcomes.find_outcome(tx, decision.run_id, decision.attempt)
    return DecisionOut.model_validate(
        vars(decision) | {"policy": policy, "outcome": outcome, "history": decisions.list_changes(tx, decision)}
    )


def outcomes_out(tx: Transaction, run_id: UUID, attempt: int) -> OutcomesOut:
    """What was said of an attempt, and what follows from it."""
    items, case = outcomes.list_outcomes(tx, run_id, attempt), cases.find_case(tx, run_id, attempt)
    return OutcomesOut.model_validate({"attempt": attempt, "items": items, "case": case})


def run_out(tx: Transaction, run: Run, now: datetime) -> RunOut:
    """A run with the decision on its present attempt."""
    return runs_out(tx, [run], now)[0]


def runs_out(tx: Transaction, found: Sequence[Run], now: datetime) -> list[RunOut]:
    """Runs of one project with the decisions on their present attempts."""
    pulse = _pulses(tx, found, now)
    on_record = decisions.load_decisions(tx, [run.id for run in found])
    return [
        RunOut.model_validate(
            structs.asdict(run)
            | {
                "recognition": recognition.describe_roles(run),
                "policy": PolicyName(name=run.policy_name, version=run.policy_version),
                "should_stop": run.id in on_record and on_record[run.id].stops(now),
                "decision": decision_out(tx, on_record[run.id]) if run.id in on_record else None,
                "pulse": pulse.get(run.id),
            }
        )
        for run in found
    ]


def _pulses(tx: Transaction, found: Sequence[Run], now: datetime) -> dict[UUID, PulseOut]:
    """How those of these runs are that have not ended, or are lost."""
    living = [run for run in found if run.status in ("running", Liveness.LOST)]
    if not living:
        return {}
    stale_seconds = projects.get_project(tx, living[0].project_id).stale_seconds
    stored = run_health.load_health(tx, [run.id for run in living])
    return {
        run.id: PulseOut(
            state=health.find_liveness(run, one := stored.get(run.id), stale_seconds, now).value,
            heard_at=health.last_report_at(run, one),
            cadence_seconds=one.cadence_seconds if one else None,
            dead=[DeadOut.model_validate(item) for item in one.dead] if one else [],
        )
        for run in living
    }


class _Listed(Protocol):
    @property
    def id(self) -> UUID: ...


def next_cursor(items: Sequence[_Listed], limit: int) -> str | None:
    """The cursor past a page that was filled to its limit."""
    return str(items[-1].id) if len(items) == limit else None
