"""Decisions, and whether they were right."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import sqlalchemy as sa
from msgspec import Struct

from evalstop_service.domain.decision_lifecycle import (
    AWAITING_CONFIRMATION,
    RETURNING,
    STOPPING,
    Action,
    DecisionState,
    Exploit,
    Lifecycle,
)
from evalstop_service.domain.fields import doc
from evalstop_service.domain.run import BestCheckpoint, Call, JudgedCall, RunAssessment, Verdict
from evalstop_service.domain.statuses import (
    DecisionOutcome,
    RunOutcome,
    RunStatus,
    Treatment,
    name_hours,
)
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables.columns import UtcTime, make_table, metadata, of_run, part_of, partial_index

# The stop is to go out, and nobody was handed it yet.
IS_UNSENT = "handed_over_at IS NULL AND state IN ('pending', 'requested', 'escalated')"

# An attempt has one decision to end it. An exploit is beside it, and so is what the rule of a group only recorded, or
# what came to nothing: the policy may still decide.
ENDS_ATTEMPT = (
    "decisions.action <> 'exploit' AND"
    " (decisions.\"group\" IS NULL OR decisions.state NOT IN ('shadow', 'held_out', 'vetoed', 'moot'))"
)

# At most one of a run.
IS_OPEN_EXPLOIT = "action = 'exploit' AND state IN ('on_hold', 'pending', 'requested', 'acknowledged', 'escalated')"


@dataclass(frozen=True, kw_only=True)
class Decision(Lifecycle):
    """A stop verdict on record.

    `observed_probability`: the probability with which the run was held out so that its outcome is observed.
    """

    id: Annotated[UUID, doc("id of the decision")]
    run_id: Annotated[UUID, doc("the run to be stopped")]
    project_id: UUID
    attempt: Annotated[int, doc("the run's attempt")]
    step: Annotated[int, doc("the step at which the policy wanted the stop")]
    verdict: Annotated[Verdict, doc("the verdict at that time, with its evidence")]
    best_checkpoint: Annotated[BestCheckpoint | None, doc("at the time of the decision")]
    policy_id: UUID
    created_at: Annotated[datetime, doc("when the policy wanted the stop")]
    run_name: Annotated[str, doc("the run's name")]
    policy_name: str
    policy_version: int
    observed_probability: float
    group: Annotated[str | None, doc("the group whose rule decided; null: the policy or a person did")] = None
    exploit: Annotated[Exploit | None, doc("what the run is to copy; null: it is not to copy a run")] = None

    @property
    def stops(self) -> bool:
        """Whether the job is meant to end. Its trainer must not hear of it before the stop is handed over."""
        return self.action is Action.STOP and self.is_requested

    @property
    def is_requested(self) -> bool:
        """Whether receivers are or were asked to carry it out."""
        return self.state in STOPPING

    @property
    def should_stop(self) -> bool:
        """Whether the trainer may be told to stop."""
        return self.stops and self.handed_over_at is not None

    @property
    def follows_run(self) -> bool:
        """Whether it applies to the run's next attempt too: a parked job that resumes on idle GPUs is still parked, and
        one that a person resumed is not parked again."""
        staying = AWAITING_CONFIRMATION | {DecisionState.PARKED, DecisionState.UNDONE}
        return self.action is Action.PARK and self.state in staying

    def is_recovered(self, verdict: Verdict) -> bool:
        """Whether a verdict ends it: past the decision's step the policy no longer suspects the run."""
        returning = self.action is Action.PARK and self.state in RETURNING and self.group is None
        return returning and verdict.verdict is Call.CONTINUE and verdict.step is not None and verdict.step > self.step

    @property
    def ordered(self) -> bool:
        """Whether a person ordered the stop without a call from the policy: there is no evidence behind it."""
        return not self.verdict.evidence and self.group is None


decisions = make_table(
    "decisions",
    Decision,
    sa.Column("asked_at", UtcTime),  # when a receiver or the trainer asked for the stop, so that it is handed over
    sa.Column("asked_by", sa.Text),
    sa.Index("ix_decisions_id", "id"),
    sa.Index("ix_decisions_project_id_id", "project_id", "id"),
    sa.Index("ix_decisions_project_id_due_at", "project_id", "due_at"),  # counts stops within an hour
    partial_index("ix_decisions_due_at", "due_at", where="state = 'pending'"),
    partial_index("ix_decisions_deadline_at", "deadline_at", where="deadline_at IS NOT NULL"),
    partial_index("ix_decisions_asked_at", "asked_at", where="asked_at IS NOT NULL AND handed_over_at IS NULL"),
    partial_index("ix_decisions_unsent", "run_id", where=IS_UNSENT),
    partial_index("uq_decisions_run_id_attempt", "run_id", "attempt", unique=True, where=ENDS_ATTEMPT),
    partial_index("uq_decisions_open_exploit", "run_id", unique=True, where=IS_OPEN_EXPLOIT),
    key="run_id id",
    without="was_postponed",
    refers="run_id project_id policy_id",
    defaults={"action": "stop", "state_reason": "", "guard_kinds": "[]", "escalations": "0"},
)

