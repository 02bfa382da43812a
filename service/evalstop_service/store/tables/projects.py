"""Projects, and rows that belong to a project rather than to one of its runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.domain.confidence_sequences import StageNumbers
from evalstop_service.domain.fields import doc
from evalstop_service.domain.project_settings import ProjectSettings, Quotas
from evalstop_service.domain.statuses import PROPOSAL_OPEN_FOR, ProposalKind, ProposalState, Stage
from evalstop_service.store.ids import new_id
from evalstop_service.store.tables.columns import make_table, metadata, partial_index


@dataclass(frozen=True)
class Project(ProjectSettings):
    """A tenant, with its settings. `seed`: of all random choices in the project."""

    id: Annotated[UUID, doc("id of the project")]
    name: Annotated[str, doc("unique in the installation")]
    created_at: Annotated[datetime, doc("when it was created")]
    paused_at: Annotated[datetime | None, doc("stops are paused since then; null: not paused")] = None
    paused_by: Annotated[str | None, doc("who paused it")] = None
    paused_reason: Annotated[str | None, doc("why it is paused")] = None
    paused_until: Annotated[datetime | None, doc("when it resumes by itself; null: when a person resumes it")] = None
    seed: str = ""
    quotas: Quotas = field(default_factory=Quotas)


projects = make_table("projects", Project, sa.UniqueConstraint("name"), defaults={"seed": "", "quotas": "{}"})


@dataclass(frozen=True)
class Key:
    """A key and what it may do. `project_id` is None for a key to the whole installation."""

    id: Annotated[UUID, doc("id of the key")]
    project_id: UUID | None
    name: Annotated[str, doc("for people; shown in the audit log")]
    scopes: tuple[str, ...]
    created_at: Annotated[datetime, doc("when it was created")]
    revoked_at: Annotated[datetime | None, doc("when it was revoked; null: it is valid")]
    expires_at: Annotated[datetime | None, doc("when it expires; null: never")] = None
    networks: Annotated[tuple[str, ...], doc("CIDRs of the networks from which it is accepted; empty: any")] = ()
    endpoint_ids: Annotated[
        tuple[UUID, ...], doc("the endpoints whose stops it may fetch and report on; empty: all")
    ] = ()
    last_used_at: Annotated[datetime | None, doc("when it was last used, to the hour")] = None


keys = make_table(
    "keys",
    Key,
    sa.Column("hash", sa.Text, nullable=False, unique=True),
    sa.Index("ix_keys_project_id", "project_id"),
    refers="project_id",
)


@dataclass(frozen=True)
class Session:
    """A signed-in user, identified by the key `key_id` or by an OpenID issuer.

    `grants`: the roles that the issuer's claims give, by project name, `*` for all projects.
    """

    issuer: str
    subject: str
    name: str
    grants: dict[str, str]
    created_at: Annotated[datetime, doc("when they signed in")]
    expires_at: Annotated[datetime, doc("when the session expires")]
    key_id: Annotated[UUID | None, doc("the key that signed in; null: OpenID Connect")] = None
    id: Annotated[UUID, doc("id of the session")] = field(default_factory=new_id)


sessions = make_table(
    "sessions",
    Session,
    sa.Column("hash", sa.Text),
    sa.UniqueConstraint("id"),
    sa.Index("ix_sessions_expires_at", "expires_at"),
    key="hash",
)


@dataclass(frozen=True)
class StoredPolicy:
    """One version of a policy."""

    id: Annotated[UUID, doc("id of this version")]
    project_id: UUID
    name: Annotated[str, doc("shared by all its versions")]
    version: Annotated[int, doc("counted from 1")]
    document: dict[str, Any]
    created_at: Annotated[datetime, doc("when it was stored; a shipped one: when the project was created")]

    @property
    def reference(self) -> str:
        """The reference that runs request."""
        return f"{self.name}@{self.version}"


policies = make_table(
    "policies", StoredPolicy, sa.UniqueConstraint("project_id", "name", "version"), refers="project_id"
)


@dataclass(frozen=True)
class Group:
    """A group of runs with a rule, which compares them and decides which are to stop or to copy another one."""

    project_id: UUID
    name: Annotated[str, doc("the name of the group, as its runs give it")]
    rule: dict[str, Any]
    created_at: Annotated[datetime, doc("when the rule was set")]
    actor: Annotated[str, doc("who set it")]


groups = make_table("groups", Group, key="project_id name", refers="project_id")


@dataclass(frozen=True)
class RolloutStage:
    """The stage of a policy, since when, and the numbers behind it."""

    project_id: UUID
    policy_name: Annotated[str, doc("name of the policy that earns it")]
    stage: Annotated[Stage, doc("shadow: no stop is carried out; canary: a share; enforce: all")]
    required_precision: Annotated[float, doc("what the lower bound of its precision must reach")]
    canary_share: Annotated[float, doc("the share of its stops carried out while it is a canary")]
    since: Annotated[datetime, doc("when it reached this stage")]
    numbers: Annotated[StageNumbers, doc("the numbers behind the last change")]
    version: Annotated[int, doc("the version that has this stage; other versions are in shadow")]


rollout_stages = make_table("rollout_stages", RolloutStage, key="project_id policy_name", refers="project_id")


class Approval(msgspec.Struct, frozen=True):
    """An approval: the approver's authenticated identity, and the name in the audit log."""

    identity: str
    actor: Annotated[str, doc("`key NAME` or `user NAME`, as in the audit log")]
    at: Annotated[datetime, doc("time of the approval")]


