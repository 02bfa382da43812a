"""Recorded training runs, and helpers that post them to the service as a trainer would."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

from evalstop_detectors import policy_from_document, policy_to_document
from evalstop_service.decisions import commands
from evalstop_service.ingest import CheckpointSaved, Observations, Receipt, RunCache
from evalstop_service.ingest import open_run as opening
from evalstop_service.rules.decision_lifecycle import DecisionState, Mode, Reported
from evalstop_service.store import keys, policies, projects
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.keys import Key
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run

from tests.service.project_fixture import submit_message

RECORDED_RUNS_FILE = Path(__file__).parents[3] / "data" / "rlhf_runs_public.jsonl"

RUN_METRICS = {
    "reward/gold": {"role": "eval", "direction": "maximize"},
    "reward/proxy": {"role": "proxy", "direction": "maximize"},
    "policy/kl": {"role": "kl", "direction": "minimize"},
}

LEVEL_POLICY: dict[str, Any] = {
    "name": "level",
    "members": [
        {"detector": "k_below_best", "params": {"k": 5}},
        *({"detector": "non_finite", "id": name, "params": {"role": name}} for name in ("eval", "proxy", "kl")),
    ],
}
"""A policy that stops the recorded runs after few evals."""


@dataclass(frozen=True)
class Tenant:
    """A project, a key with all scopes, and the key's secret."""

    project: Project
    key: Key
    secret: str


@dataclass(frozen=True)
class Eval:
    """What a trainer reports at one step."""

    step: int
    gold: float
    gold_stderr: float
    proxy: float
    kl: float


@cache
def load_recorded_evals(run_id: str) -> tuple[Eval, ...]:
    """The evals of one run of the data set."""
    for line in RECORDED_RUNS_FILE.read_text().splitlines():
        run = json.loads(line)
        if run["run_id"] == run_id:
            log = run["log"]
            columns = (log["step"], log["gold"], log["gold_se"], log["proxy"], log["kl"])
            return tuple(Eval(*row) for row in zip(*columns, strict=True))
    raise LookupError(f"there is no run {run_id} in {RECORDED_RUNS_FILE}")


def add_tenant(
    database: Database,
    now: datetime,
    name: str = "alignment",
    scopes: tuple[str, ...] = keys.SCOPES,
    veto_window_seconds: float = 0.0,
) -> Tenant:
    """Create a project without a limit on stops, and a key to it."""
    project = Project(
        new_id(),
        name,
        LEVEL_POLICY["name"],
        Mode.SHADOW,
        veto_window_seconds,
        now,
        stops_per_hour=None,
        stops_share=None,
        max_mode=Mode.ENFORCE,
    )
    with database.transaction() as tx:
        assert projects.add_project(tx, project)
        policies.add_policy(
            tx, project, LEVEL_POLICY["name"], policy_to_document(policy_from_document(LEVEL_POLICY)), now
        )
        key, secret = keys.create_key(tx, project_id=project.id, name="test", scopes=scopes, now=now)
    return Tenant(project, key, secret)


def open_run(database: Database, tenant: Tenant, now: datetime, name: str, **terms: object) -> Run:
    """Open a run that watches gold, proxy and KL."""
    request = opening.OpenRequest(name=name, metrics=RUN_METRICS, **terms)  # type: ignore[arg-type]
    return opening.open_run(database, tenant.project.id, request, now)[0]


def post_evals(database: Database, tenant: Tenant, run_id: UUID, evals: tuple[Eval, ...], now: datetime) -> Receipt:
    """Post evals and their checkpoints one by one, as a trainer does; returns the last receipt."""
    cache = RunCache()
    for row in evals:
        points = (
            PostedObservation("reward/gold", row.step, row.gold, row.gold_stderr),
            PostedObservation("reward/proxy", row.step, row.proxy),
            PostedObservation("policy/kl", row.step, row.kl),
        )
        checkpoint = CheckpointSaved(row.step, f"file:///checkpoints/step-{row.step:06d}")
        submit_message(database, tenant.project.id, run_id, checkpoint, now, cache)
        receipt = submit_message(database, tenant.project.id, run_id, Observations(points), now, cache)
    return receipt


def confirm_stop(database: Database, tenant: Tenant, decision_id: UUID, now: datetime) -> None:
    """Report, as a receiver does, that the job has ended."""
    details = {"exit_status": -15, "signal": "SIGTERM", "ended_at": (now - timedelta(seconds=1)).isoformat()}
    report = Reported(
        now, DecisionState.CONFIRMED, "evalstop-receiver process", "the job ended after it was cancelled", details
    )
    commands.record_report(database, tenant.project.id, decision_id, report)
