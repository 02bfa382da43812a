"""Groups of runs that have a rule, their runs, and the copies that these are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from datetime import datetime
from typing import Annotated
from uuid import UUID

import sqlalchemy as sa
from msgspec import structs

from evalstop_service.domain.decision_lifecycle import Action, DecisionState, Exploit
from evalstop_service.domain.fields import doc
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.store.database import Transaction, find_all, find_one, save_row
from evalstop_service.store.runs import TO_BE_STOPPED
from evalstop_service.store.tables import attempts, decisions, groups, run_descriptions, runs
from evalstop_service.store.tables.decisions import ENDS_ATTEMPT
from evalstop_service.store.tables.projects import Group as Group


class Copy(Exploit, frozen=True):
    """What an attempt began from: the checkpoint of another run."""

    attempt: Annotated[int, doc("the attempt that began with the copy")]
    at: Annotated[datetime, doc("when the trainer confirmed it")]


def save_group(tx: Transaction, group: Group) -> None:
    """Store the rule of a group, in place of an earlier one."""
    save_row(tx, groups, vars(group))


def find_group(tx: Transaction, project_id: UUID, name: str) -> Group | None:
    """The group of this name, if it has a rule."""
    return find_one(tx, Group, sa.select(groups).where(groups.c.project_id == project_id, groups.c.name == name))


def remove_group(tx: Transaction, group: Group) -> None:
    """Remove the rule of a group; its runs and their decisions stay."""
    tx.execute(groups.delete().where(groups.c.project_id == group.project_id, groups.c.name == group.name))


def list_groups(tx: Transaction, project_id: UUID) -> list[Group]:
    """The groups of a project that have a rule, by name."""
    return find_all(tx, Group, sa.select(groups).where(groups.c.project_id == project_id).order_by(groups.c.name))


def list_running_groups(tx: Transaction) -> list[Group]:
    """The groups of all projects that have a rule and a running run."""
    runs_now = sa.exists().where(
        run_descriptions.c.project_id == groups.c.project_id,
        run_descriptions.c.group == groups.c.name,
        runs.c.id == run_descriptions.c.run_id,
        runs.c.status == RunStatus.RUNNING,
    )
    return find_all(tx, Group, sa.select(groups).where(runs_now).order_by(groups.c.project_id, groups.c.name))


def count_siblings(tx: Transaction, project_id: UUID, name: str, but_for: UUID) -> tuple[int, int, int]:
    """How many other runs of a group run, how many of these are to be stopped or parked, and how many completed."""
    of_attempt = (decisions.c.run_id == runs.c.id) & (decisions.c.attempt == runs.c.attempt) & sa.text(ENDS_ATTEMPT)
    query = (
        sa.select(
            sa.func.count().filter(runs.c.status == RunStatus.RUNNING),
            sa.func.count().filter(runs.c.status == RunStatus.RUNNING, decisions.c.state.in_(TO_BE_STOPPED)),
            sa.func.count().filter(runs.c.status == RunStatus.COMPLETED),
        )
        .select_from(run_descriptions)
        .join(runs, runs.c.id == run_descriptions.c.run_id)
        .outerjoin(decisions, of_attempt)
        .where(run_descriptions.c.project_id == project_id, run_descriptions.c.group == name)
        .where(runs.c.id != but_for)
    )
    live, ending, completed = tx.execute(query).one()
    return live, ending, completed


def load_descent(tx: Transaction, run_ids: Collection[UUID]) -> tuple[dict[UUID, list[Copy]], dict[UUID, list[Copy]]]:
    """The copies that each of these runs has made, oldest first: all of them, and those that it still descends from. A
    resume before the step of a copy leaves it behind."""
    is_copy = (decisions.c.action == Action.EXPLOIT) & (decisions.c.state == DecisionState.CONFIRMED)
    of_attempt = (decisions.c.run_id == attempts.c.run_id) & (decisions.c.attempt == attempts.c.attempt - 1) & is_copy
    columns = (attempts.c.run_id, attempts.c.resumed_from_step, attempts.c.attempt, attempts.c.started_at)
    query = sa.select(*columns, decisions.c.exploit).outerjoin(decisions, of_attempt)
    made: dict[UUID, list[Copy]] = defaultdict(list)
    lineage: dict[UUID, list[Copy]] = defaultdict(list)
    for run_id, step, attempt, at, exploit in tx.execute(
        query.where(attempts.c.run_id.in_(run_ids)).order_by(attempts.c.run_id, attempts.c.attempt)
    ):
        copies = [] if exploit is None else [Copy(**structs.asdict(exploit), attempt=attempt, at=at)]
        made[run_id] += copies
        lineage[run_id] = [copy for copy in lineage[run_id] if copy.source_step <= (step or 0)] + copies
    return made, lineage
