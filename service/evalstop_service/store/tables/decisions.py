"""Decisions on runs, and whether they were right."""

from __future__ import annotations

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import Action, DecisionState
from evalstop_service.domain.run_results import BestCheckpoint, RunAssessment, Verdict
from evalstop_service.domain.statuses import BacktestState, DecisionOutcome, RunOutcome, Treatment
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables.columns import (
    EnumText,
    StructJson,
    UtcTime,
    metadata,
    of_run,
    own_id,
    part_of,
    partial_index,
)

decisions = sa.Table(
    "decisions",
    metadata,
    of_run(),
    own_id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("action", EnumText(Action), nullable=False, server_default="stop"),
    sa.Column("state", EnumText(DecisionState), nullable=False),
    sa.Column("state_reason", sa.Text, nullable=False, server_default=""),  # of its last transition
    sa.Column("guard_kinds", StructJson(list[str]), nullable=False, server_default="[]"),  # while it is on hold
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("verdict", StructJson(Verdict), nullable=False),
    sa.Column("best_checkpoint", StructJson(BestCheckpoint)),
    sa.Column("policy_id", sa.Uuid, sa.ForeignKey("policies.id"), nullable=False),
    sa.Column("due_at", UtcTime, nullable=False),  # the end of the veto window
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("deadline_at", UtcTime),  # when the service has to act by itself; NULL: never
    sa.Column("escalations", sa.Integer, nullable=False, server_default="0"),
    sa.Column("handed_over_at", UtcTime),  # when its stop first went out; NULL: it can still be vetoed
    sa.Column("handed_over_to", sa.Text),  # the receiver or the trainer, in words
    sa.Column("observed_probability", sa.Double, nullable=False),  # of the hold-out that lets its outcome be observed
    sa.UniqueConstraint("run_id", "attempt"),  # one decision an attempt: a concurrent second one is rejected
    sa.Index("ix_decisions_id", "id"),
    sa.Index("ix_decisions_project_id_id", "project_id", "id"),
    sa.Index("ix_decisions_project_id_due_at", "project_id", "due_at"),  # counts stops within an hour
    partial_index("ix_decisions_due_at", "due_at", where="state = 'pending'"),
    partial_index("ix_decisions_deadline_at", "deadline_at", where="deadline_at IS NOT NULL"),
)

# The processes that hear vetoes. A veto window is over when all of them have written after its end.
veto_listeners = sa.Table(
    "veto_listeners",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("heard_until", UtcTime, nullable=False),  # all vetoes sent before were dealt with
)

decision_changes = sa.Table(
    "decision_changes",
    metadata,
    *part_of("decisions", "decision_id", primary_key=True),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("state", EnumText(DecisionState), nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Column("at", UtcTime, nullable=False),
)

# What turned out to be true of an attempt, flagged or not; the last row counts.
outcomes = sa.Table(
    "outcomes",
    metadata,
    of_run(),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("outcome", EnumText(DecisionOutcome), nullable=False),
    sa.Column("turn_step", sa.BigInteger),
    sa.Column("derived", sa.Boolean, nullable=False),  # from later evals; else a person reported it
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("assessment", StructJson(RunAssessment)),  # the numbers behind it; NULL: a person reported it
    sa.Column("at", UtcTime, nullable=False),
)

# Attempts that have ended, one row each: decision, outcome and cost. Derived from the tables above; all estimates are
# computed from these rows.
cases = sa.Table(
    "cases",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("project_id", sa.Uuid, nullable=False),
    sa.Column("policy_id", sa.Uuid, nullable=False),
    sa.Column("job_kind", sa.Text),
    sa.Column("gpus", sa.Double),
    sa.Column("run_outcome", EnumText(RunOutcome), nullable=False),
    sa.Column("derived", sa.Boolean, nullable=False),
    sa.Column("turn_step", sa.BigInteger),
    sa.Column("decision_id", sa.Uuid),  # NULL: never flagged; then all columns about the decision are NULL
    sa.Column("treatment", EnumText(Treatment)),
    sa.Column("observed_probability", sa.Double),
    sa.Column("decided_step", sa.BigInteger),
    sa.Column("detectors", sa.JSON(none_as_null=True)),  # those that called for the stop
    sa.Column("stated_risk", sa.Double),  # the share of healthy runs that the policy says it stops
    sa.Column("outcome", EnumText(DecisionOutcome), nullable=False),
    sa.Column("delay_steps", sa.BigInteger),  # from the turn to the decision
    sa.Column("gpu_hours", sa.Double),  # of the whole attempt; NULL: the number of GPUs is not known
    sa.Column("gpu_hours_saved", sa.Double),  # by a stop, extrapolated; by one not carried out, measured
    sa.Column("gpu_hours_lost", sa.Double),  # by a stop that was wrong
    sa.Column("parked_seconds", sa.Double),  # how long its job was parked; NULL: never
    # Whether it counts towards a rollout stage depends on these.
    sa.Column("seconds", sa.Double, nullable=False),
    sa.Column("evals", sa.Integer, nullable=False),  # finite ones
    sa.Column("key_id", sa.Uuid),  # the key that opened its run
    sa.Column("ended_at", UtcTime, nullable=False),
    sa.Column("revision", sa.Uuid, nullable=False, default=new_id),  # changes whenever the row is rewritten
    sa.Index("ix_cases_project_id_ended_at", "project_id", "ended_at", "run_id"),
    sa.Index("ix_cases_project_id_revision", "project_id", "revision"),
    # Two partial indexes: the few flagged cases, and all others in an index small enough to be read whole.
    partial_index("ix_cases_flagged", "project_id", "policy_id", "ended_at", where="decision_id IS NOT NULL"),
    partial_index("ix_cases_passed", "project_id", "policy_id", "outcome", where="decision_id IS NULL"),
)

# A policy replayed on past runs before it is used.
backtests = sa.Table(
    "backtests",
    metadata,
    own_id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Column("most_runs", sa.Integer, nullable=False),
    sa.Column("state", EnumText(BacktestState), nullable=False),
    sa.Column("total", sa.Integer, nullable=False, server_default="0"),
    sa.Column("done", sa.Integer, nullable=False, server_default="0"),
    sa.Column("findings", sa.JSON, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("lease_until", UtcTime),  # of the worker that runs it
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("ended_at", UtcTime),
    sa.Index("ix_backtests_project_id_id", "project_id", "id"),
)
