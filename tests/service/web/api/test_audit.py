"""The audit log over HTTP: it records every change that a key makes, and no secret."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any

import httpx
from evalstop_service.clock import utc_now
from evalstop_service.projects import audit_trail

from tests.fixtures.projects import create_named_key
from tests.service.web.api.api_calls import FALLING, call_route, create_resources, expect_json
from tests.service.web.api.conftest import Service
from tests.service.web.api.routes import BODIES, ENDPOINT, INSTALLATION_ROUTES, ROUTES

SLACK = "https://93.184.216.34/services/T0/B0/a-path-that-is-a-secret"

ACTIONS = {
    ("POST", "/projects"): "project.created",
    ("PATCH", "/project"): "project.changed",
    ("POST", "/project/pause"): "project.paused",
    ("POST", "/project/resume"): "project.resumed",
    ("POST", "/keys"): "key.created",
    ("POST", "/projects/{project_id}/keys"): "key.created",
    ("PUT", "/projects/{project_id}/quotas"): "project.quotas_set",
    ("DELETE", "/keys/{key_id}"): "key.revoked",
    ("POST", "/decisions/{decision_id}/report"): "decision.reported",
    ("POST", "/policies"): "policy.created",
    ("PUT", "/policies/{name}/rollout-stage"): "rollout_stage.set",
    ("DELETE", "/policies/{name}/rollout-stage"): "rollout_stage.removed",
    ("POST", "/policies/{name}/rollout-stage/demote"): "rollout_stage.moved",
    ("POST", "/policies/backtests"): "policy.backtested",
    ("PATCH", "/runs/{run_id}"): "run.described",
    ("POST", "/runs/{run_id}/notes"): "run.described",
    ("DELETE", "/runs/{run_id}/notes/{note_id}"): "run.described",
    ("PATCH", "/runs/{run_id}/metrics"): "run.metrics_changed",
    ("POST", "/decisions/{decision_id}/veto"): "decision.vetoed",
    ("POST", "/decisions/{decision_id}/release"): "decision.released",
    ("POST", "/decisions/{decision_id}/undo"): "decision.undone",
    ("POST", "/decisions/{decision_id}/outcome"): "decision.labeled",
    ("POST", "/runs/{run_id}/eval-changes"): "run.eval_changed",
    ("POST", "/runs/{run_id}/stop"): "run.stop_ordered",
    ("POST", "/runs/{run_id}/outcome"): "run.labeled",
    ("POST", "/proposals/{proposal_id}/confirm"): "proposal.confirmed",
    ("POST", "/proposals/{proposal_id}/refuse"): "proposal.refused",
    ("POST", "/endpoints"): "endpoint.created",
    ("PATCH", "/endpoints/{endpoint_id}"): "endpoint.changed",
    ("DELETE", "/endpoints/{endpoint_id}"): "endpoint.deleted",
    ("POST", "/endpoints/{endpoint_id}/rotate-secret"): "endpoint.secret_rotated",
    ("POST", "/deliveries/{delivery_id}/replay"): "delivery.replayed",
    ("POST", "/pull/endpoints"): "endpoint.created",
    ("POST", "/pull/endpoints/{endpoint_id}/claim"): "delivery.claimed",
    ("POST", "/pull/endpoints/{endpoint_id}/settle"): "delivery.settled",
    ("POST", "/runs"): "run.opened",
    ("POST", "/runs/{run_id}/resume"): "run.resumed",
    ("POST", "/runs/{run_id}/exploited"): "run.exploited",
    ("POST", "/groups/{name}"): "group.rule_set",
    ("DELETE", "/groups/{name}"): "group.rule_removed",
    ("POST", "/runs/{run_id}/finish"): "run.finished",
}
"""The action that each changing route records."""

NOT_AUDITED = {
    ("POST", "/runs/{run_id}/heartbeat"),
    ("POST", "/runs/{run_id}/alerts"),
    ("POST", "/observations"),
    ("POST", "/runs/{run_id}/observations"),
    ("POST", "/runs/{run_id}/checkpoints"),
    ("POST", "/runs/{run_id}/eval-requests/{request_id}/answer"),
    ("POST", "/endpoints/{endpoint_id}/test"),
}
"""Routes for what trainers measure, and the test of an endpoint, which changes nothing."""


INSTALLATION_CHANGES = INSTALLATION_ROUTES - {("GET", "/projects")}

RECORDED_IN_ANOTHER_STATE = {
    ("POST", "/endpoints"),
    ("POST", "/pull/endpoints"),
    ("POST", "/pull/endpoints/{endpoint_id}/claim"),
    ("POST", "/pull/endpoints/{endpoint_id}/settle"),
    ("POST", "/policies/{name}/rollout-stage/demote"),
    ("POST", "/decisions/{decision_id}/report"),
    ("POST", "/decisions/{decision_id}/release"),
    ("POST", "/decisions/{decision_id}/undo"),
    ("POST", "/proposals/{proposal_id}/confirm"),
    ("POST", "/runs/{run_id}/exploited"),
}
"""Changes that the objects of the first test do not permit, as they exist already or are in other states."""


def list_entries(client: httpx.Client, **query: str) -> list[dict[str, Any]]:
    """The entries, newest first, without those of the command that created the project and its first key."""
    items: list[dict[str, Any]] = expect_json(client.get("/audit", params=query), 200)["items"]
    return [entry for entry in items if entry["actor"] != "command line"]


def test_every_changing_route_is_listed_as_audited_or_not() -> None:
    """A new route that changes something must be added to one of the two tables."""
    assert {route for route in ROUTES if route[0] != "GET"} == {*ACTIONS, *NOT_AUDITED}


def test_each_change_by_a_key_is_recorded_without_secrets(service: Service) -> None:
    """Each change adds one entry with the key as its actor."""
    project = service.create_project(veto_window_seconds=3600.0)
    admin = service.open_client(project)
    resources = create_resources(admin)
    secrets = [expect_json(admin.post("/endpoints", json=ENDPOINT | {"url": SLACK}), 201)["secret"]]
    secrets.append(expect_json(admin.post("/keys", json=BODIES["POST", "/keys"]), 201)["key"])
    secrets.append(expect_json(admin.post(f"/endpoints/{resources.ids['endpoint_id']}/rotate-secret"), 200)["secret"])
    actions_so_far = [entry["action"] for entry in list_entries(admin)]
    assert actions_so_far[:3] == ["endpoint.secret_rotated", "key.created", "endpoint.created"]
    recorded = set()
    for route in sorted(ACTIONS, key=lambda route: route[0] == "DELETE"):  # deletions last
        before = list_entries(admin)[0]
        response = call_route(admin, route, resources)
        added = list(takewhile(lambda entry: entry["id"] != before["id"], list_entries(admin)))  # noqa: B023
        if added:
            # Opening a run may also set the rule of its group.
            own = next((entry for entry in added if entry["action"] == ACTIONS[route]), added[0])
            recorded.add(route)
            assert (response.is_success, own["action"], own["actor"]) == (True, ACTIONS[route], "key test")
    assert set(ACTIONS) - recorded == INSTALLATION_CHANGES | RECORDED_IN_ANOTHER_STATE
    text = admin.get("/audit", params={"limit": 200}).text
    assert not any(secret in text for secret in (*secrets, "a-path-that-is-a-secret"))
    assert list_entries(admin, action="decision", actor="KEY te")[0]["action"] == "decision.labeled"
    assert list_entries(admin, actor="nobody") == []


def test_creating_a_project_by_command_is_recorded_in_its_own_log(service: Service) -> None:
    """A project's log holds the creation of that project and its key, and of no other."""
    admins = [service.open_client(service.create_project()) for _ in range(2)]
    for admin in admins:
        items = expect_json(admin.get("/audit"), 200)["items"]
        assert [(entry["actor"], entry["action"]) for entry in items] == [
            ("command line", "key.created"),
            ("command line", "project.created"),
        ]


