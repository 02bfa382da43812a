"""A project with runs of every kind, for tests that look at all pages."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from evalstop_detectors import POLICIES, policy_to_document
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands
from evalstop_service.evaluation import backtests, rollout_stage
from evalstop_service.ingest import Observations
from evalstop_service.ingest import open_run as opening
from evalstop_service.rules.role_recognition import MetricFields
from evalstop_service.rules.run_descriptions import DescriptionIn
from evalstop_service.runs.descriptions import describe_run
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation

from tests.service.project_fixture import submit_message
from tests.service.web.dashboard.recorded_runs import Tenant, load_recorded_evals, open_run, post_evals


def populate_project(database: Database, tenant: Tenant, now: datetime) -> tuple[list[str], str]:
    """Add runs of every kind and a backtest; returns all paths, and the id of the run with a pending stop."""
    evals = load_recorded_evals("np-0044")
    pending = open_run(database, tenant, now, "pending", mode="enforce")
    post_evals(database, tenant, pending.id, evals[:29], now)
    ended = open_run(database, tenant, now - timedelta(hours=3), "ended", labels={"gpus": "8", "job_kind": "rlhf"})
    post_evals(database, tenant, ended.id, evals, now)
    commands.finish_run(database, tenant.project.id, ended.id, "completed", now)
    unusual = [
        _add_run(database, tenant, now, "none", "eval", []),
        _add_run(database, tenant, now, "one", "eval", [0.5]),
        _add_run(database, tenant, now, "nan", "eval", [math.nan] * 12),
        _add_run(database, tenant, now, "ends", "eval", [1e308, -1e308, 5e-324, math.inf, 0.0]),
        _add_run(database, tenant, now, "<script>alert(1)</script>", "__proto__", [0.1, 0.2]),
        _add_run(database, tenant, now, "\u202egnp.exe \u05d0\u05d1\u05d2", "\u05d0\u05d1", [0.3] * 3),
        _add_run(database, tenant, now, "long", "eval", [0.3] * 3, label="x" * 250_000),
        _add_run(database, tenant, now, "tomorrow", "eval", [0.3] * 3, days=1),
        _add_run(database, tenant, now, "yesterday", "eval", [0.3] * 3, days=-1),
    ]
    long_name = open_run(database, tenant, now, "W" * 256, mode="enforce")
    post_evals(database, tenant, long_name.id, evals[:29], now)
    unusual += [f"/runs/{long_name.id}", f"/runs/{long_name.id}/observations"]
    document = policy_to_document(POLICIES["cautious"])
    backtest = backtests.request_backtest(database, tenant.project.id, document, 50, "dana", now)
    backtests.run_next_backtest(database, utc_now)
    description = DescriptionIn(
        owner="dana@example.org", group="seeds & co", tags=["baseline", "<b>"], notes="two\nlines"
    )
    for run in (pending, ended):
        describe_run(database, Author(tenant.project.id, "dana", now), run.id, description)
    paths = [
        "/",
        "/runs",
        "/runs?group=seeds+%26+co&tag=baseline",
        "/runs?verdict=stop&order=updated",
        "/runs/fleet",
        f"/runs/{pending.id}",
        f"/runs/{ended.id}/observations",
    ]
    compared = [str(pending.id), *(path.split("/")[2] for path in unusual[:8]), str(long_name.id)]
    paths += [f"/runs/compare?{'&'.join(f'run={run_id}' for run_id in compared)}"]
    with database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, tenant.project.id, "cautious", 1, 0.9, 0.2, now)
    paths += ["/policies", "/policies/cautious?against=default@1", f"/policies/backtests/{backtest.id}"]
    paths += [f"/policies/cautious/edit?backtest={backtest.id}", "/precision/label"]
    paths += ["/precision", "/cases", "/webhooks", "/settings", "/settings/audit", "/runs/nowhere", "/runs?status=lost"]
    return [*paths, *unusual], str(pending.id)


def _add_run(
    database: Database,
    tenant: Tenant,
    now: datetime,
    name: str,
    metric: str,
    values: list[float],
    days: int = 0,
    label: str = "",
) -> str:
    """Open a run with these evals, `days` from now; returns the path of its page."""
    metrics: dict[str, MetricFields] = {metric: {"role": "eval", "direction": "maximize"}}
    labels = {"tag": label} if label else {}
    opened_at = now + timedelta(days=days)
    run, _ = opening.open_run(
        database, tenant.project.id, opening.OpenRequest(name=name, metrics=metrics, labels=labels), opened_at
    )
    if values:
        points = tuple(PostedObservation(metric, step, value, 0.1, opened_at) for step, value in enumerate(values))
        submit_message(database, tenant.project.id, run.id, Observations(points), opened_at)
    return f"/runs/{run.id}"
