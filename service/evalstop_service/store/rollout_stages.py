"""Rollout stages: how much a policy may do by itself in a project, by its measured precision."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.project_settings import ProjectSettings
from evalstop_service.domain.statuses import Treatment
from evalstop_service.store.cases import IS_FLAGGED, CaseCount, CaseFilter, filter_cases, key_columns
from evalstop_service.store.database import Transaction, find_all, find_one, match_given, save_row
from evalstop_service.store.tables import cases, rollout_stages
from evalstop_service.store.tables.projects import RolloutStage as RolloutStage


def find_stage(tx: Transaction, project_id: UUID, policy_name: str) -> RolloutStage | None:
    """The rollout stage of a policy; None: only its runs' mode counts."""
    return find_one(tx, RolloutStage, sa.select(rollout_stages).where(*_of(project_id, policy_name)))


def lock_stage(tx: Transaction, project_id: UUID, policy_name: str) -> RolloutStage | None:
    """The rollout stage of a policy, locked until the transaction ends."""
    query = sa.select(rollout_stages).where(*_of(project_id, policy_name))
    return find_one(tx, RolloutStage, query.with_for_update())


def list_stages(tx: Transaction, project_id: UUID | None = None) -> list[RolloutStage]:
    """All rollout stages, of one project or of all, by project and policy."""
    query = sa.select(rollout_stages).where(*match_given({rollout_stages.c.project_id: project_id}))
    return find_all(tx, RolloutStage, query.order_by(rollout_stages.c.project_id, rollout_stages.c.policy_name))


def load_stages(tx: Transaction, project_id: UUID) -> dict[str, RolloutStage]:
    """The rollout stages of a project by policy."""
    return {stage.policy_name: stage for stage in list_stages(tx, project_id)}


def save_stage(tx: Transaction, rollout_stage: RolloutStage) -> None:
    """Store a policy's rollout stage, replacing the previous one; its project or its row is locked."""
    save_row(tx, rollout_stages, vars(rollout_stage))


def delete_stage(tx: Transaction, project_id: UUID, policy_name: str) -> bool:
    """Delete a policy's rollout stage, so that only its runs' mode counts; False if there was none."""
    return tx.execute(rollout_stages.delete().where(*_of(project_id, policy_name))).rowcount > 0


def count_towards_stage(
    tx: Transaction, project_id: UUID, case_filter: CaseFilter, needed: ProjectSettings
) -> tuple[list[CaseCount], int]:
    """Count the stops that count towards a rollout stage, by outcome, and those that do not.

    A run has to be long enough. For each key and day the cases that ended first count, whatever their outcome.
    """
    is_long = sa.and_(
        cases.c.seconds >= needed.case_seconds,
        cases.c.evals >= needed.case_evals,
    )
    place = sa.func.row_number().over(
        partition_by=[*key_columns(tx, "policy"), cases.c.key_id, *key_columns(tx, "day"), is_long],
        order_by=[cases.c.ended_at, cases.c.run_id, cases.c.attempt],
    )
    counts = (is_long & (place <= needed.cases_per_key_and_day)).label("counts")
    placed = filter_cases(
        sa.select(cases.c.run_id, cases.c.attempt, counts), project_id, replace(case_filter, since=None, until=None)
    )
    observed = placed.where(IS_FLAGGED, cases.c.treatment == Treatment.OBSERVED).subquery()
    kinds = [cases.c.treatment, cases.c.observed_probability, cases.c.outcome, observed.c.counts]
    query = filter_cases(sa.select(*kinds, sa.func.count()), project_id, case_filter)
    query = query.join(observed, (observed.c.run_id == cases.c.run_id) & (observed.c.attempt == cases.c.attempt))
    counted, not_counted = [], 0
    for treatment, probability, outcome, counts, number in tx.execute(query.group_by(*kinds)):
        if counts:
            counted.append(CaseCount((), treatment, probability, outcome, number))
        else:
            not_counted += number
    return counted, not_counted


def _of(project_id: UUID, policy_name: str) -> tuple[sa.ColumnElement[bool], ...]:
    return rollout_stages.c.project_id == project_id, rollout_stages.c.policy_name == policy_name
