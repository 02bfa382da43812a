"""Runs, everything recorded while they run, decisions on them, and whether these were right."""

from __future__ import annotations

import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import Action, DecisionState, Mode
from evalstop_service.domain.health import Liveness, MetricFault
from evalstop_service.domain.run import (
    BestCheckpoint,
    ChangePoint,
    EvalChange,
    FirstCall,
    JudgedCall,
    MetricFields,
    RawMaximum,
    Recognition,
    RunAssessment,
    Verdict,
)
from evalstop_service.domain.statuses import BacktestState, DecisionOutcome, RunOutcome, RunStatus, Treatment
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables.columns import (
    EnumText,
    Real,
    StructJson,
    UtcTime,
    metadata,
    of_run,
    own_id,
    part_of,
    partial_index,
)

runs = sa.Table(
    "runs",
    metadata,
    own_id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("status", EnumText(RunStatus), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("metrics", StructJson(dict[str, MetricFields]), nullable=False),
    sa.Column("labels", StructJson(dict[str, str]), nullable=False),
    sa.Column("policy_id", sa.Uuid, sa.ForeignKey("policies.id"), nullable=False),
    sa.Column("mode", EnumText(Mode), nullable=False),
    sa.Column("total_steps", sa.BigInteger),
    # Share of the run's time that one eval takes, 0 if unknown; NULL: checkpoints are not evaluated on request.
    sa.Column("eval_share", sa.Double),
    sa.Column("last_step", sa.BigInteger),
    sa.Column("version", sa.Integer, nullable=False),  # counts the changes of the row
    # The version of the last change to past data: a monitor stored at an earlier version has to be rebuilt.
    sa.Column("rewritten_version", sa.Integer, nullable=False, server_default="0"),
    sa.Column("verdict", StructJson(Verdict), nullable=False),
    sa.Column(
        "calls", StructJson(dict[str, FirstCall]), nullable=False, server_default="{}"
    ),  # by member of the policy
    sa.Column("best_checkpoint", StructJson(BestCheckpoint)),
    sa.Column("raw_maximum", StructJson(RawMaximum)),
    sa.Column("turn", StructJson(ChangePoint)),  # found once the run has ended
    sa.Column("recognition", StructJson(Recognition)),  # how its metrics got their roles; NULL: given by the trainer
    sa.Column("eval_changes", StructJson(tuple[EvalChange, ...]), nullable=False, server_default="[]"),
    sa.Column("detector_failure", sa.Text),  # why its policy no longer judges it
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("updated_at", UtcTime, nullable=False),
    sa.Column("ended_at", UtcTime),
    sa.Column("pruned_at", UtcTime),  # since then its details are being or have been removed
    sa.Column("opened_as", sa.Text),  # the name that its trainer asked for, if it was taken
    sa.Column("job", sa.Text),  # where it runs, as given by its trainer; a trainer that gives the same attaches to it
    sa.Column("job_key", sa.Text),  # the job that a stop would end, from its labels: see `find_job_key`
    sa.Column("opening", sa.Uuid),  # the id of the request that opened it, which may be retried
    sa.Column("opened_by", sa.Uuid),  # the key whose labels identify the job; NULL: any key of the project
    sa.UniqueConstraint("project_id", "name"),
    partial_index("ix_runs_project_id_opened_as", "project_id", "opened_as", where="opened_as IS NOT NULL"),
    partial_index("ix_runs_project_id_job_key", "project_id", "job_key", where="job_key IS NOT NULL"),
    partial_index("uq_runs_project_id_opening", "project_id", "opening", unique=True, where="opening IS NOT NULL"),
    sa.Index("ix_runs_project_id_id", "project_id", "id"),
    sa.Index("ix_runs_project_id_status_id", "project_id", "status", "id"),
    partial_index("ix_runs_project_id_ended_at", "project_id", "ended_at", where="pruned_at IS NULL"),
)

# What people say of a run. In its own table, so that a change does not create a new version that replicas reload.
run_descriptions = sa.Table(
    "run_descriptions",
    metadata,
    of_run(),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("owner", sa.Text),
    sa.Column("group", sa.Text),
    sa.Column("tags", StructJson(tuple[str, ...]), nullable=False),
    sa.Column("notes", sa.Text, nullable=False),
    sa.Column("changed_at", UtcTime, nullable=False),
    sa.Index("ix_run_descriptions_project_id_owner", "project_id", "owner", "run_id"),
    sa.Index("ix_run_descriptions_project_id_group", "project_id", "group", "run_id"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    of_run(),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("resumed_from_step", sa.BigInteger),
    sa.Column("started_at", UtcTime, nullable=False),
)

LIVE = 0
"""`superseded_by` of live observations and checkpoints."""

# The key of an observation is (run, metric, step, superseded_by). `superseded_by` is 0 for the live one and otherwise
# the attempt that replaced it, so the key itself keeps an observation from being counted twice.
observations = sa.Table(
    "observations",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("metric", sa.Text().with_variant(sa.Text(collation="C"), "postgresql"), primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("superseded_by", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("value", Real),
    sa.Column("stderr", sa.Double),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("observed_at", UtcTime),
    sa.Column("received_at", UtcTime, nullable=False),
    postgresql_partition_by="HASH (run_id)",
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    of_run(),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("superseded_by", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("uri", sa.Text, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
)

# Requests for paired evaluations, and their answers. `difference`: the current score less the best one's, in the
# unit and direction of the eval metric; it is stored as an observation, which counts for the verdict.
eval_requests = sa.Table(
    "eval_requests",
    metadata,
    of_run(),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    own_id(nullable=False),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("multiplier", sa.Integer, nullable=False),
    sa.Column("best_step", sa.BigInteger, nullable=False),
    sa.Column("best_uri", sa.Text, nullable=False),
    sa.Column("probability", sa.Double),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("deadline_at", UtcTime, nullable=False),
    sa.Column("answered_at", UtcTime),
    sa.Column("actor", sa.Text),
    sa.Column("difference", sa.Double),
    sa.Column("stderr", sa.Double),
    sa.Column("prompts", sa.Integer),
    sa.Column("probability_after", sa.Double),
    partial_index("ix_eval_requests_project_id_deadline_at", "project_id", "deadline_at", where="answered_at IS NULL"),
)

verdicts = sa.Table(
    "verdicts",
    metadata,
    of_run(),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("verdict", StructJson(Verdict), nullable=False),
    sa.Column("at", UtcTime, nullable=False),
)

# A cache that can be rebuilt from the observations; it may lag behind the run. Writers lock the run's row, as for
# observations, so neither needs a foreign key.
monitor_states = sa.Table(
    "monitor_states",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
)

# Run health, from posts and heartbeats; ingestion writes here only to record a step past its budget.
run_health = sa.Table(
    "run_health",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("project_id", sa.Uuid, nullable=False),
    sa.Column("state", EnumText(Liveness), nullable=False),
    sa.Column("next_check_at", UtcTime),  # NULL: the run has ended
    sa.Column("heartbeat_at", UtcTime),
    sa.Column("cadence_seconds", sa.Double),  # measured: between two posts
    sa.Column("metric_faults", StructJson(tuple[MetricFault, ...]), nullable=False),
    sa.Column("costly_step_seconds", sa.Double),  # of its detectors, in one commit; NULL: never over budget
    sa.Column("changed_at", UtcTime, nullable=False),
    partial_index("ix_run_health_next_check_at", "next_check_at", where="next_check_at IS NOT NULL"),
)

# Runs whose details are being removed: the row stays until all are gone, so that an interrupted removal continues.
run_deletions = sa.Table(
    "run_deletions",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("started_at", UtcTime, nullable=False),
)

# Experiments, MLflow's name for the folders of runs.
experiments = sa.Table(
    "experiments",
    metadata,
    own_id(primary_key=True),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),  # the id that clients see; 0 is the default experiment
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("artifact_location", sa.Text, nullable=False),
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.UniqueConstraint("project_id", "name"),
    sa.UniqueConstraint("project_id", "number", name="uq_experiments_number"),
)

# What MLflow clients store beyond a run's labels. Times are milliseconds since 1970, as clients send them.
mlflow_runs = sa.Table(
    "mlflow_runs",
    metadata,
    of_run(),
    sa.Column("experiment_id", sa.Uuid, sa.ForeignKey("experiments.id"), index=True),  # NULL: the default experiment
    sa.Column("start_time", sa.BigInteger),
    sa.Column("end_time", sa.BigInteger),
    sa.Column("params", sa.JSON, nullable=False),
)


# The stop is to go out, and nobody was handed it yet.
IS_UNSENT = "handed_over_at IS NULL AND state IN ('pending', 'requested', 'escalated')"

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
    sa.Column("asked_at", UtcTime),  # when one of them asked for the stop, so that it is handed over
    sa.Column("asked_by", sa.Text),
    sa.Column("observed_probability", sa.Double, nullable=False),  # of the hold-out that lets its outcome be observed
    sa.UniqueConstraint("run_id", "attempt"),  # one decision an attempt: a concurrent second one is rejected
    sa.Index("ix_decisions_id", "id"),
    sa.Index("ix_decisions_project_id_id", "project_id", "id"),
    sa.Index("ix_decisions_project_id_due_at", "project_id", "due_at"),  # counts stops within an hour
    partial_index("ix_decisions_due_at", "due_at", where="state = 'pending'"),
    partial_index("ix_decisions_deadline_at", "deadline_at", where="deadline_at IS NOT NULL"),
    partial_index("ix_decisions_asked_at", "asked_at", where="asked_at IS NOT NULL AND handed_over_at IS NULL"),
    partial_index("ix_decisions_unsent", "run_id", where=IS_UNSENT),
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
    sa.Column("calls", StructJson(dict[str, JudgedCall])),  # of detectors of its policy that called, observers included
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

# The calls of each case, a row each, with what they are counted by: they are several times as many as the cases, and
# counting them in the JSON of the cases took twelve times as long.
case_calls = sa.Table(
    "case_calls",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("detector", sa.Text, primary_key=True),
    sa.Column("project_id", sa.Uuid, nullable=False),
    sa.Column("policy_id", sa.Uuid, nullable=False),
    sa.Column("job_kind", sa.Text),
    sa.Column("treatment", EnumText(Treatment)),
    sa.Column("observed_probability", sa.Double),
    sa.Column("run_outcome", EnumText(RunOutcome), nullable=False),
    sa.Column("ended_at", UtcTime, nullable=False),
    *(
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("outcome", EnumText(DecisionOutcome), nullable=False),
    ),
    *(sa.Column("delay_steps", sa.BigInteger), sa.Column("gpu_hours_after", sa.Double)),
    # In the order in which they are grouped, and with all that is read: no row is looked up, nothing is sorted.
    sa.Index(
        "ix_case_calls_counted",
        *("project_id", "policy_id", "detector", "treatment", "observed_probability", "run_outcome", "outcome"),
        *("delay_steps", "gpu_hours_after", "ended_at", "job_kind"),
    ),
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
