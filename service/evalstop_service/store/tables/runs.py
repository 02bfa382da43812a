"""Runs, and everything recorded while they run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, NamedTuple
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.domain.decision_lifecycle import Exploit, Mode
from evalstop_service.domain.fields import doc
from evalstop_service.domain.health import Liveness, MetricFault
from evalstop_service.domain.run import (
    BestCheckpoint,
    ChangePoint,
    EvalChange,
    FirstCall,
    MetricFields,
    RawMaximum,
    Recognition,
    RunDescription,
    Verdict,
    find_version,
)
from evalstop_service.domain.statuses import UNENDED, RunStatus
from evalstop_service.store.tables.columns import Real, UtcTime, make_table, metadata, of_run, partial_index


class Run(msgspec.Struct, frozen=True):
    """A row of runs, which repeats the name and version of its policy: neither ever changes.

    `turn` is None until the run has ended. `recognition`: how the roles in `metrics` were found; None when the trainer
    gave them, see `runs.metric_roles`. `pruned_at`: since then its details are being or have been removed, and nothing
    can be added to it. `opened_as`: the name that its trainer asked for, where that was taken. `job`: where it runs, as
    given by its trainer. `job_key`: the job that a stop would end, see `find_job_key`. `opening`: the id of the
    request that opened it. `opened_by`: the key that did. `eval_share`: the share of its time that one eval takes, 0 if
    unknown; None: checkpoints are not evaluated on request. `detector_failure`: why its policy no longer judges it.
    `calls`: by the name of a member of its policy, of those that called for a stop in this attempt. `exploit`: the copy
    of another run that is open.
    """

    id: Annotated[UUID, doc("id of the run; ids ascend with time")]
    project_id: UUID
    name: Annotated[str, doc("unique in the project")]
    status: Annotated[RunStatus, doc("running, or how it ended: completed, failed, stopped or lost")]
    attempt: Annotated[int, doc("counts from 1, plus 1 for each resume")]
    metrics: dict[str, MetricFields]
    labels: Annotated[dict[str, str], doc("receivers find the job by these")]
    policy_id: UUID
    policy_name: str
    policy_version: int
    mode: Annotated[Mode, doc("shadow: decisions are only recorded; enforce: the run is stopped")]
    total_steps: Annotated[int | None, doc("the planned length; null: not reported")]
    last_step: Annotated[int | None, doc("the highest step with an observation; null: none")]
    version: int
    verdict: Annotated[Verdict, doc("the policy's current verdict")]
    best_checkpoint: Annotated[BestCheckpoint | None, doc("the one to ship; null: no checkpoint has an eval")]
    raw_maximum: Annotated[RawMaximum | None, doc("the highest eval, with or without a checkpoint; null: no eval")]
    created_at: Annotated[datetime, doc("when it was opened")]
    updated_at: Annotated[datetime, doc("when it last got observations or changed")]
    ended_at: Annotated[datetime | None, doc("when it ended; null: running")]
    turn: Annotated[ChangePoint | None, doc("null until the run has ended, and when the eval shows no fall")] = None
    rewritten_version: int = 0
    recognition: Recognition | None = None
    pruned_at: Annotated[datetime | None, doc("when its observations and checkpoints were deleted")] = None
    opened_as: str | None = None
    job: str | None = None
    job_key: str | None = None
    opening: UUID | None = None
    opened_by: UUID | None = None
    eval_share: Annotated[
        float | None, doc("share of its time that one eval takes, 0 if unknown; null: no evaluation on request")
    ] = None
    eval_changes: Annotated[tuple[EvalChange, ...], doc("the steps from which the eval is measured differently")] = ()
    detector_failure: str | None = None
    calls: dict[str, FirstCall] = {}
    exploit: Exploit | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended; a lost one may return."""
        return self.ended_at is not None and self.status != RunStatus.LOST

    @property
    def best_is_outdated(self) -> bool:
        """Whether no checkpoint has been measured since the eval changed."""
        if self.best_checkpoint is None or self.last_step is None:
            return False
        newest = find_version(self.eval_changes, self.last_step)
        return find_version(self.eval_changes, self.best_checkpoint.step) != newest

    @property
    def length_known(self) -> bool:
        """Whether the planned length is known: decisions are then faster.

        A run that exceeds its plan, or completes within half of it, probably has steps of another unit than the plan.
        """
        if self.total_steps is None or self.last_step is None:
            return self.total_steps is not None
        is_short = self.status is RunStatus.COMPLETED and 2 * self.last_step <= self.total_steps
        return self.last_step <= self.total_steps and not is_short

    @property
    def heard_at(self) -> datetime | None:
        """When it last got observations or changed; None: it has ended."""
        return self.updated_at if self.status in UNENDED else None


