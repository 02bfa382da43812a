"""Rows that cannot be read, because a later release wrote them or they are damaged."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import httpx
import pytest
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.errors import UnreadableRow
from evalstop_service.store import due_decisions
from evalstop_service.store.database import Database

from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture
from tests.service.web.dashboard.recorded_runs import Tenant, load_recorded_evals
from tests.service.web.dashboard.serving import get_html

OF_DAMAGED = "run_id = (SELECT id FROM runs WHERE name = 'damaged')"

LATER = '{"verdict": "perhaps", "step": 1, "turn_step": null, "reason": ""}'


def damage_rows(database: Database, table: str, column: str, text: str, condition: str) -> None:
    """Store this text in a column of the rows that meet a condition."""
    with database.transaction() as tx:
        tx.exec_driver_sql(f"UPDATE {table} SET {column} = '{text}' WHERE {condition}")


@pytest.mark.parametrize(
    ("column", "text", "fault"),
    [
        ("verdict", LATER, "Invalid enum value"),
        ("best_checkpoint", '{"step": 1}', "missing required field"),
        ("status", "hibernating", "is not a valid RunStatus"),
        ("mode", "suggest", "is not a valid Mode"),
        ("metrics", '["score"]', "Expected `object`, got `array`"),
        ("labels", '{"a', "Unterminated string"),
    ],
)
def test_damaged_run_hides_no_other(
    visitor: httpx.Client, database: Database, tenant: Tenant, column: str, text: str, fault: str
) -> None:
    """Lists show all other runs on full pages; the damaged run's own page and API say what cannot be read."""
    if column == "labels" and database.engine.dialect.name == "postgresql":
        pytest.skip("PostgreSQL stores no text that is not JSON")
    runs = [tenant.open_run(name) for name in ("first", "second", "damaged", "last")]
    tenant.post_evals(runs[2], load_recorded_evals("np-0044")[:2])
    damage_rows(database, "runs", column, text, "name = 'damaged'")
    for path in ("/runs", "/runs/fleet"):
        page = get_html(visitor, path)
        assert all(f">{run.name}<" in page for run in runs if run.name != "damaged")
    visitor.headers["authorization"] = f"Bearer {tenant.secret}"
    answer = visitor.get("/api/v1/runs", params={"limit": 2}).json()
    assert [run["name"] for run in answer["items"]] == ["last", "second"]
    assert answer["next_cursor"] == str(runs[1].id)
    found = visitor.post("/mlflow/api/2.0/mlflow/runs/search", json={"experiment_ids": ["0"]}).json()
    assert {run["info"]["run_name"] for run in found["runs"]} == {"first", "second", "last"}
    for path in (f"/runs/{runs[2].id}", f"/api/v1/runs/{runs[2].id}"):
        refused = visitor.get(path)
        assert refused.status_code == 503
        assert "or it is damaged" in refused.text
    assert f"damaged: runs.{column}: " in refused.json()["detail"]
    assert fault in refused.json()["detail"]
    posted = {"observations": [{"metric": "score", "step": 99, "value": 1.0}]}
    assert visitor.post(f"/api/v1/runs/{runs[2].id}/observations", json=posted).status_code == 503
    assert visitor.post(f"/api/v1/runs/{runs[0].id}/observations", json=posted).status_code == 200


def test_unreadable_row_is_logged_once(
    visitor: httpx.Client, database: Database, tenant: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages that list it again do not log the same again."""
    for status in (f"asleep {uuid4()}", f"awake {uuid4()}"):
        run = tenant.open_run(status)
        damage_rows(database, "runs", "status", status, f"name = '{run.name}'")
        for path in ("/runs", "/runs/fleet", "/runs"):
            get_html(visitor, path)
        assert sum(status in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("table", "column", "text"),
    [
        ("decisions", "verdict", LATER),
        ("decisions", "action", "pray"),
        ("decisions", "guard_kinds", '{"none": 1}'),
        ("decision_changes", "state", "forgotten"),
        ("verdicts", "verdict", LATER),
        ("run_health", "state", "asleep"),
        ("run_health", "metric_faults", '[{"metric": 1}]'),
    ],
)
def test_damaged_row_beside_a_run_hides_no_run(
    visitor: httpx.Client,
    database: Database,
    tenant: Tenant,
    table: str,
    column: str,
    text: str,
) -> None:
    """Lists show the run without its decision, or its health, and the other run with all of them."""
    runs = [tenant.open_run(name) for name in ("damaged", "whole")]
    for run in runs:
        tenant.post_evals(run, load_recorded_evals("np-0044"))
    damage_rows(database, table, column, text, OF_DAMAGED)
    for path in ("/", "/runs", "/runs/fleet", f"/runs/{runs[1].id}"):
        assert ">whole<" in get_html(visitor, path)
    visitor.headers["authorization"] = f"Bearer {tenant.secret}"
    whole, damaged = visitor.get("/api/v1/runs").json()["items"]
    assert whole["decision"] is not None
    assert (damaged["decision"] is None) == (table == "decisions")
    listed = visitor.get("/api/v1/decisions").json()["items"]
    assert {item["run_name"] for item in listed} == {"whole"} | ({"damaged"} if table != "decisions" else set())
    status = 200 if table == "verdicts" else 503
    assert visitor.get(f"/runs/{runs[0].id}").status_code == status
    assert visitor.get(f"/api/v1/runs/{runs[0].id}").status_code == status


def test_damaged_decision_delays_no_other(project: ProjectFixture) -> None:
    """The veto windows of all others end, or are extended after an outage."""
    project.change_settings(veto_window_seconds=60.0)
    runs = [project.open_run(name) for name in ("damaged", "whole")]
    for run in runs:
        project.post_observations(run, DECLINING_EVALS)
    damage_rows(project.database, "decisions", "action", "pray", OF_DAMAGED)
    with project.database.transaction() as tx:
        assert due_decisions.extend_windows(tx, NOW + timedelta(seconds=30), 60.0, None, "an outage") == 2
    with pytest.raises(UnreadableRow):
        project.end_windows(NOW + timedelta(seconds=100))
    assert project.load_decision(runs[1]).state == DecisionState.REQUESTED