def test_requests_without_effect_are_not_recorded(service: Service) -> None:
    """A second veto, settings that are already in force and refused requests add no entry."""
    project = service.create_project(veto_window_seconds=3600.0)
    admin = service.open_client(project)
    run_id = expect_json(admin.post("/runs", json={"name": "one", "mode": "enforce"}), 201)["id"]
    expect_json(admin.post(f"/runs/{run_id}/observations", json={"observations": FALLING}), 200)
    decision_id = expect_json(admin.get("/decisions"), 200)["items"][0]["id"]
    for _ in range(2):
        expect_json(admin.post(f"/decisions/{decision_id}/veto", json={"reason": "a known dip"}), 200)
    assert admin.post(f"/decisions/{decision_id}/undo", json={"reason": "too late"}).status_code == 409
    expect_json(admin.patch("/project", json={"veto_window_seconds": 3600.0}), 200)
    assert [(entry["action"], entry["subject"]) for entry in list_entries(admin)] == [
        ("decision.vetoed", f"decision {decision_id}"),
        ("run.opened", "run one"),
    ]


def test_release_undo_and_retry_are_recorded(service: Service) -> None:
    """Releasing a stop, undoing one and retrying a delivery each add an entry; a refused release adds none."""
    admin = service.open_client(service.create_project(veto_window_seconds=3600.0))
    resources = create_resources(admin)
    expect_json(admin.post("/project/pause", json={}), 200)
    assert call_route(admin, ("POST", "/decisions/{decision_id}/release"), resources).status_code == 409
    expect_json(admin.post("/project/resume", json={}), 200)
    immediate_admin = service.open_client(service.create_project())
    for client, client_resources, route in (
        (admin, resources, ("POST", "/decisions/{decision_id}/release")),
        (immediate_admin, create_resources(immediate_admin), ("POST", "/decisions/{decision_id}/undo")),
    ):
        response = call_route(client, route, client_resources)
        assert response.status_code == 200, (route, response.text)
        assert list_entries(client)[0]["action"] == ACTIONS[route]