runs = make_table(
    "runs",
    Run,
    sa.UniqueConstraint("project_id", "name"),
    partial_index("ix_runs_project_id_opened_as", "project_id", "opened_as", where="opened_as IS NOT NULL"),
    partial_index("ix_runs_project_id_job_key", "project_id", "job_key", where="job_key IS NOT NULL"),
    partial_index("uq_runs_project_id_opening", "project_id", "opening", unique=True, where="opening IS NOT NULL"),
    sa.Index("ix_runs_project_id_id", "project_id", "id"),
    sa.Index("ix_runs_project_id_status_id", "project_id", "status", "id"),
    partial_index("ix_runs_project_id_ended_at", "project_id", "ended_at", where="pruned_at IS NULL"),
    refers="project_id policy_id",
    defaults={"rewritten_version": "0", "calls": "{}", "eval_changes": "[]"},
)


class RunningRun(NamedTuple):
    """What is counted of a run whose status is `running`; `gpus`: None if its label is missing or invalid."""

    run_id: UUID
    project_id: UUID
    may_have_turned: bool
    gpus: float | None
    job_key: str | None


# A narrow copy: the rows of 40,000 running runs take 260 MB, these 4 MB. Whoever writes has locked the run.
running_runs = make_table(
    "running_runs",
    RunningRun,
    sa.Index("ix_running_runs_project_id_may_have_turned_run_id", "project_id", "may_have_turned", "run_id"),
    key="run_id",
)

# In its own table, so that a change does not create a new version of the run that replicas reload.
run_descriptions = make_table(
    "run_descriptions",
    RunDescription,
    of_run(),
    sa.Column("project_id", sa.Uuid, sa.ForeignKey("projects.id"), nullable=False),
    sa.Column("changed_at", UtcTime, nullable=False),
    sa.Index("ix_run_descriptions_project_id_owner", "project_id", "owner", "run_id"),
    sa.Index("ix_run_descriptions_project_id_group", "project_id", "group", "run_id"),
    key="run_id",
    defaults={"step_notes": "[]"},
)

attempts = sa.Table(
    "attempts",
    metadata,
    of_run(),
    sa.Column("attempt", sa.Integer),
    sa.Column("resumed_from_step", sa.BigInteger),
    sa.Column("started_at", UtcTime, nullable=False),
    sa.PrimaryKeyConstraint("run_id", "attempt"),
)

LIVE = 0
"""`superseded_by` of live observations and checkpoints."""


@dataclass(frozen=True)
class StoredObservation:
    """An observation as stored."""

    metric: Annotated[str, doc("the name of the series")]
    step: Annotated[int, doc("the training step at which it was measured")]
    value: float
    stderr: Annotated[float | None, doc("the standard error of the value; null: not reported")]
    observed_at: datetime | None
    attempt: Annotated[int, doc("the attempt that reported it")]
    received_at: Annotated[datetime, doc("when it was stored")]


# `superseded_by` is 0 for the live observation and otherwise the attempt that replaced it, so the key itself keeps an
# observation from being counted twice.
observations = make_table(
    "observations",
    StoredObservation,
    sa.Column("run_id", sa.Uuid),
    sa.Column("metric", sa.Text().with_variant(sa.Text(collation="C"), "postgresql")),
    sa.Column("value", Real),
    sa.Column("superseded_by", sa.Integer),
    key="run_id metric step superseded_by",
    postgresql_partition_by="HASH (run_id)",
)


@dataclass(frozen=True)
class Checkpoint:
    """The step of a saved model and where it was saved."""

    step: Annotated[int, doc("the training step that it holds")]
    uri: Annotated[str, doc("the URI that the trainer reported")]
    attempt: Annotated[int, doc("the attempt that saved it")]
    created_at: Annotated[datetime, doc("when it was registered")]


checkpoints = make_table(
    "checkpoints", Checkpoint, of_run(), sa.Column("superseded_by", sa.Integer), key="run_id step superseded_by"
)


