"""Recorded training runs, and helpers that post them to the service as a trainer would."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, cast

from evalstop_detectors import policy_from_document, policy_to_document
from evalstop_service.decisions import commands
from evalstop_service.domain.decision_events import Reported
from evalstop_service.domain.decision_lifecycle import DecisionState, Mode
from evalstop_service.errors import ServiceError
from evalstop_service.ingest import CheckpointSaved, Content, Message, Observations, Receipt
from evalstop_service.projects import policies
from evalstop_service.store import keys, projects
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.ids import new_id
from evalstop_service.store.keys import Key
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run

from tests.service.project_fixture import ProjectFixture

RECORDED_RUNS_FILE = Path(__file__).parents[3] / "data" / "rlhf_runs_public.jsonl"

RUN_METRICS = {
    "reward/gold": {"role": "eval", "direction": "maximize"},
    "reward/proxy": {"role": "proxy", "direction": "maximize"},
    "policy/kl": {"role": "kl", "direction": "minimize"},
}

LEVEL_POLICY: dict[str, Any] = policy_to_document(
    policy_from_document(
        {
            "name": "level",
            "members": [
                {"detector": "k_decline", "params": {"k": 4}},
                *({"detector": "non_finite", "id": name, "params": {"role": name}} for name in ("eval", "proxy", "kl")),
            ],
        }
    )
)
"""A policy that stops the recorded runs after few evals."""


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


@dataclass(frozen=True, kw_only=True)
class Tenant(ProjectFixture):
    """A project with runs that post recorded evals, a key to it, and the key's secret."""

    project: Project
    key: Key
    secret: str

    def open_run(self, name: str | None = None, now: datetime | None = None, **options: Any) -> Run:
        """Open a run, by default one that watches gold, proxy and KL."""
        return super().open_run(name, now, **{"metrics": RUN_METRICS} | options)

    def post_evals(self, run: Run, evals: Iterable[Eval], now: datetime | None = None) -> Receipt:
        """Post checkpoints and then their evals, in one commit; returns the last receipt."""
        rows = list(evals)
        points = [
            point
            for row in rows
            for point in (
                PostedObservation("reward/gold", row.step, row.gold, row.gold_stderr),
                PostedObservation("reward/proxy", row.step, row.proxy),
                PostedObservation("policy/kl", row.step, row.kl),
            )
        ]
        saved = [CheckpointSaved(row.step, f"file:///checkpoints/step-{row.step:06d}") for row in rows]
        contents: list[Content] = [*saved, Observations(tuple(points))]
        receipts = self.submit_all([Message(self.id, run.id, content) for content in contents], now)
        for receipt in receipts:
            if isinstance(receipt, ServiceError):
                raise receipt
        return cast(Receipt, receipts[-1])

    def open_stopped_run(
        self, name: str, evals: Iterable[Eval], now: datetime | None = None, **options: Any
    ) -> tuple[Run, Decision]:
        """Open a run in enforce mode with these evals, at one of which its stop is decided."""
        run = self.open_run(name, now, mode=Mode.ENFORCE, **options)
        self.post_evals(run, evals, now)
        return run, self.load_decision(run)

    def confirm_stop(self, decision: Decision, now: datetime | None = None) -> None:
        """Report, as a receiver does, that the job has ended."""
        at = now or self.now
        details = {"exit_status": -15, "how": "cancelled", "gone_at": (at - timedelta(seconds=1)).isoformat()}
        reason = "the job ended after it was cancelled"
        report = Reported(at, DecisionState.CONFIRMED, "evalstop-receiver process", reason, details)
        commands.record_report(self.database, self.id, decision.id, report)


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
        now,
        default_policy=LEVEL_POLICY["name"],
        veto_window_seconds=veto_window_seconds,
        held_out_share=0.0,
        stops_per_hour=None,
        stops_share=None,
        max_mode=Mode.ENFORCE,
    )
    with database.transaction() as tx:
        assert projects.add_project(tx, project)
        policies.add_shipped(tx, project, now)
        key, secret = keys.create_key(tx, project_id=project.id, name="test", scopes=scopes, now=now)
    tenant = Tenant(database, project.id, now=now, project=project, key=key, secret=secret)
    tenant.add_policy(LEVEL_POLICY)
    return tenant
