"""The audit log by HTTP: every change that a key makes is in it, and nothing secret is."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import httpx
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys, audit_trail
from evalstop_service.store.tables import deliveries

from tests.service.web.api.api_calls import BODIES, ENDPOINT, FALLING, ROUTES, call_route, create_resources, expect_json
from tests.service.web.api.conftest import Service

SLACK = "https://93.184.216.34/services/T0/B0/a-path-that-is-a-secret"

ACTIONS = {
    ("POST", "/projects"): "project.made",
    ("PATCH", "/project"): "project.changed",
    ("POST", "/project/pause"): "project.paused",
    ("POST", "/project/resume"): "project.resumed",
    ("POST", "/keys"): "key.made",
    ("POST", "/projects/{project_id}/keys"): "key.made",
    ("PUT", "/projects/{project_id}/quotas"): "project.quotas_set",
    ("DELETE", "/keys/{key_id}"): "key.revoked",
    ("POST", "/keys/{key_id}/rotate"): "key.rotated",
    ("DELETE", "/sessions/{session_id}"): "session.ended",
    ("POST", "/decisions/{decision_id}/report"): "decision.reported",
    ("POST", "/policies"): "policy.added",
    ("PUT", "/policies/{name}/rollout-stage"): "rollout_stage.set",
    ("DELETE", "/policies/{name}/rollout-stage"): "rollout_stage.removed",
    ("POST", "/policies/{name}/rollout-stage/demote"): "rollout_stage.moved",
    ("POST", "/policies/backtests"): "policy.backtested",
    ("PUT", "/project/role-patterns"): "project.changed",
    ("PATCH", "/runs/{run_id}"): "run.described",
    ("PATCH", "/runs/{run_id}/metrics"): "run.metrics_changed",
    ("POST", "/decisions/{decision_id}/veto"): "decision.vetoed",
    ("POST", "/decisions/{decision_id}/release"): "decision.released",
    ("POST", "/decisions/{decision_id}/undo"): "decision.undone",
    ("POST", "/decisions/{decision_id}/outcome"): "decision.judged",
    ("POST", "/runs/{run_id}/eval-changes"): "run.eval_changed",
    ("POST", "/runs/{run_id}/stop"): "run.stop_ordered",
    ("POST", "/runs/{run_id}/outcome"): "run.judged",
    ("POST", "/proposals/{proposal_id}/confirm"): "proposal.confirmed",
    ("POST", "/proposals/{proposal_id}/refuse"): "proposal.refused",
    ("POST", "/endpoints"): "endpoint.made",
    ("PATCH", "/endpoints/{endpoint_id}"): "endpoint.changed",
    ("DELETE", "/endpoints/{endpoint_id}"): "endpoint.deleted",
    ("POST", "/endpoints/{endpoint_id}/rotate-secret"): "endpoint.secret_rotated",
    ("POST", "/endpoints/{endpoint_id}/replay"): "endpoint.replayed",
    ("POST", "/deliveries/{delivery_id}/replay"): "delivery.replayed",
    ("POST", "/deliveries/{delivery_id}/retry"): "delivery.retried",
    ("POST", "/pull/endpoints"): "endpoint.made",
    ("POST", "/pull/endpoints/{endpoint_id}/claim"): "delivery.claimed",
    ("POST", "/pull/endpoints/{endpoint_id}/settle"): "delivery.settled",
    ("POST", "/runs"): "run.opened",
    ("POST", "/runs/{run_id}/resume"): "run.resumed",
    ("POST", "/runs/{run_id}/finish"): "run.finished",
    ("POST", "/kubeflow/{name}"): "run.opened",
}
"""What each route that changes something writes down."""

NOT_AUDITED = {
    ("POST", "/runs/{run_id}/heartbeat"),
    ("POST", "/observations"),
    ("POST", "/runs/{run_id}/observations"),
    ("POST", "/runs/{run_id}/checkpoints"),
    ("POST", "/runs/{run_id}/eval-requests/{request_id}/answer"),
    ("POST", "/runs/{run_id}/openmetrics"),
    ("POST", "/endpoints/{endpoint_id}/test"),
}
"""What trainers measure, and a test, which changes nothing."""


def log(client: httpx.Client, **query: str) -> list[dict[str, Any]]:
    """What was written down since the command line made the project and its first key."""
    items: list[dict[str, Any]] = expect_json(client.get("/audit", params=query), 200)["items"]
    return [entry for entry in items if entry["actor"] != "command line"]


def test_every_route_that_changes_something_is_in_the_log_or_is_said_not_to_be() -> None:
    """A new route that changes something has to say what it writes down."""
    assert {route for route in ROUTES if route[0] != "GET"} == {*ACTIONS, *NOT_AUDITED}


def test_what_a_key_does_is_written_down(service: Service) -> None:
    """Each change stands in the log once, by the key that proved itself, with who it named and nothing secret."""
    project = service.create_project(veto_window_seconds=3600.0)
    admin = service.open_client(project)
    resources = create_resources(admin)
    secrets = [expect_json(admin.post("/endpoints", json=ENDPOINT | {"url": SLACK}), 201)["secret"]]
    secrets.append(expect_json(admin.post("/keys", json=BODIES["POST", "/keys"]), 201)["key"])
    secrets.append(expect_json(admin.post(f"/endpoints/{resources.ids['endpoint_id']}/rotate-secret"), 200)["secret"])
    already = [entry["action"] for entry in log(admin)]
    assert already[:3] == ["endpoint.secret_rotated", "key.made", "endpoint.made"]
    for route in (
        ("PATCH", "/project"),
        ("POST", "/decisions/{decision_id}/outcome"),
        ("POST", "/decisions/{decision_id}/veto"),
        ("POST", "/project/pause"),
        ("POST", "/project/resume"),
        ("POST", "/policies"),
        ("PUT", "/policies/{name}/rollout-stage"),
        ("DELETE", "/policies/{name}/rollout-stage"),
        ("PUT", "/project/role-patterns"),
        ("POST", "/proposals/{proposal_id}/refuse"),
        ("POST", "/endpoints/{endpoint_id}/replay"),
        ("POST", "/deliveries/{delivery_id}/replay"),
        ("PATCH", "/endpoints/{endpoint_id}"),
        ("DELETE", "/endpoints/{endpoint_id}"),
        ("DELETE", "/sessions/{session_id}"),
        ("POST", "/keys/{key_id}/rotate"),
        ("DELETE", "/keys/{key_id}"),
    ):
        response = call_route(admin, route, resources)
        assert response.status_code < 300, (route, response.text)
        newest = log(admin)[0]
        assert newest["action"] == ACTIONS[route]
        assert newest["actor"] == "key test"
        if "actor" in BODIES.get(route, {}):
            assert newest["details"]["said_by"] == "dana"
    text = admin.get("/audit", params={"limit": 200}).text
    assert not any(secret in text for secret in (*secrets, "a-path-that-is-a-secret"))
    assert log(admin, action="decision", actor="KEY te")[0]["action"] == "decision.vetoed"
    assert log(admin, actor="nobody") == []


def test_what_the_command_line_makes_is_written_down(service: Service) -> None:
    """The project and a key of it, in its own log and in no other."""
    admins = [service.open_client(service.create_project()) for _ in range(2)]
    for admin in admins:
        items = expect_json(admin.get("/audit"), 200)["items"]
        assert [(entry["actor"], entry["action"]) for entry in items] == [
            ("command line", "key.made"),
            ("command line", "project.made"),
        ]


def test_what_changes_nothing_is_not_written_down(service: Service) -> None:
    """Vetoing twice, saying the settings that hold, and what is refused leave no entry."""
    project = service.create_project(veto_window_seconds=3600.0)
    admin = service.open_client(project)
    run_id = expect_json(admin.post("/runs", json={"name": "one", "mode": "enforce"}), 201)["id"]
    expect_json(admin.post(f"/runs/{run_id}/observations", json={"observations": FALLING}), 200)
    decision_id = expect_json(admin.get("/decisions"), 200)["items"][0]["id"]
    for _ in range(2):
        expect_json(admin.post(f"/decisions/{decision_id}/veto", json={"reason": "a known dip"}), 200)
    assert admin.post(f"/decisions/{decision_id}/undo", json={"reason": "too late"}).status_code == 409
    expect_json(admin.patch("/project", json={"veto_window_seconds": 3600.0}), 200)
    assert [(entry["action"], entry["subject"]) for entry in log(admin)] == [
        ("decision.vetoed", f"decision {decision_id}"),
        ("run.opened", "run one"),
    ]


def test_what_is_taken_up_again_is_written_down(service: Service) -> None:
    """A stop that is released, one that is undone, and a delivery that is retried each have their entry."""
    admin = service.open_client(service.create_project(veto_window_seconds=3600.0))
    resources = create_resources(admin)
    expect_json(admin.post("/project/pause", json={}), 200)
    assert call_route(admin, ("POST", "/decisions/{decision_id}/release"), resources).status_code == 409
    expect_json(admin.post("/project/resume", json={}), 200)
    with service.database.transaction() as tx:
        dead = deliveries.update().where(deliveries.c.id == UUID(resources.ids["delivery_id"])).values(state="dead")
        tx.execute(dead)
    at_once = service.open_client(service.create_project())
    for client, there, route in (
        (admin, resources, ("POST", "/deliveries/{delivery_id}/retry")),
        (admin, resources, ("POST", "/decisions/{decision_id}/release")),
        (at_once, create_resources(at_once), ("POST", "/decisions/{decision_id}/undo")),
    ):
        response = call_route(client, route, there)
        assert response.status_code == 200, (route, response.text)
        assert log(client)[0]["action"] == ACTIONS[route]


def test_what_trainers_and_receivers_do_is_written_down(service: Service) -> None:
    """Who opened a run on which terms, attached to it, named its job, resumed and ended it, and who took its stop."""
    project = service.create_project()
    secret = api_keys.create_named_key(service.database, project, "t", ["ingest"], utc_now())[1]
    admin, trainer = service.open_client(project), service.open_client_with_key(secret)
    endpoint_id = expect_json(admin.post("/pull/endpoints", json={"name": "node"}), 201)["id"]
    opening = {"name": "one", "job": "slurm:a:1", "labels": {"slurm_job_id": "1"}, "policy": "paper"}
    run_id = expect_json(trainer.post("/runs", json=opening), 201)["id"]
    expect_json(trainer.post("/runs", json=opening), 200)
    expect_json(trainer.post(f"/runs/{run_id}/observations", json={"observations": FALLING}), 200)
    claiming = {"wait_seconds": 10}
    (event,) = expect_json(admin.post(f"/pull/endpoints/{endpoint_id}/claim", json=claiming), 200)["events"]
    settling = {"delivery_id": event["delivery_id"], "attempt": event["attempt"], "status": 202}
    expect_json(admin.post(f"/pull/endpoints/{endpoint_id}/settle", json=settling), 200)
    decision_id = json.loads(event["body"])["data"]["decision"]["id"]
    reported = {"state": "acknowledged", "actor": "slurm"}
    expect_json(admin.post(f"/decisions/{decision_id}/report", json=reported), 200)
    expect_json(trainer.post("/runs", json=opening | {"labels": {"slurm_job_id": "2"}}), 200)
    expect_json(trainer.post(f"/runs/{run_id}/resume", json={"step": 1}), 200)
    expect_json(trainer.post(f"/runs/{run_id}/finish", json={"status": "failed"}), 200)
    expect_json(trainer.post("/runs", json=opening | {"resume": "must"}), 200)
    terms = {"id": run_id, "mode": "enforce", "policy": "paper@1", "job": "slurm:a:1"}
    of_trainer = [entry for entry in reversed(log(admin)) if entry["actor"] == "key t"]
    assert [entry["action"].removeprefix("run.") for entry in of_trainer] == [
        *("opened", "attached", "job_changed", "attached", "resumed", "finished", "job_changed", "reopened")
    ]
    assert terms.items() <= of_trainer[0]["details"].items()
    assert of_trainer[2]["details"] == {"before": {"slurm_job_id": "1"}, "after": {"slurm_job_id": "2"}}
    assert of_trainer[4]["details"] == {"step": 1, "attempt": 2}
    assert of_trainer[5]["details"]["status"] == "failed"
    claimed, settled = (log(admin, action=f"delivery.{what}")[0] for what in ("claimed", "settled"))
    assert (claimed["subject"], claimed["details"]) == (
        f"endpoint {endpoint_id}",
        {"deliveries": [event["delivery_id"]]},
    )
    assert settled["details"]["status"] == 202
    (report,) = log(admin, action="decision.reported")
    assert (report["actor"], report["details"]["said_by"]) == ("key test", "slurm")


def test_the_log_is_exported_in_the_order_of_its_chain(service: Service) -> None:
    """A line an entry from any position or time on, each with the hash of the one before."""
    project = service.create_project()
    admin = service.open_client(project)
    audit_trail.chain_waiting(service.database)
    response = admin.get("/audit/export")
    assert response.headers["content-type"].startswith("application/x-ndjson")
    first, second = map(json.loads, response.text.splitlines())
    assert (first["position"], first["action"], first["previous_hash"]) == (1, "project.made", "")
    assert second["previous_hash"] == first["hash"] == expect_json(admin.get("/audit"), 200)["items"][1]["hash"]
    assert admin.get("/audit/export", params={"limit": 1}).text + admin.get(
        "/audit/export", params={"after": 1}
    ).text == (response.text)
    assert admin.get("/audit/export", params={"since": "2999-01-01T00:00:00Z"}).text == ""