class EvalRequest(msgspec.Struct, frozen=True):
    """A request for a paired evaluation at a step, and its answer."""

    id: Annotated[UUID, doc("id of the request")]
    run_id: Annotated[UUID, doc("the run that is suspected to have turned")]
    project_id: UUID
    attempt: Annotated[int, doc("the attempt of the run")]
    step: Annotated[int, doc("evaluate the first checkpoint registered at or after this step")]
    number: Annotated[int, doc("1 for the run's first request")]
    multiplier: Annotated[int, doc("number of prompts, as a multiple of a usual eval")]
    best_step: int
    best_uri: str
    probability: Annotated[float | None, doc("probability that the run had turned, at the time of the request")]
    created_at: Annotated[datetime, doc("when it was requested")]
    deadline_at: Annotated[datetime, doc("it can be answered until then")]
    answered_at: Annotated[datetime | None, doc("null: not answered")] = None
    actor: Annotated[str | None, doc("who answered")] = None
    difference: Annotated[float | None, doc("the current score minus the best one, in the unit of the eval metric")] = (
        None
    )
    stderr: Annotated[float | None, doc("the standard error of the difference")] = None
    prompts: Annotated[int | None, doc("number of prompts on which both were scored")] = None
    probability_after: Annotated[float | None, doc("probability that the run had turned, including the answer")] = None

    @property
    def seed(self) -> int:
        """Both evaluations draw their prompts with this seed."""
        return self.id.int & 0x7FFF_FFFF

    def is_open(self, now: datetime) -> bool:
        """Whether it can still be answered."""
        return self.answered_at is None and now < self.deadline_at


eval_requests = make_table(
    "eval_requests",
    EvalRequest,
    partial_index("ix_eval_requests_project_id_deadline_at", "project_id", "deadline_at", where="answered_at IS NULL"),
    key="run_id attempt step",
    refers="run_id project_id",
)


@dataclass(frozen=True)
class VerdictChange:
    """A verdict, and when it was reached."""

    sequence: int
    attempt: int
    verdict: Verdict
    at: datetime


verdicts = make_table("verdicts", VerdictChange, of_run(), key="run_id sequence")


class StoredMonitorState(NamedTuple):
    """The opaque state of a monitor, and the run's version that it belongs to."""

    version: int
    state: str


# A cache that can be rebuilt from the observations; it may lag behind the run. Writers lock the run's row, as for
# observations, so neither needs a foreign key.
monitor_states = make_table("monitor_states", StoredMonitorState, sa.Column("run_id", sa.Uuid), key="run_id")


@dataclass(frozen=True)
class RunHealth:
    """The health of a run at its last check.

    `next_check_at`: None once the run has ended. `changed_at`: when `state` last changed. `heartbeat_at`: the last
    heartbeat. `cadence_seconds`: see `health.measure_cadence`.
    """

    run_id: UUID
    project_id: UUID
    state: Annotated[Liveness, doc("alive; stale: its reports are late; lost: considered ended")]
    next_check_at: datetime | None
    changed_at: datetime
    heartbeat_at: datetime | None = None
    cadence_seconds: Annotated[float | None, doc("longest usual pause between reports; null: not yet known")] = None
    metric_faults: Annotated[
        tuple[MetricFault, ...], doc("watched metrics without usable data, at the last check")
    ] = ()


run_health = make_table(
    "run_health",
    RunHealth,
    partial_index("ix_run_health_next_check_at", "next_check_at", where="next_check_at IS NOT NULL"),
    key="run_id",
)

# Runs whose details are being removed: the row stays until all are gone, so that an interrupted removal continues.
run_deletions = sa.Table(
    "run_deletions",
    metadata,
    sa.Column("run_id", sa.Uuid, primary_key=True),
    sa.Column("started_at", UtcTime, nullable=False),
)


class MlflowRun(msgspec.Struct, frozen=True):
    """A row of mlflow_runs, or the defaults for a run that has none.

    `experiment_id`: None is the default experiment. `start_time`, `end_time`: milliseconds since 1970, as the client
    sent them.
    """

    run_id: UUID
    experiment_id: UUID | None = None
    start_time: int | None = None
    end_time: int | None = None
    params: dict[str, str] = {}


mlflow_runs = make_table(
    "mlflow_runs",
    MlflowRun,
    sa.Column("start_time", sa.BigInteger),
    sa.Column("end_time", sa.BigInteger),
    sa.Index("ix_mlflow_runs_experiment_id", "experiment_id"),
    key="run_id",
    refers="run_id experiment_id",
)
