"""Cases: attempts that have ended, one row each, derived from other tables."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome, Treatment
from evalstop_service.store.database import Transaction, find_one
from evalstop_service.store.tables import cases


@dataclass(frozen=True)
class Case:
    """An attempt that has ended: what was decided about it, its outcome, and its cost.

    `truth`: `turned`, `healthy` or `undecided`; `derived`: from its evals, else a person reported it. Fields that
    follow from a decision are None where there was none. `treatment`: `observed`, `stopped` or `prevented`. `outcome`:
    whether it was `right` to stop it, or else to let it continue. GPU-hours are None when the job's number of GPUs is
    not known. `parked_seconds`: how long its job was parked; None: never. `seconds`: its duration by the service's
    clock. `evals`: the number of finite evals. `key_id`: the key that opened its run.
    """

    run_id: UUID
    attempt: int
    project_id: UUID
    policy_id: UUID
    job_kind: str | None
    gpus: float | None
    run_outcome: RunOutcome
    derived: bool
    turn_step: int | None
    decision_id: UUID | None
    treatment: Treatment | None
    observed_probability: float | None
    decided_step: int | None
    detectors: list[str] | None
    stated_risk: float | None
    outcome: DecisionOutcome
    delay_steps: int | None
    gpu_hours: float | None
    gpu_hours_saved: float | None
    gpu_hours_lost: float | None
    parked_seconds: float | None
    seconds: float
    evals: int
    key_id: UUID | None
    ended_at: datetime


def save_case(tx: Transaction, case: Case) -> None:
    """Store a case, replacing the attempt's previous one; its run is locked in this transaction."""
    delete_case(tx, case.run_id, case.attempt)
    tx.execute(cases.insert().values(**vars(case)))


def delete_case(tx: Transaction, run_id: UUID, attempt: int) -> None:
    """Delete the case of an attempt that continues after all."""
    tx.execute(cases.delete().where(*_of(run_id, attempt)))


def find_case(tx: Transaction, run_id: UUID, attempt: int) -> Case | None:
    """The case of an attempt; None while the attempt has not ended."""
    columns = (cases.c[name] for name in Case.__dataclass_fields__)
    return find_one(tx, Case, sa.select(*columns).where(*_of(run_id, attempt)))


def _of(run_id: UUID, attempt: int) -> tuple[sa.ColumnElement[bool], ...]:
    return cases.c.run_id == run_id, cases.c.attempt == attempt