def test_actions_of_trainers_and_receivers_are_recorded(service: Service) -> None:
    """Entries record opening, resuming and finishing a run, changing its job, and claiming and reporting a stop."""
    project = service.create_project()
    secret = create_named_key(service.database, project, "t", ["ingest"], utc_now())[1]
    admin, trainer = service.open_client(project), service.open_client_with_key(secret)
    endpoint_id = expect_json(admin.post("/pull/endpoints", json={"name": "node"}), 201)["id"]
    run_terms = {"name": "one", "job": "slurm:a:1", "labels": {"slurm_job_id": "1"}, "policy": "paper"}
    run_id = expect_json(trainer.post("/runs", json=run_terms), 201)["id"]
    expect_json(trainer.post("/runs", json=run_terms), 200)
    expect_json(trainer.post(f"/runs/{run_id}/observations", json={"observations": FALLING}), 200)
    claim_body = {"wait_seconds": 10}
    (event,) = expect_json(admin.post(f"/pull/endpoints/{endpoint_id}/claim", json=claim_body), 200)["events"]
    settlement = {"delivery_id": event["delivery_id"], "attempt": event["attempt"], "status": 202}
    expect_json(admin.post(f"/pull/endpoints/{endpoint_id}/settle", json=settlement), 200)
    decision_id = json.loads(event["body"])["data"]["decision"]["id"]
    expect_json(admin.post(f"/decisions/{decision_id}/report", json={"state": "acknowledged"}), 200)
    expect_json(trainer.post("/runs", json=run_terms | {"labels": {"slurm_job_id": "2"}}), 200)
    expect_json(trainer.post(f"/runs/{run_id}/resume", json={"step": 1}), 200)
    expect_json(trainer.post(f"/runs/{run_id}/finish", json={"status": "failed"}), 200)
    expect_json(trainer.post("/runs", json=run_terms | {"resume": "must"}), 200)
    terms = {"id": run_id, "mode": "enforce", "policy": "paper@1", "job": "slurm:a:1"}
    trainer_entries = [entry for entry in reversed(list_entries(admin)) if entry["actor"] == "key t"]
    assert [entry["action"].removeprefix("run.") for entry in trainer_entries] == [
        *("opened", "attached", "terms_changed", "attached", "resumed", "finished", "terms_changed", "reopened")
    ]
    assert terms.items() <= trainer_entries[0]["details"].items()
    assert trainer_entries[2]["details"] == {"before": {"slurm_job_id": "1"}, "after": {"slurm_job_id": "2"}}
    assert trainer_entries[4]["details"] == {"step": 1, "attempt": 2}
    assert trainer_entries[5]["details"]["status"] == "failed"
    claimed, settled = (list_entries(admin, action=f"delivery.{verb}")[0] for verb in ("claimed", "settled"))
    assert (claimed["subject"], claimed["details"]) == (
        f"endpoint {endpoint_id}",
        {"deliveries": [event["delivery_id"]]},
    )
    assert settled["details"]["status"] == 202
    (report,) = list_entries(admin, action="decision.reported")
    assert (report["actor"], report["details"]["state"]) == ("key test", "acknowledged")


def test_export_lists_entries_in_order_with_chained_hashes(service: Service) -> None:
    """The export has one entry a line, from any position or time on, each with the hash of the entry before."""
    project = service.create_project()
    admin = service.open_client(project)
    audit_trail.chain_waiting(service.database)
    response = admin.get("/audit/export")
    assert response.headers["content-type"].startswith("application/x-ndjson")
    first, second = map(json.loads, response.text.splitlines())
    assert (first["position"], first["action"], first["previous_hash"]) == (1, "project.created", "")
    assert second["previous_hash"] == first["hash"] == expect_json(admin.get("/audit"), 200)["items"][1]["hash"]
    assert admin.get("/audit/export", params={"limit": 1}).text + admin.get(
        "/audit/export", params={"after": 1}
    ).text == (response.text)
    assert admin.get("/audit/export", params={"since": "2999-01-01T00:00:00Z"}).text == ""