@dataclass(frozen=True)
class Proposal:
    """What is proposed, by whom and why.

    `subject`: see `ProposalKind`. `argument`: what carrying it out needs beyond the subject. The service gives no
    approval.
    """

    id: Annotated[UUID, doc("id of the proposal")]
    project_id: UUID
    kind: Annotated[ProposalKind, doc("kind of change")]
    subject: Annotated[str, doc("the name of the policy, or the id of the run or the decision")]
    summary: str
    argument: str
    reason: Annotated[str, doc("the proposer's reason")]
    proposed_by: Annotated[str, doc("`evalstop` for the service, else `key NAME` or `user NAME`")]
    approvals: Annotated[tuple[Approval, ...], doc("those given so far, beginning with the proposer's")]
    state: Annotated[ProposalState, doc("withdrawn: its numbers no longer hold")]
    created_at: Annotated[datetime, doc("when it was proposed")]
    closed_at: Annotated[datetime | None, doc("when it was confirmed, refused or withdrawn; null: open")] = None

    @property
    def document(self) -> dict[str, Any] | None:
        """The policy that it would store, if it is about one."""
        is_policy = self.kind is ProposalKind.ADD_POLICY_VERSION
        return msgspec.json.decode(self.argument, type=dict[str, Any]) if is_policy else None

    @property
    def open_until(self) -> datetime | None:
        """When it expires; None: the service withdraws it."""
        return None if self.kind is ProposalKind.RAISE_STAGE else self.created_at + PROPOSAL_OPEN_FOR

    def is_open(self, now: datetime) -> bool:
        """Whether it can still be confirmed."""
        return self.state_at(now) is ProposalState.OPEN

    def state_at(self, now: datetime) -> ProposalState:
        """Its state, which is `expired` once nobody can confirm it any more."""
        over = self.open_until is not None and now >= self.open_until
        return ProposalState.EXPIRED if self.state is ProposalState.OPEN and over else self.state


proposals = make_table(
    "proposals",
    Proposal,
    partial_index("uq_proposals_open", "project_id", "kind", "subject", where="state = 'open'", unique=True),
    key="project_id id",
    refers="project_id",
)


@dataclass(frozen=True)
class AuditEntry:
    """One change, and its place in the project's chain, None until it is chained."""

    id: Annotated[UUID, doc("id of the entry; ids ascend with time")]
    actor: Annotated[str, doc("the authenticated actor: `key NAME`, or `user NAME` who signed in")]
    action: str
    subject: str
    details: Annotated[dict[str, Any], doc("the reason, or the values before and after")]
    at: Annotated[datetime, doc("time of the change")]
    position: Annotated[int | None, doc("position in the project's hash chain; null for a moment after the change")] = (
        None
    )
    previous_hash: str | None = None
    hash: Annotated[str | None, doc("hash of this entry and of the previous one: note it to verify the log later")] = (
        None
    )


# Written in the transaction of the change. Chained a moment later: until then the place in the chain is NULL.
audit_log = make_table(
    "audit_log",
    AuditEntry,
    sa.Column("project_id", sa.Uuid),
    sa.Column("position", sa.BigInteger),
    sa.UniqueConstraint("project_id", "position"),
    partial_index("ix_audit_log_waiting", "project_id", "id", where="position IS NULL"),
    key="project_id id",
)

# The end of each project's chain. A transaction that appends to the chain locks this row.
audit_chains = sa.Table(
    "audit_chains",
    metadata,
    sa.Column("project_id", sa.Uuid, primary_key=True),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
)

DEFAULT_NUMBER = 0
"""The number of the experiment of runs that have none, including those that do not use MLflow."""


class Experiment(msgspec.Struct, frozen=True):
    """A row of experiments.

    `number`: the id that clients see, unique in the project; 0 is the default experiment, which is not stored.
    `artifact_location`: the folder that holds one folder of artifacts for each run.
    """

    id: UUID
    project_id: UUID
    number: int
    name: str
    artifact_location: str
    tags: dict[str, str]
    created_at: datetime

    @property
    def reference(self) -> UUID | None:
        """The value that rows refer to it by: None for the default experiment."""
        return None if self.number == DEFAULT_NUMBER else self.id


experiments = make_table(
    "experiments",
    Experiment,
    sa.UniqueConstraint("project_id", "name"),
    sa.UniqueConstraint("project_id", "number", name="uq_experiments_number"),
    refers="project_id",
)
