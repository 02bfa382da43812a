"""Rollout stages: how much a policy may do by itself in a project, by its measured precision."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.confidence_sequences import StageNumbers
from evalstop_service.domain.fields import doc
from evalstop_service.domain.statuses import Stage
from evalstop_service.store.database import Transaction, find_all, find_one
from evalstop_service.store.tables import policies, rollout_stages, runs


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


def find_stage(tx: Transaction, project_id: UUID, policy_name: str) -> RolloutStage | None:
    """The rollout stage of a policy; None: only its runs' mode counts."""
    return find_one(tx, RolloutStage, sa.select(rollout_stages).where(*_of(project_id, policy_name)))


def lock_stage(tx: Transaction, project_id: UUID, policy_name: str) -> RolloutStage | None:
    """The rollout stage of a policy, locked until the transaction ends."""
    query = sa.select(rollout_stages).where(*_of(project_id, policy_name))
    return find_one(tx, RolloutStage, query.with_for_update())


def list_stages(tx: Transaction, project_id: UUID | None = None) -> list[RolloutStage]:
    """All rollout stages, of one project or of all, by project and policy."""
    query = sa.select(rollout_stages).order_by(rollout_stages.c.project_id, rollout_stages.c.policy_name)
    if project_id is not None:
        query = query.where(rollout_stages.c.project_id == project_id)
    return find_all(tx, RolloutStage, query)


def save_stage(tx: Transaction, rollout_stage: RolloutStage) -> None:
    """Store a policy's rollout stage, replacing the previous one; its project or its row is locked."""
    # Not deleted and inserted again: whoever waits for the lock of a deleted row finds none.
    of_policy = _of(rollout_stage.project_id, rollout_stage.policy_name)
    if tx.execute(rollout_stages.update().where(*of_policy).values(vars(rollout_stage))).rowcount == 0:
        tx.execute(rollout_stages.insert().values(vars(rollout_stage)))


def delete_stage(tx: Transaction, project_id: UUID, policy_name: str) -> bool:
    """Delete a policy's rollout stage, so that only its runs' mode counts; False if there was none."""
    return tx.execute(rollout_stages.delete().where(*_of(project_id, policy_name))).rowcount > 0


def find_newest_run(tx: Transaction, project_id: UUID, policy_name: str) -> UUID | None:
    """The most recently opened run with any version of a policy."""
    query = sa.select(runs.c.id).join(policies, policies.c.id == runs.c.policy_id)
    query = query.where(runs.c.project_id == project_id, policies.c.name == policy_name)
    run_id: UUID | None = tx.execute(query.order_by(runs.c.id.desc()).limit(1)).scalar()
    return run_id


def _of(project_id: UUID, policy_name: str) -> tuple[sa.ColumnElement[bool], ...]:
    return rollout_stages.c.project_id == project_id, rollout_stages.c.policy_name == policy_name
