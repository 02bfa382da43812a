"""Rollout stages: how much a policy may do by itself in a project, by its measured precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, timedelta
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.project_settings import ProjectSettings, Shortfall
from evalstop_service.domain.statuses import Treatment
from evalstop_service.store.cases import IS_FLAGGED, Case, CaseCount, CaseFilter, filter_cases, key_column
from evalstop_service.store.database import Transaction, find_all, find_one, match_given, save_row
from evalstop_service.store.tables import cases, policies, rollout_stages, runs
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


def find_newest_run(tx: Transaction, project_id: UUID, policy_name: str) -> UUID | None:
    """The most recently opened run with any version of a policy."""
    query = sa.select(runs.c.id).join(policies, policies.c.id == runs.c.policy_id)
    query = query.where(runs.c.project_id == project_id, policies.c.name == policy_name)
    run_id: UUID | None = tx.execute(query.order_by(runs.c.id.desc()).limit(1)).scalar()
    return run_id


def count_towards_stage(
    tx: Transaction, project_id: UUID, case_filter: CaseFilter, needed: ProjectSettings
) -> tuple[list[CaseCount], dict[Shortfall, int]]:
    """Count the stops that count towards a rollout stage, by outcome, and those that do not, by reason.

    For each key and day the cases that ended first count, whatever their outcome.
    """
    lacking = _select_shortfalls(tx, project_id, replace(case_filter, since=None, until=None), needed)
    kinds = [cases.c.treatment, cases.c.observed_probability, cases.c.outcome, lacking.c.shortfall]
    query = filter_cases(sa.select(*kinds, sa.func.count()), project_id, case_filter)
    query = query.join(lacking, (lacking.c.run_id == cases.c.run_id) & (lacking.c.attempt == cases.c.attempt))
    counted, not_counted = [], dict.fromkeys(Shortfall, 0)
    for treatment, probability, outcome, shortfall, number in tx.execute(query.group_by(*kinds)):
        if shortfall is None:
            counted.append(CaseCount((), treatment, probability, outcome, number))
        else:
            not_counted[Shortfall(shortfall)] += number
    return counted, not_counted


def find_shortfalls(
    tx: Transaction, project_id: UUID, listed_cases: Sequence[Case], needed: ProjectSettings
) -> dict[tuple[UUID, int], Shortfall]:
    """Why each of these cases does not count towards a rollout stage, by run and attempt; cases that count are left
    out."""
    if not listed_cases:
        return {}
    days = [case.ended_at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0) for case in listed_cases]
    of_days = CaseFilter(since=min(days), until=max(days) + timedelta(days=1))
    lacking = _select_shortfalls(tx, project_id, of_days, needed)
    query = sa.select(lacking).where(
        lacking.c.shortfall.is_not(None), lacking.c.run_id.in_([case.run_id for case in listed_cases])
    )
    return {(run_id, attempt): Shortfall(shortfall) for run_id, attempt, shortfall in tx.execute(query)}


def _select_shortfalls(
    tx: Transaction, project_id: UUID, case_filter: CaseFilter, needed: ProjectSettings
) -> sa.Subquery:
    """Why each observed stop does not count towards a rollout stage; NULL: it counts."""
    by_itself = sa.case(
        (cases.c.seconds < needed.case_seconds, Shortfall.DURATION.value),
        (cases.c.evals < needed.case_evals, Shortfall.EVALS.value),
        (cases.c.gpu_hours < needed.case_gpu_hours, Shortfall.GPU_HOURS.value),  # unknown GPU-hours pass
    )
    rank = sa.func.row_number().over(
        partition_by=[cases.c.policy_id, cases.c.key_id, key_column(tx, "day"), by_itself],
        order_by=[cases.c.ended_at, cases.c.run_id, cases.c.attempt],
    )
    identity = (cases.c.run_id, cases.c.attempt)
    placed = sa.select(*identity, by_itself.label("own"), rank.label("place"))
    query = filter_cases(placed, project_id, case_filter)
    observed = query.where(IS_FLAGGED, cases.c.treatment == Treatment.OBSERVED).subquery()
    too_many = sa.case((observed.c.place > needed.cases_per_key_and_day, Shortfall.KEY_AND_DAY.value))
    return sa.select(
        observed.c.run_id, observed.c.attempt, sa.func.coalesce(observed.c.own, too_many).label("shortfall")
    ).subquery()


def _of(project_id: UUID, policy_name: str) -> tuple[sa.ColumnElement[bool], ...]:
    return rollout_stages.c.project_id == project_id, rollout_stages.c.policy_name == policy_name
