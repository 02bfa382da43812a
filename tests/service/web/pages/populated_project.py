"""A project with runs of every kind, for tests that look at all pages."""

from __future__ import annotations

import math
from datetime import timedelta

from evalstop_detectors import POLICIES, policy_to_document
from evalstop_service.domain.run import DescriptionIn, MetricFields
from evalstop_service.evaluation import backtests, rollout_stage
from evalstop_service.evaluation.rollout_stage import StageTerms
from evalstop_service.runs.descriptions import add_step_note, describe_run
from evalstop_service.store.audit import Author
from evalstop_service.store.observations import PostedObservation

from tests.service.web.pages.recorded_groups import populate_groups
from tests.service.web.pages.recorded_runs import Tenant, load_recorded_evals


def populate_project(tenant: Tenant) -> tuple[list[str], str]:
    """Add runs of every kind and a backtest; returns all paths, and the id of the run with a pending stop."""
    evals = load_recorded_evals("np-0044")
    pending, _ = tenant.open_stopped_run("pending", evals[:29])
    ended = tenant.open_run("ended", tenant.now - timedelta(hours=3), labels={"gpus": "8", "job_kind": "rlhf"})
    tenant.post_evals(ended, evals)
    tenant.finish_run(ended)
    unusual = [
        _add_run(tenant, "none", "eval", []),
        _add_run(tenant, "one", "eval", [0.5]),
        _add_run(tenant, "nan", "eval", [math.nan] * 12),
        _add_run(tenant, "ends", "eval", [1e308, -1e308, 5e-324, math.inf, 0.0]),
        _add_run(tenant, "<script>alert(1)</script>", "__proto__", [0.1, 0.2]),
        _add_run(tenant, "\u202egnp.exe \u05d0\u05d1\u05d2", "\u05d0\u05d1", [0.3] * 3),
        _add_run(tenant, "long", "eval", [0.3] * 3, label="x" * 250_000),
        _add_run(tenant, "tomorrow", "eval", [0.3] * 3, days=1),
        _add_run(tenant, "yesterday", "eval", [0.3] * 3, days=-1),
    ]
    long_name = tenant.open_run("W" * 256, mode="enforce")
    tenant.post_evals(long_name, evals[:29])
    unusual += [f"/runs/{long_name.id}", f"/runs/{long_name.id}/metric-charts"]
    document = policy_to_document(POLICIES["cautious"])
    backtest = backtests.run_backtest(tenant.database, tenant.id, document, 50, "dana", tenant.now)
    description = DescriptionIn(
        owner="dana@example.org", group="seeds & co", tags=["baseline", "<b>"], notes="two\nlines"
    )
    for run in (pending, ended):
        describe_run(tenant.database, Author(tenant.id, "dana", tenant.now), run.id, description.change)
        add_step_note(tenant.database, Author(tenant.id, "dana", tenant.now), run.id, 3, "the grader <b>& more")
    paths = [
        "/",
        "/runs",
        "/runs?group=seeds+%26+co&tag=baseline",
        "/runs?verdict=stop&order=updated",
        "/runs/fleet",
        f"/runs/{pending.id}",
        f"/runs/{ended.id}/metric-charts",
    ]
    compared = [str(pending.id), *(path.split("/")[2] for path in unusual[:8]), str(long_name.id)]
    paths += [f"/runs/compare?{'&'.join(f'run={run_id}' for run_id in compared)}"]
    with tenant.database.transaction() as tx:
        rollout_stage.set_rollout_stage(tx, tenant.id, "cautious", 1, StageTerms(0.9, 0.2), tenant.now)
    paths += ["/policies", "/policies/cautious", f"/policies/backtests/{backtest.id}"]
    paths += [f"/policies/cautious/edit?backtest={backtest.id}", "/precision/label"]
    paths += ["/precision", "/cases", "/webhooks", "/settings", "/settings/audit", "/runs/nowhere", "/runs?status=lost"]
    populate_groups(tenant)
    groups = [f"/groups/{name}" for name in ("population", "halving", "no%20rule", "empty")]
    return [*groups, *paths, *unusual], str(pending.id)


def _add_run(
    tenant: Tenant,
    name: str,
    metric: str,
    values: list[float],
    days: int = 0,
    label: str = "",
) -> str:
    """Open a run with these evals, `days` from now; returns the path of its page."""
    metrics: dict[str, MetricFields] = {metric: {"role": "eval", "direction": "maximize"}}
    labels = {"tag": label} if label else {}
    opened_at = tenant.now + timedelta(days=days)
    run = tenant.open_run(name, opened_at, metrics=metrics, labels=labels)
    if values:
        points = tuple(PostedObservation(metric, step, value, 0.1, opened_at) for step, value in enumerate(values))
        tenant.post_observations(run, points, opened_at)
    return f"/runs/{run.id}"
