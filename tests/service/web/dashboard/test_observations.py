"""The observations of a run: their table, and their export as CSV and JSON."""

from __future__ import annotations

import csv
import io
import math
from datetime import datetime
from uuid import UUID

import httpx
from evalstop_service.ingest import Observations, Resumed
from evalstop_service.store.database import Database
from evalstop_service.store.observations import PostedObservation
from evalstop_service.web.dashboard.observations import EXPORT_BATCH, PAGE

from tests.service.project_fixture import submit_message
from tests.service.web.dashboard.recorded_runs import Tenant, open_run
from tests.service.web.dashboard.serving import EMBEDDED

ODD = "=SUM(A1)"


def told(database: Database, tenant: Tenant, now: datetime, *points: PostedObservation) -> str:
    run = open_run(database, tenant, now, "weird/../name \u202e")
    submit_message(database, tenant.project.id, run.id, Observations(points), now)
    return f"/runs/{run.id}"


def test_nothing_is_left_out(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """Both files hold every observation, superseded ones too, to the last digit, over many pages of the store."""
    steps = EXPORT_BATCH + 7
    points = [PostedObservation("reward/gold", step, 0.1 + step / 3, 0.1) for step in range(steps)]
    path = told(
        database, tenant, now, *points, PostedObservation(ODD, 3, math.nan), PostedObservation(ODD, 4, -math.inf)
    )
    run_id = path.rsplit("/", 1)[1]
    submit_message(database, tenant.project.id, UUID(run_id), Resumed(steps - 3), now)
    answer = visitor.get(f"{path}/export.json")
    document = answer.json()
    rows = document["observations"]
    assert document["columns"][:3] == ["metric", "step", "value"]
    assert [row[2] for row in rows if row[0] == "reward/gold"] == [point.value for point in points]
    assert [row[2] for row in rows if row[0] == ODD] == ["NaN", "-Infinity"]
    assert [row[7] for row in rows if row[0] == "reward/gold"][-3:] == [None, 2, 2]
    assert 'filename="weird-..-name.json"' in answer.headers["content-disposition"]
    table = list(csv.DictReader(io.StringIO(visitor.get(f"{path}/export.csv").text)))
    assert len(table) == len(rows)
    assert {float(row["value"]) for row in table if row["metric"] == "reward/gold"} == {p.value for p in points}
    assert {row["metric"] for row in table} == {"reward/gold", f"'{ODD}"}


@EMBEDDED
def test_the_table_goes_on(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """A page shows so many, and leads to those after them; a metric that is not there shows one that is."""
    path = told(
        database, tenant, now, *(PostedObservation("reward/gold", step, float(step)) for step in range(PAGE + 5))
    )
    first = visitor.get(f"{path}/observations?metric=gone").text
    assert first.count("<tr>") == PAGE + 1
    following = first.split('rel="next" href="')[1].split('"')[0].replace("&amp;", "&")
    second = visitor.get(following).text
    assert second.count("<tr>") == 5 + 1
    assert "Later steps" not in second
    assert ">104" in second


@EMBEDDED
def test_a_run_without_numbers(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """It says what will fill the table."""
    run = open_run(database, tenant, now, "empty")
    assert "Nothing logged yet" in visitor.get(f"/runs/{run.id}/observations").text
    assert visitor.get(f"/runs/{run.id}/export.json").json()["observations"] == []
