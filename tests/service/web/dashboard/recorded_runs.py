"""Real training runs, told to the service as a trainer tells them."""

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
from evalstop_service.ingest import CheckpointSaved, Observations, Receipt
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

FILE = Path(__file__).parents[3] / "data" / "rlhf_runs_public.jsonl"

METRICS = {
    "reward/gold": {"role": "eval", "direction": "maximize"},
    "reward/proxy": {"role": "proxy", "direction": "maximize"},
    "policy/kl": {"role": "kl", "direction": "minimize"},
}

LEVEL: dict[str, Any] = {
    "name": "level",
    "members": [
        {"detector": "k_below_best", "params": {"k": 5}},
        *({"detector": "non_finite", "id": name, "params": {"role": name}} for name in ("eval", "proxy", "kl")),
    ],
}
"""A policy that stops these runs soon enough for a test."""


@dataclass(frozen=True)
class Tenant:
    """A project with a key that may do everything in it, and the key's secret."""

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
def recorded(run_id: str) -> tuple[Eval, ...]:
    """The evals of a run of the data set."""
    for line in FILE.read_text().splitlines():
        run = json.loads(line)
        if run["run_id"] == run_id:
            log = run["log"]
            columns = (log["step"], log["gold"], log["gold_se"], log["proxy"], log["kl"])
            return tuple(Eval(*row) for row in zip(*columns, strict=True))
    raise LookupError(f"there is no run {run_id} in {FILE}")


def add_tenant(
    database: Database,
    now: datetime,
    name: str = "alignment",
    scopes: tuple[str, ...] = keys.SCOPES,
    veto_window_seconds: float = 0.0,
) -> Tenant:
    """A new project, which may have all its runs stopped, and a key to it."""
    project = Project(
        new_id(),
        name,
        LEVEL["name"],
        Mode.SHADOW,
        veto_window_seconds,
        now,
        stops_per_hour=None,
        stops_share=None,
        max_mode=Mode.ENFORCE,
    )
    with database.transaction() as tx:
        assert projects.add_project(tx, project)
        policies.add_policy(tx, project, LEVEL["name"], policy_to_document(policy_from_document(LEVEL)), now)
        key, secret = keys.create_key(tx, project_id=project.id, name="test", scopes=scopes, now=now)
    return Tenant(project, key, secret)


def open_run(database: Database, tenant: Tenant, now: datetime, name: str, **terms: object) -> Run:
    """A run that watches gold, proxy and KL."""
    request = opening.OpenRequest(name=name, metrics=METRICS, **terms)  # type: ignore[arg-type]
    return opening.open_run(database, tenant.project.id, request, now)[0]


def report(database: Database, tenant: Tenant, run_id: UUID, evals: tuple[Eval, ...], now: datetime) -> Receipt:
    """Post evals and their checkpoints, one by one, as a trainer does."""
    for item in evals:
        points = (
            PostedObservation("reward/gold", item.step, item.gold, item.gold_stderr),
            PostedObservation("reward/proxy", item.step, item.proxy),
            PostedObservation("policy/kl", item.step, item.kl),
        )
        saved = CheckpointSaved(item.step, f"file:///checkpoints/step-{item.step:06d}")
        submit_message(database, tenant.project.id, run_id, saved, now)
        receipt = submit_message(database, tenant.project.id, run_id, Observations(points), now)
    return receipt


def confirm(database: Database, tenant: Tenant, decision_id: UUID, now: datetime) -> None:
    """Say, as a receiver does, that the job is gone."""
    details = {"exit_status": -15, "signal": "SIGTERM", "ended_at": (now - timedelta(seconds=1)).isoformat()}
    said = Reported(
        now, DecisionState.CONFIRMED, "evalstop-receiver process", "the process ended within its veto window", details
    )
    commands.record_report(database, tenant.project.id, decision_id, said)
