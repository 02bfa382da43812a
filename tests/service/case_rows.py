"""Cases inserted directly as rows."""

from __future__ import annotations

from datetime import datetime
from itertools import count
from typing import Any

from evalstop_service.domain.run import JudgedCall
from evalstop_service.domain.statuses import DecisionOutcome
from evalstop_service.store.cases import list_call_rows
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.runs import Run
from evalstop_service.store.tables import case_calls, cases

from tests.service.project_fixture import NOW

_ATTEMPTS = count(1000)


def insert_cases(database: Database, run: Run, number: int, at: datetime = NOW, **known: Any) -> None:
    """Insert this many equal cases of one run; by default flagged, observed and right."""
    row: dict[str, Any] = {
        "run_id": run.id,
        "run_name": run.name,
        "project_id": run.project_id,
        "policy_name": run.policy_name,
        "policy_version": run.policy_version,
        "job_kind": None,
        "gpus": None,
        "run_outcome": "turned",
        "derived": True,
        "turn_step": None,
        "decision_id": new_id(),
        "treatment": "observed",
        "observed_probability": 1.0,
        "decided_step": None,
        "detectors": ["k_decline"],
        "calls": {},
        "stated_risk": None,
        "outcome": "right",
        "delay_steps": None,
        "gpu_hours": None,
        "gpu_hours_saved": None,
        "gpu_hours_lost": None,
        "parked_seconds": None,
        "seconds": 3600.0,
        "evals": 100,
        "ended_at": at,
    } | known
    if "treatment" in known and known["treatment"] is None:
        row |= {"decision_id": None, "observed_probability": None, "detectors": None}
    with database.transaction() as tx:
        rows = [{"key_id": new_id()} | row | {"attempt": next(_ATTEMPTS)} for _ in range(number)]
        tx.execute(cases.insert(), [{name: value for name, value in row.items() if name != "calls"} for row in rows])
        if calls := [call for row in rows for call in list_call_rows(row)]:
            tx.execute(case_calls.insert(), calls)


def judge_call(outcome: str, delay_steps: int | None = None, gpu_hours_after: float | None = None) -> JudgedCall:
    """A detector's first call in a case."""
    return JudgedCall(7, DecisionOutcome(outcome), delay_steps, gpu_hours_after)