# The processes that hear vetoes. A veto window is over when all of them have written after its end.
veto_listeners = sa.Table(
    "veto_listeners",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("heard_until", UtcTime, nullable=False),  # all vetoes sent before were dealt with
)


@dataclass(frozen=True)
class DecisionChange:
    """One transition of a decision: its new state, when, by whom and why."""

    sequence: int
    state: DecisionState
    actor: Annotated[str, doc("a person, a key, a receiver, or evalstop")]
    reason: Annotated[str, doc("why it changed")]
    details: Annotated[dict[str, Any], doc("the receiver's report, or the guards that held it")]
    at: Annotated[datetime, doc("when it changed")]


decision_changes = make_table(
    "decision_changes", DecisionChange, *part_of("decisions", "decision_id"), key="run_id decision_id sequence"
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Whether the decision on an attempt, to stop it or to let it continue, was right; `sequence` is given by the store
    when it is added."""

    sequence: int = 0
    outcome: Annotated[DecisionOutcome, doc("right, wrong or unknown")]
    turn_step: Annotated[int | None, doc("the step where the eval turned; null: it did not, or is unknown")]
    derived: Annotated[bool, doc("true: from later evals; false: by a person")] = False
    actor: Annotated[str, doc("who labeled it, or evalstop")]
    note: Annotated[str, doc("for people")]
    assessment: Annotated[RunAssessment | None, doc("how an outcome was derived; null: by a person")] = None
    at: Annotated[datetime, doc("when it was recorded")]


outcomes = make_table("outcomes", Outcome, of_run(), sa.Column("attempt", sa.Integer), key="run_id attempt sequence")


@dataclass(frozen=True, kw_only=True)
class Case:
    """An attempt that has ended: what was decided about it, its outcome, and its cost.

    Fields that follow from a decision are None where there was none. `key_id`: the key that opened its run.
    `gpu_hours_saved`: after the decision; None: not known. `name_hours` says what they count as.
    `revision`: another one whenever the row is rewritten.
    """

    run_id: Annotated[UUID, doc("the run of the attempt")]
    attempt: Annotated[int, doc("the attempt of the run")]
    run_name: str
    project_id: UUID
    policy_name: str
    policy_version: int
    job_kind: Annotated[str | None, doc("the label job_kind of the run; null: none")]
    gpus: Annotated[float | None, doc("the label gpus of the run; null: none")]
    run_outcome: Annotated[RunOutcome, doc("turned: the eval fell for good; healthy: it did not; undecided: unknown")]
    derived: Annotated[bool, doc("true: from its evals; false: by a person")]
    turn_step: Annotated[int | None, doc("the step where it turned; null: it did not, or is unknown")]
    decision_id: Annotated[UUID | None, doc("the decision; null: never flagged")] = None
    treatment: Annotated[
        Treatment | None,
        doc("the stop was observed (held out or in shadow mode), carried out or prevented; null: no stop"),
    ] = None
    observed_probability: Annotated[float | None, doc("probability of being observed after the decision")] = None
    decided_step: Annotated[int | None, doc("the step at which the policy wanted a stop; null: never flagged")] = None
    detectors: Annotated[list[str] | None, doc("the detectors that wanted the stop")] = None
    calls: Annotated[
        dict[str, JudgedCall], doc("the detectors of its policy that called for a stop, observers included")
    ] = field(default_factory=dict)
    stated_risk: Annotated[float | None, doc("the share of healthy runs that the policy states it stops")] = None
    outcome: Annotated[DecisionOutcome, doc("outcome of the decision to stop it or, without one, of letting it run")]
    delay_steps: Annotated[int | None, doc("from the turn to the decision")] = None
    gpu_hours: Annotated[float | None, doc("null: the run has no label gpus")]
    gpu_hours_saved: float | None = None
    gpu_hours_lost: Annotated[
        float | None,
        doc("GPU-hours since the best checkpoint, which a wrong stop causes to be repeated; null: unknown"),
    ] = None
    parked_seconds: Annotated[float | None, doc("how long its job was parked; null: never")]
    seconds: Annotated[float, doc("how long it lasted")]
    evals: Annotated[int, doc("finite ones")]
    key_id: UUID | None
    ended_at: Annotated[datetime, doc("when the attempt ended")]
    revision: UUID = field(default_factory=new_id)

    @property
    def hours(self) -> dict[str, float]:
        """The GPU-hours by what they count as, such as `saved`; empty if they count as nothing, or are not known."""
        name = name_hours(self.treatment, self.outcome)
        return {} if name is None or self.gpu_hours_saved is None else {name: self.gpu_hours_saved}


_BY_POLICY = ("project_id", "policy_name", "policy_version")

# Derived from the tables above; all estimates are computed from these rows.
cases = make_table(
    "cases",
    Case,
    sa.Column("revision", sa.Uuid, nullable=False, default=new_id),
    sa.Index("ix_cases_project_id_ended_at", "project_id", "ended_at", "run_id"),
    sa.Index("ix_cases_project_id_revision", "project_id", "revision"),
    # Two partial indexes: the few flagged cases, and all others in an index small enough to be read whole.
    partial_index("ix_cases_flagged", *_BY_POLICY, "ended_at", where="decision_id IS NOT NULL"),
    partial_index("ix_cases_passed", *_BY_POLICY, "outcome", where="decision_id IS NULL"),
    key="run_id attempt",
    without="calls",
)

COUNTED_BY = (
    *("run_id", "attempt", *_BY_POLICY, "job_kind"),
    *("treatment", "observed_probability", "run_outcome", "ended_at"),
)
"""The columns of a case that the rows of its calls repeat."""

# The calls of each case, a row each, with what they are counted by: they are several times as many as the cases.
case_calls = make_table(
    "case_calls",
    JudgedCall,
    *(sa.Column(name, cases.c[name].type, nullable=cases.c[name].nullable) for name in COUNTED_BY),
    sa.Column("detector", sa.Text),
    # In the order in which they are grouped, and with all that is read: no row is looked up, nothing is sorted.
    sa.Index(
        "ix_case_calls_counted",
        *(*_BY_POLICY, "detector", "treatment", "observed_probability", "run_outcome", "outcome"),
        *("delay_steps", "gpu_hours_after", "ended_at", "job_kind"),
    ),
    key="run_id attempt detector",
)


class BacktestFinding(Struct, frozen=True):
    """What a backtested policy would have done to one run, what was decided at the time, and the run's outcome."""

    run_id: Annotated[UUID, doc("the replayed run")]
    run_name: Annotated[str, doc("the run's name")]
    status: RunStatus
    last_step: Annotated[int | None, doc("the highest step with an observation; null: no observation")]
    policy: Annotated[str, doc("the policy of the run, as NAME@VERSION")]
    decision_id: Annotated[UUID | None, doc("the recorded decision; null: none")]
    decided_step: Annotated[int | None, doc("the step of the recorded decision")]
    state: DecisionState | None
    run_outcome: Annotated[RunOutcome | None, doc("whether its eval had turned by its end; null: not assessed")]
    turn_step: Annotated[int | None, doc("the step where its eval turned; null: it did not, or is unknown")]
    verdict: str = "continue"
    step: Annotated[int | None, doc("the step where the policy would have stopped the run; null: never")] = None
    reason: Annotated[str, doc("the reason of that verdict")] = ""
    outcome: Annotated[DecisionOutcome, doc("whether the policy would have been right")] = DecisionOutcome.UNKNOWN
    hours_after: Annotated[float | None, doc("GPU-hours that the run spent after `step`; null: unknown")] = None
    error: Annotated[str | None, doc("why the run could not be replayed")] = None
    calls: Annotated[
        dict[str, int | None], doc("by detector of the policy, the step at which it first called for a stop")
    ] = {}

    @property
    def differs(self) -> bool:
        """Whether the policy and the decision disagree: one stops the run, the other does not."""
        return (self.step is not None) != (self.decided_step is not None)


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """A row; `findings` has one entry for each replayed run, newest first."""

    id: Annotated[UUID, doc("id of the backtest")]
    project_id: UUID
    document: dict[str, Any]
    most_runs: Annotated[int, doc("the requested number of runs")]
    replayed: Annotated[int, doc("number of runs that were replayed")]
    cut_short: Annotated[bool, doc("true: its time was over before all of these runs were replayed")]
    findings: list[BacktestFinding] = field(default_factory=list)
    actor: Annotated[str, doc("who requested it")]
    created_at: Annotated[datetime, doc("when it was requested")]


backtests = make_table(
    "backtests",
    Backtest,
    sa.Index("ix_backtests_project_id_id", "project_id", "id"),
    refers="project_id",
)
