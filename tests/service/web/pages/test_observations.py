"""The observations of a run: their export as CSV."""

from __future__ import annotations

import csv
import io
import math

import httpx
import pytest
from evalstop_service.ingest import Resumed
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from evalstop_service.web.pages.run_page import EXPORT_BATCH

from tests.service.web.pages.recorded_runs import Tenant
from tests.service.web.pages.serving import SQLITE_ONLY

FORMULA_METRIC = "=SUM(A1)"


def add_run_with(tenant: Tenant, *points: PostedObservation) -> Run:
    """Open a run with these observations."""
    run = tenant.open_run("weird/../name \u202e")
    tenant.post_observations(run, points)
    return run


def read_rows(export: httpx.Response) -> list[dict[str, str]]:
    """The rows of an export, by column."""
    return list(csv.DictReader(io.StringIO(export.text)))


@pytest.mark.slow
def test_export_holds_every_observation(visitor: httpx.Client, tenant: Tenant) -> None:
    """The export holds every observation at full precision, superseded ones included, over several batches."""
    steps = EXPORT_BATCH + 7
    points = [PostedObservation("reward/gold", step, 0.1 + step / 3, 0.1) for step in range(steps)]
    points_not_finite = [
        PostedObservation(FORMULA_METRIC, 3, math.nan),
        PostedObservation(FORMULA_METRIC, 4, -math.inf),
    ]
    run = add_run_with(tenant, *points, *points_not_finite)
    tenant.submit(run, Resumed(steps - 3))
    answer = visitor.get(f"/runs/{run.id}/export.csv")
    assert 'filename="weird-..-name.csv"' in answer.headers["content-disposition"]
    rows = read_rows(answer)
    gold = [row for row in rows if row["metric"] == "reward/gold"]
    assert [float(row["value"]) for row in gold] == [point.value for point in points]
    assert [row["superseded_by"] for row in gold][-3:] == ["", "2", "2"]
    assert [row["value"] for row in rows if row["metric"] == f"'{FORMULA_METRIC}"] == ["NaN", "-Infinity"]
    assert len(rows) == len(points) + 2


def test_export_holds_metrics_that_were_superseded_as_a_whole(visitor: httpx.Client, tenant: Tenant) -> None:
    """A metric all of whose observations were superseded is exported, too."""
    run = add_run_with(tenant, PostedObservation("kept", 1, 0.5), PostedObservation("late", 9, 0.5))
    tenant.submit(run, Resumed(5))
    rows = read_rows(visitor.get(f"/runs/{run.id}/export.csv"))
    assert [(row["metric"], row["superseded_by"]) for row in rows] == [("kept", ""), ("late", "2")]


@SQLITE_ONLY
def test_run_without_observations_has_an_empty_export(visitor: httpx.Client, tenant: Tenant) -> None:
    """The export has its header alone."""
    run = tenant.open_run("empty")
    assert read_rows(visitor.get(f"/runs/{run.id}/export.csv")) == []
