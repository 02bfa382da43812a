"""Rows of runs that cannot be read, because a later release wrote them or they are damaged."""

from __future__ import annotations

import re
from datetime import datetime
from html import unescape

import httpx
import pytest
from evalstop_service.store.database import Database

from tests.service.web.dashboard.recorded_runs import Tenant, load_recorded_evals, open_run, post_evals
from tests.service.web.dashboard.serving import get_html

LATER = '{"verdict": "perhaps", "step": 1, "turn_step": null, "reason": ""}'


def damage_runs(database: Database, column: str, text: str) -> None:
    """Store this text in a column of all runs named `damaged`."""
    with database.transaction() as tx:
        tx.exec_driver_sql(f"UPDATE runs SET {column} = '{text}' WHERE name = 'damaged'")


@pytest.mark.parametrize(
    ("column", "text", "problem"),
    [
        ("verdict", LATER, "verdict: Invalid enum value 'perhaps'"),
        ("best_checkpoint", '{"step": 1}', "best_checkpoint: Object missing required field `uri`"),
        ("labels", '{"a', "labels: Unterminated string"),
    ],
)
def test_damaged_row_hides_no_other_run(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime, column: str, text: str, problem: str
) -> None:
    """Lists show the other runs, and of the damaged one what can be read and what is wrong."""
    if column == "labels" and database.engine.dialect.name == "postgresql":
        pytest.skip("PostgreSQL stores no text that is not JSON")
    damaged = open_run(database, tenant, now, "damaged")
    open_run(database, tenant, now, "whole")
    post_evals(database, tenant, damaged.id, load_recorded_evals("np-0044")[:2], now)
    damage_runs(database, column, text)
    page = unescape(get_html(visitor, "/runs"))
    assert f"a later release wrote its row, or it is damaged: {problem}" in page
    assert "whole" in page
    assert {"damaged", "whole"} <= set(re.findall(r"\w+", get_html(visitor, "/runs/fleet")))
    bearer = {"authorization": f"Bearer {tenant.secret}"}
    answer = visitor.get("/api/v1/runs", headers=bearer, params={"limit": 2}).json()
    assert [(run["name"], run["last_step"]) for run in answer["items"]] == [("whole", None), ("damaged", 10)]
    assert answer["next_cursor"] == str(damaged.id)
    assert problem in answer["items"][1]["verdict"]["reason"]
    assert problem in answer["items"][1]["health"]["detector_failure"]


def test_page_of_a_damaged_run_says_what_cannot_be_read(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """It and the API answer 503 with the fault."""
    run = open_run(database, tenant, now, "damaged")
    damage_runs(database, "verdict", LATER)
    bearer = {"authorization": f"Bearer {tenant.secret}"}
    for path in (f"/runs/{run.id}", f"/api/v1/runs/{run.id}"):
        answer = visitor.get(path, headers=bearer)
        assert answer.status_code == 503
        assert "or it is damaged: Invalid enum value" in answer.text
