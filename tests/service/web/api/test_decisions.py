"""Decisions over HTTP: a stop is requested, reported, vetoed and undone."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
import sqlalchemy as sa
from evalstop_service.store import tables

from tests.fixtures.statements import record_statements
from tests.service.web.api.api_calls import (
    FALLING,
    create_decision,
    create_resources,
    expect_json,
    expect_problem,
    open_run,
)
from tests.service.web.api.conftest import Service


def test_posted_evals_lead_to_a_stop(admin: httpx.Client) -> None:
    """The response has the verdict and its reason, the best checkpoint and `should_stop`; a decision is recorded."""
    run = open_run(admin)
    path = f"/runs/{run['id']}"
    saved = expect_json(admin.post(f"{path}/checkpoints", json={"step": 1, "uri": "file:///1"}), 201)
    assert saved == {"step": 1, "uri": "file:///1", "created": True, "best_checkpoint": None}
    receipt = expect_json(admin.post(f"{path}/observations", json={"observations": FALLING + FALLING[:1]}), 200)
    assert (receipt["accepted"], receipt["duplicates"], receipt["conflict_count"]) == (5, 1, 0)
    assert receipt["should_stop"]
    assert (receipt["verdict"]["verdict"], receipt["verdict"]["step"], receipt["verdict"]["turn_step"]) == (
        "stop",
        4,
        1,
    )
    assert receipt["verdict"]["evidence"][0]["detector"] == "k_decline"
    best = receipt["best_checkpoint"]
    assert best["smoothed_stderr"] > 0
    expected_fields = {"step": 1, "uri": "file:///1", "score": 0.9, "chosen_by": "smoothed_maximum"}
    assert best == expected_fields | {name: best[name] for name in ("smoothed", "smoothed_stderr")}
    stopped_run = expect_json(admin.get(path), 200)
    assert stopped_run["should_stop"]
    assert (stopped_run["best_checkpoint"], stopped_run["raw_maximum"], stopped_run["last_step"]) == (
        best,
        {"step": 1, "score": 0.9},
        4,
    )
    decision = stopped_run["decision"]
    assert (decision["state"], decision["step"], decision["run_name"]) == ("requested", 4, run["name"])
    assert [change["state"] for change in decision["history"]] == ["requested"]
    assert expect_json(admin.get(f"/decisions/{decision['id']}"), 200) == decision
    assert expect_json(admin.get("/decisions", params={"run_id": run["id"], "state": "requested"}), 200)["items"] == [
        decision
    ]
    assert expect_json(admin.get("/decisions", params={"state": "vetoed"}), 200)["items"] == []
    assert expect_json(admin.get(f"{path}/checkpoints"), 200)["items"][0]["step"] == 1


def test_report_of_the_job_end_confirms_the_decision(admin: httpx.Client) -> None:
    """The run is stopped then, later reports and vetoes are refused, and outcomes can be posted."""
    resources = create_resources(admin)
    path = resources.path("/decisions/{decision_id}")
    body = {"state": "confirmed", "reason": "gone", "details": {"exit_status": -15}}
    confirmed = expect_json(admin.post(f"{path}/report", json=body), 200)
    assert confirmed["state"] == "confirmed"
    assert confirmed["history"][-1]["details"] == {"exit_status": -15}
    assert expect_json(admin.post(f"{path}/report", json=body), 200) == confirmed
    expect_problem(admin.post(f"{path}/report", json={"state": "failed"}), 409)
    expect_problem(admin.post(f"{path}/veto", json={"reason": "too late"}), 409)
    assert expect_json(admin.get(resources.path("/runs/{run_id}")), 200)["status"] == "stopped"
    for outcome in ("wrong", "right"):
        decision = expect_json(admin.post(f"{path}/outcome", json={"outcome": outcome, "turn_step": 1}), 200)
    assert (decision["outcome"]["outcome"], decision["outcome"]["actor"]) == ("right", "key test")


def test_pending_stop_can_be_vetoed(service: Service) -> None:
    """Within the veto window `should_stop` is false, and a veto cancels the delivery."""
    client = service.open_client(service.create_project(veto_window_seconds=3600))
    resources = create_resources(client)
    assert not expect_json(client.get(resources.path("/runs/{run_id}")), 200)["should_stop"]
    vetoed = expect_json(
        client.post(resources.path("/decisions/{decision_id}/veto"), json={"reason": "broken eval"}), 200
    )
    assert vetoed["state"] == "vetoed"
    assert vetoed["history"][-1]["actor"] == "key test"
    stops = [item for item in expect_json(client.get("/deliveries"), 200)["items"] if item["decision_id"]]
    assert [item["state"] for item in stops] == ["cancelled"]


def test_person_who_looks_at_a_run_does_not_take_its_stop(service: Service) -> None:
    """A requested stop is handed over to the trainer's key that reads the run, but to no key that may veto it."""
    project = service.create_project()
    person, trainer = service.open_client(project), service.open_client(project, "ingest")
    resources = create_resources(person)
    run, decision = resources.path("/runs/{run_id}"), resources.path("/decisions/{decision_id}")
    columns, decision_id = tables.decisions.c, UUID(decision.rpartition("/")[2])
    with service.database.transaction() as tx:  # as if the answer to the post had been lost
        tx.execute(sa.update(tables.decisions).where(columns.id == decision_id).values(handed_over_at=None))
    assert not expect_json(person.get(run), 200)["should_stop"]
    assert expect_json(person.get(decision), 200)["handed_over_at"] is None
    assert expect_json(trainer.get(run), 200)["should_stop"]
    assert expect_json(person.get(decision), 200)["handed_over_at"] is not None


