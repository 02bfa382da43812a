"""The fleet page: the order of the running runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import unescape
from typing import Any

import httpx
from evalstop_service.ingest import CheckpointSaved
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.service.web.pages.recorded_runs import Tenant, add_tenant
from tests.service.web.pages.serving import SQLITE_ONLY

RISING_VALUES = [0.01 * step + 0.002 * (step * 7 % 5) for step in range(40)]
TURNING_VALUES = [
    *RISING_VALUES[:25],
    *(RISING_VALUES[25] - 0.012 * step + 0.002 * (step * 7 % 5) for step in range(30)),
]


def add_running_run(
    tenant: Tenant,
    name: str,
    values: Sequence[float],
    policy: str = "default",
    **options: Any,
) -> Run:
    """Open a run, post these evals and a checkpoint at the best of them, and leave it running."""
    run = tenant.open_run(name, policy=policy, total_steps=100, **{"metrics": None} | options)
    if values:
        best = max(range(len(values)), key=lambda step: abs(values[step]))
        points = tuple(PostedObservation("eval", step, value) for step, value in enumerate(values))
        tenant.submit(run, CheckpointSaved(best, "file:///best"))
        tenant.post_observations(run, points)
    return tenant.load_run(run)


def read_rows(visitor: httpx.Client, **query: int) -> dict[str, str]:
    """The rows of the page in order, by the names of their runs."""
    html = visitor.get("/runs/fleet", params=query).raise_for_status().text
    items = html.split('<ol class="card fleet">')[1].split("</ol>")[0].split("<li>")[1:]
    return {unescape(item.split("<bdi>")[1].split("</bdi>")[0]): item for item in items}


def test_runs_are_ordered_by_probability_of_a_turn(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Running runs are ordered by stored probability, or by verdict where a policy gives none; the direction does
    not matter."""
    minimized = {"eval": {"role": "eval", "direction": "minimize"}}
    add_running_run(tenant, "without-evals", [], metrics=minimized)
    rising = add_running_run(tenant, "rising", [-value for value in RISING_VALUES], metrics=minimized)
    ended = add_running_run(tenant, "ended", TURNING_VALUES[:10])
    tenant.finish_run(ended)
    add_running_run(add_tenant(database, now, "others"), "of others", RISING_VALUES[:9])
    turned = add_running_run(tenant, "turned", [-value for value in TURNING_VALUES], metrics=minimized)
    alarmed = add_running_run(tenant, "alarmed", TURNING_VALUES, policy="paper")
    assert (alarmed.verdict.verdict, turned.verdict.verdict) == ("stop", "stop")
    rows = read_rows(visitor)
    assert list(rows)[:3] == ["alarmed", "turned", "rising"]
    assert set(rows) == {"alarmed", "turned", "rising", "without-evals"}
    assert "no probability" in rows["alarmed"]
    assert f'href="/runs/{turned.id}"' in rows["turned"]
    probability = max(item.value for item in turned.verdict.evidence if item.kind == "posterior")
    assert probability > 0.5
    assert f"{probability * 100:.1f} %" in rows["turned"]
    assert "<polyline" in rows["turned"]
    assert "no eval yet" in rows["without-evals"]
    assert rising.status == "running"


@SQLITE_ONLY
def test_empty_fleet_is_announced(visitor: httpx.Client) -> None:
    """Without a running run the page says so."""
    assert "No run is running" in visitor.get("/runs/fleet").text
