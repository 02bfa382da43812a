"""Rows that cannot be read, because a later release wrote them or they are damaged."""

from __future__ import annotations

from datetime import timedelta

import httpx
import pytest
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.errors import UnreadableRow
from evalstop_service.store import hand_overs
from evalstop_service.store.database import Database

from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture
from tests.service.web.pages.recorded_runs import Tenant

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
        ("metrics", '["score"]', "Expected `object`, got `array`"),
    ],
)
def test_damaged_run_is_refused_with_the_fault(
    visitor: httpx.Client, database: Database, tenant: Tenant, column: str, text: str, fault: str
) -> None:
    """Its page, the API and the list say what cannot be read; other runs still accept observations."""
    runs = [tenant.open_run(name) for name in ("whole", "damaged")]
    damage_rows(database, "runs", column, text, "name = 'damaged'")
    visitor.headers["authorization"] = f"Bearer {tenant.secret}"
    for path in (f"/runs/{runs[1].id}", "/api/v1/runs", f"/api/v1/runs/{runs[1].id}"):
        refused = visitor.get(path)
        assert refused.status_code == 503
        assert "or it is damaged" in refused.text
    assert fault in refused.json()["detail"]
    posted = {"observations": [{"metric": "score", "step": 99, "value": 1.0}]}
    assert visitor.post(f"/api/v1/runs/{runs[1].id}/observations", json=posted).status_code == 503
    assert visitor.post(f"/api/v1/runs/{runs[0].id}/observations", json=posted).status_code == 200


def test_damaged_decision_delays_no_other(project: ProjectFixture) -> None:
    """The veto windows of all others end, or are extended after an outage."""
    project.change_settings(veto_window_seconds=60.0)
    runs = [project.open_run(name) for name in ("damaged", "whole")]
    for run in runs:
        project.post_observations(run, DECLINING_EVALS)
    damage_rows(project.database, "decisions", "action", "pray", OF_DAMAGED)
    with project.database.transaction() as tx:
        assert hand_overs.extend_windows(tx, NOW + timedelta(seconds=30), 60.0, None, "an outage") == 2
    with pytest.raises(UnreadableRow):
        project.end_windows(NOW + timedelta(seconds=100))
    assert project.load_decision(runs[1]).state == DecisionState.REQUESTED