def test_acknowledged_stop_can_be_undone(admin: httpx.Client) -> None:
    """A receiver states how long the stop takes, which moves its deadline, and a person undoes the stop."""
    resources = create_resources(admin)
    path = resources.path("/decisions/{decision_id}")
    requested = expect_json(admin.get(path), 200)
    assert requested["escalations"] == 0
    body = {"state": "acknowledged", "reason": "found", "expected_seconds": 3600}
    acknowledged = expect_json(admin.post(f"{path}/report", json=body), 200)
    assert acknowledged["state"] == "acknowledged"
    deadlines = [datetime.fromisoformat(decision["deadline_at"]) for decision in (requested, acknowledged)]
    assert deadlines[1] - deadlines[0] >= timedelta(hours=1)
    assert expect_json(admin.get("/decisions", params={"state": "acknowledged"}), 200)["items"] == [acknowledged]
    undone = expect_json(admin.post(f"{path}/undo", json={"reason": "broken eval"}), 200)
    assert (undone["state"], undone["deadline_at"]) == ("undone", None)
    assert not expect_json(admin.get(resources.path("/runs/{run_id}")), 200)["should_stop"]
    refused = expect_problem(admin.post(f"{path}/release", json={"reason": "after all"}), 409)
    assert "undone" in refused["detail"]


@pytest.mark.parametrize("path", ["/decisions", "/runs"])
def test_many_decisions_take_as_many_statements_as_one(service: Service, path: str) -> None:
    """A list shows each decision with its history and outcome, and reads those of all together."""
    client = service.open_client(service.create_project())

    def count_statements() -> int:
        with record_statements(service.database) as statements:
            listed = expect_json(client.get(path), 200)["items"]
        assert all((item.get("decision") or item)["history"] for item in listed)
        return len(statements)

    create_decision(client)
    count_of_one = count_statements()
    create_decision(client)
    create_decision(client)
    assert count_statements() == count_of_one


def test_grafana_draws_stops_as_the_documentation_says(admin: httpx.Client) -> None:
    """The address, with Grafana's times filled in, answers rows with each column of the documented table."""
    decision_id = create_decision(admin)
    page = (Path(__file__).parents[4] / "docs/operations/watching.md").read_text()
    recipe = page.partition("### Stops on your own dashboards")[2].partition("## Alerts")[0]
    (address,) = re.findall(r"https://evalstop\.example/api/v1(/decisions\S+)", recipe)
    begins, ends = datetime.now(UTC) - timedelta(hours=1), datetime.now(UTC) + timedelta(hours=1)
    for name, at in (("from", begins), ("to", ends)):
        address = address.replace(f"${{__{name}:date:iso}}", at.strftime("%Y-%m-%dT%H:%M:%S.000Z"))
    (row,) = expect_json(admin.get(address), 200)["items"]
    columns = {}
    for selector, name, kind in re.findall(r"^\| `([\w.]+)` \| (\w+) \| (\w+) \|", recipe, re.MULTILINE):
        value: Any = row
        for key in selector.split("."):
            value = value[key]
        columns[name] = datetime.fromisoformat(value) if kind == "Timestamp" else value
    assert row["id"] == decision_id
    assert begins < columns["time"] < ends
    assert (columns["title"], columns["tags"]) == (row["run_name"], "requested")
    assert columns["text"]
    assert expect_json(admin.get(f"{address}&state=confirmed"), 200)["items"] == []
