"""Every route does what it is for, over a real socket, on both databases."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest

from tests.service.web.api.api_calls import (
    BODIES,
    FALLING,
    ROUTES,
    Resources,
    call_route,
    create_resources,
    expect_json,
    expect_problem,
)
from tests.service.web.api.conftest import Service


def opened(client: httpx.Client, **terms: Any) -> dict[str, Any]:
    return expect_json(client.post("/runs", json={"name": uuid.uuid4().hex} | terms), 201)


def test_knows_every_route(service: Service) -> None:
    """These tests name every route that the API document names, and no other."""
    document = httpx.get(f"{service.url}/openapi.json", trust_env=False).json()
    described = {
        (method.upper(), path.removeprefix("/api/v1"))
        for path, operations in document["paths"].items()
        for method in operations
    }
    assert described - {("GET", "/livez"), ("GET", "/readyz")} == set(ROUTES)


def test_lives_and_is_ready(service: Service) -> None:
    """Without a key one can ask whether the service lives and can serve."""
    for path in ("livez", "readyz"):
        assert httpx.get(f"{service.url}/{path}", trust_env=False).json() == {"status": "ok"}


def test_runs(admin: httpx.Client) -> None:
    """A run is opened by its name once, read by its id, and found by its name and status."""
    run = opened(admin, labels={"job": "1"}, total_steps=10)
    assert run["status"] == "running"
    assert run["policy"] == {"name": "paper", "version": 1}
    assert run["verdict"]["verdict"] == "continue"
    assert run["metrics"]["eval"] == {"role": "eval", "direction": "maximize"}
    again = expect_json(admin.post("/runs", json={"name": run["name"]}), 200)
    assert again == run
    assert expect_json(admin.get(f"/runs/{run['id']}"), 200) == run
    assert expect_json(admin.get("/runs", params={"name": run["name"][3:9], "status": "running"}), 200)["items"] == [
        run
    ]
    ended = expect_json(admin.post(f"/runs/{run['id']}/finish", json={"status": "completed"}), 200)
    assert (ended["status"], ended["ended_at"] is None) == ("completed", False)
    assert expect_json(admin.post(f"/runs/{run['id']}/finish", json={"status": "failed"}), 200) == ended
    assert expect_json(admin.get("/runs", params={"status": "running"}), 200)["items"] == []


def test_params_are_those_of_the_first_opening(admin: httpx.Client) -> None:
    """What a run is trained with is kept when it is opened; one that names the planned length sets that."""
    run = opened(admin, params={"lr": "1e-6", "max_steps": "500"})
    assert (run["params"], run["total_steps"]) == ({"lr": "1e-6", "max_steps": "500"}, 500)
    again = expect_json(admin.post("/runs", json={"name": run["name"], "params": {"lr": "1"}}), 200)
    assert again["params"] == expect_json(admin.get(f"/runs/{run['id']}"), 200)["params"] == run["params"]


def test_directions_are_written_out(admin: httpx.Client) -> None:
    """A metric whose direction is not given gets the one that its role has by default."""
    run = opened(admin, metrics={"a/gold": {"role": "eval"}, "b": {"role": "kl"}, "c": {"role": "loss"}})
    assert {name: role["direction"] for name, role in run["metrics"].items()} == {
        "a/gold": "maximize",
        "b": "minimize",
        "c": "minimize",
    }


def test_other_metrics_are_refused(admin: httpx.Client) -> None:
    """A run cannot be opened again with other metrics."""
    run = opened(admin)
    body = {"name": run["name"], "metrics": {"gold": {"role": "eval"}}}
    assert "metrics" in expect_problem(admin.post("/runs", json=body), 409)["detail"]


def test_a_run_is_stopped(admin: httpx.Client) -> None:
    """Posted evals come back as a verdict with its reason, a decision, and the word to stop."""
    run = opened(admin)
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
    chosen = {"step": 1, "uri": "file:///1", "score": 0.9, "chosen_by": "smoothed_maximum"}
    assert best == chosen | {name: best[name] for name in ("smoothed", "smoothed_stderr")}
    after = expect_json(admin.get(path), 200)
    assert after["should_stop"]
    assert (after["best_checkpoint"], after["raw_maximum"], after["last_step"]) == (best, {"step": 1, "score": 0.9}, 4)
    decision = after["decision"]
    assert (decision["state"], decision["step"], decision["run_name"]) == ("requested", 4, run["name"])
    assert [change["state"] for change in decision["history"]] == ["requested"]
    assert expect_json(admin.get(f"/decisions/{decision['id']}"), 200) == decision
    assert expect_json(admin.get("/decisions", params={"run_id": run["id"], "state": "requested"}), 200)["items"] == [
        decision
    ]
    assert expect_json(admin.get("/decisions", params={"state": "vetoed"}), 200)["items"] == []
    assert expect_json(admin.get(f"{path}/checkpoints"), 200)["items"][0]["step"] == 1
    words = [item["verdict"]["verdict"] for item in expect_json(admin.get(f"{path}/verdicts"), 200)["items"]]
    assert words == ["stop", "suspect"]


def test_a_receiver_reports(admin: httpx.Client) -> None:
    """A report of the job's end confirms the decision and stops the run; then it can be judged."""
    resources = create_resources(admin)
    path = resources.path("/decisions/{decision_id}")
    body = {"state": "confirmed", "actor": "receiver", "reason": "gone", "details": {"exit_status": -15}}
    confirmed = expect_json(admin.post(f"{path}/report", json=body), 200)
    assert confirmed["state"] == "confirmed"
    assert confirmed["history"][-1]["details"] == {"exit_status": -15}
    assert expect_json(admin.post(f"{path}/report", json=body), 200) == confirmed
    expect_problem(admin.post(f"{path}/report", json={"state": "failed"}), 409)
    expect_problem(admin.post(f"{path}/veto", json={"reason": "too late"}), 409)
    assert expect_json(admin.get(resources.path("/runs/{run_id}")), 200)["status"] == "stopped"
    for outcome in ("wrong", "right"):
        judged = expect_json(admin.post(f"{path}/outcome", json={"outcome": outcome, "turn_step": 1}), 200)
    assert (judged["outcome"]["outcome"], judged["outcome"]["actor"]) == ("right", "key test")


def test_a_person_vetoes(service: Service) -> None:
    """Within the veto window a stop is pending, not yet to be obeyed, and can be vetoed."""
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


def test_a_stop_under_way_is_undone(admin: httpx.Client) -> None:
    """A receiver says that it has begun and how long it will take; a person takes the stop back."""
    resources = create_resources(admin)
    path = resources.path("/decisions/{decision_id}")
    requested = expect_json(admin.get(path), 200)
    assert requested["escalations"] == 0
    body = {"state": "acknowledged", "reason": "found", "expected_seconds": 3600}
    acknowledged = expect_json(admin.post(f"{path}/report", json=body), 200)
    assert acknowledged["state"] == "acknowledged"
    later = [datetime.fromisoformat(one["deadline_at"]) for one in (requested, acknowledged)]
    assert later[1] - later[0] >= timedelta(hours=1)
    assert expect_json(admin.get("/decisions", params={"state": "acknowledged"}), 200)["items"] == [acknowledged]
    error = expect_problem(admin.post(f"{path}/report", json=body | {"state": "confirmed"}), 422)["errors"][0]
    assert "expected_seconds is allowed with acknowledged only" in error["detail"]
    undone = expect_json(admin.post(f"{path}/undo", json={"reason": "broken eval", "actor": "dana"}), 200)
    assert (undone["state"], undone["deadline_at"]) == ("undone", None)
    assert not expect_json(admin.get(resources.path("/runs/{run_id}")), 200)["should_stop"]
    refused = expect_problem(admin.post(f"{path}/release", json={"reason": "after all"}), 409)
    assert "undone" in refused["detail"]


def test_what_is_not_finite_comes_back(admin: httpx.Client) -> None:
    """NaN and the infinities go in and come out as strings, in lists and in conflicts."""
    run = opened(admin)
    path = f"/runs/{run['id']}/observations"
    words = ["NaN", "Infinity", "-Infinity"]
    points = [{"metric": "eval", "step": step, "value": value} for step, value in enumerate(words)]
    assert expect_json(admin.post(path, json={"observations": points}), 200)["accepted"] == 3
    assert expect_json(admin.post(path, json={"observations": points}), 200)["duplicates"] == 3
    conflict = expect_json(admin.post(path, json={"observations": [points[0] | {"value": 1}]}), 200)["conflicts"]
    assert conflict == [{"metric": "eval", "step": 0, "stored_value": "NaN", "sent_value": 1.0}]
    conflict = expect_json(admin.post(path, json={"observations": [points[1] | {"value": "NaN"}]}), 200)["conflicts"]
    assert conflict == [{"metric": "eval", "step": 1, "stored_value": "Infinity", "sent_value": "NaN"}]
    listed = expect_json(admin.get(path, params={"metric": "eval"}), 200)["items"]
    assert [item["value"] for item in listed] == words


def test_resumes(admin: httpx.Client) -> None:
    """A resumed run shows what its earlier attempt observed as superseded, page by page."""
    run = opened(admin)
    path = f"/runs/{run['id']}"
    expect_json(admin.post(f"{path}/observations", json={"observations": FALLING}), 200)
    resumed = expect_json(admin.post(f"{path}/resume", json={"step": 1}), 200)
    assert (resumed["attempt"], resumed["decision"], resumed["should_stop"], resumed["last_step"]) == (
        2,
        None,
        False,
        1,
    )
    assert expect_json(admin.post(f"{path}/resume", json={"step": 1}), 200)["attempt"] == 2
    expect_json(admin.post(f"{path}/observations", json={"observations": [FALLING[2] | {"value": 1.0}]}), 200)
    found: list[tuple[int, float, int | None]] = []
    query: dict[str, Any] = {"metric": "eval", "limit": 2}
    while True:
        page = expect_json(admin.get(f"{path}/observations", params=query), 200)
        found += [(item["step"], item["value"], item["superseded_by"]) for item in page["items"]]
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert found == [(0, 0.5, None), (1, 0.9, None), (2, 1.0, None), (2, 0.8, 2), (3, 0.7, 2), (4, 0.6, 2)]


def test_lists_by_pages(admin: httpx.Client) -> None:
    """Cursors lead through a list once, newest first."""
    made = [opened(admin)["id"] for _ in range(5)]
    found, query = [], {"limit": "2"}
    while True:
        page = expect_json(admin.get("/runs", params=query), 200)
        found += [item["id"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert found == made[::-1]


def test_policies(admin: httpx.Client) -> None:
    """A policy is stored as the next version of its name; the same again is the same version."""
    body = BODIES["POST", "/policies"]
    assert expect_json(admin.post("/policies", json=body), 201)["version"] == 1
    assert expect_json(admin.post("/policies", json=body), 201)["version"] == 1
    assert expect_json(admin.post("/policies", json=body | {"min_evals": 11}), 201)["version"] == 2
    assert [item["version"] for item in expect_json(admin.get("/policies/patient"), 200)["items"]] == [2, 1]
    assert {"paper", "default", "patient"} <= {
        item["name"] for item in expect_json(admin.get("/policies"), 200)["items"]
    }
    assert opened(admin, policy="patient@1")["policy"] == {"name": "patient", "version": 1}
    assert opened(admin, policy="patient")["policy"] == {"name": "patient", "version": 2}
    assert "nosuch" in expect_problem(admin.post("/runs", json={"name": "x", "policy": "nosuch"}), 422)["detail"]
    detail = expect_problem(admin.post("/policies", json=body | {"members": []}), 422)["detail"]
    assert "members" in detail
    out_of_reach = body | {"members": [{"detector": "posterior", "stop_at": 1.7}]}
    detail = expect_problem(admin.post("/policies", json=out_of_reach), 422)["detail"]
    assert "stop_at is 1.7, but the evidence of posterior is from 0 to 1" in detail


def test_projects(service: Service) -> None:
    """A key to the installation makes projects; a project's own keys see and change its defaults."""
    landlord = service.open_client(None, "admin")
    name = uuid.uuid4().hex
    made = expect_json(landlord.post("/projects", json={"name": name, "veto_window_seconds": 5}), 201)
    assert made["default_mode"] == "shadow"
    expect_problem(landlord.post("/projects", json={"name": name}), 409)
    assert made in expect_json(landlord.get("/projects"), 200)["items"]
    tenant = service.open_client(name)
    assert expect_json(tenant.get("/project"), 200) == made
    expect_problem(tenant.patch("/project", json={"default_mode": "enforce"}), 409)
    limited = expect_json(tenant.post("/runs", json={"name": "limited", "mode": "enforce"}), 201)
    limit = {"field": "mode", "asked": "enforce", "given": "shadow", "setting": "max_mode"}
    assert (limited["mode"], limited["limits"]) == ("shadow", [limit])
    modes = {"default_mode": "enforce", "max_mode": "enforce"}
    assert expect_json(tenant.patch("/project", json=modes), 200) == made | modes
    assert expect_json(tenant.get("/project"), 200) == made | modes
    assert opened(tenant)["mode"] == "enforce"
    expect_problem(tenant.patch("/project", json={"default_policy": "nosuch"}), 422)
    bounds = {"stops_per_hour": 3, "stops_share": None, "confirm_seconds": 60.0, "stale_seconds": 900.0}
    changed = expect_json(tenant.patch("/project", json=bounds), 200)
    assert changed == made | modes | bounds
    assert expect_json(tenant.patch("/project", json={"confirm_seconds": None}), 200) == changed
    for wrong in ({"stops_per_hour": 0}, {"stops_share": 1.5}, {"stops_share": 0}, {"stale_seconds": 0}):
        assert next(iter(wrong)) in expect_problem(tenant.patch("/project", json=wrong), 422)["errors"][0]["pointer"]


def test_a_project_is_paused_and_resumed(service: Service) -> None:
    """Who paused it and why is shown; meanwhile a stop is on hold, and nobody can release it."""
    tenant = service.open_client(service.create_project())
    assert expect_json(tenant.get("/project"), 200)["paused_at"] is None
    paused = expect_json(tenant.post("/project/pause", json={"actor": "dana", "reason": "broken evals"}), 200)
    assert (paused["paused_by"], paused["paused_reason"]) == ("dana", "broken evals")
    run = opened(tenant)
    expect_json(tenant.post(f"/runs/{run['id']}/observations", json={"observations": FALLING}), 200)
    decision = expect_json(tenant.get(f"/runs/{run['id']}"), 200)["decision"]
    assert decision["state"] == "on_hold"
    detail = expect_problem(tenant.post(f"/decisions/{decision['id']}/release", json={"reason": "now"}), 409)["detail"]
    assert "paused" in detail
    assert expect_json(tenant.post("/project/resume", json={}), 200)["paused_at"] is None
    assert (
        expect_json(tenant.post(f"/decisions/{decision['id']}/release", json={"reason": "now"}), 200)["state"]
        == "requested"
    )


def test_a_run_shows_its_health(admin: httpx.Client) -> None:
    """Heartbeats are answered with the run, and count as being heard of."""
    run = opened(admin)
    assert run["health"]["state"] == "alive"
    beaten = expect_json(admin.post(f"/runs/{run['id']}/heartbeat"), 200)
    assert beaten["health"]["last_report_at"] > run["health"]["last_report_at"]
    expect_json(admin.post(f"/runs/{run['id']}/finish", json={"status": "completed"}), 200)
    assert expect_json(admin.post(f"/runs/{run['id']}/heartbeat"), 200)["health"] is None


def test_keys(service: Service, admin: httpx.Client) -> None:
    """A key is shown once, works until it is revoked, and is never shown again."""
    made = expect_json(admin.post("/keys", json={"name": "trainers", "scopes": ["read", "ingest", "read"]}), 201)
    assert made["scopes"] == ["ingest", "read"]
    trainer = service.open_client_with_key(made["key"])
    expect_json(trainer.get("/runs"), 200)
    listed = expect_json(admin.get("/keys"), 200)["items"]
    assert made["id"] in {item["id"] for item in listed}
    assert all("key" not in item for item in listed)
    assert admin.delete(f"/keys/{made['id']}").status_code == 204
    expect_problem(trainer.get("/runs"), 401)
    expect_problem(admin.delete(f"/keys/{made['id']}"), 404)


def test_endpoints_and_deliveries(admin: httpx.Client) -> None:
    """An endpoint's secret is shown when it is made and when it is rotated; its deliveries are listed."""
    resources = create_resources(admin)
    path = resources.path("/endpoints/{endpoint_id}")
    rotated = expect_json(admin.post(f"{path}/rotate-secret"), 200)
    assert rotated["secret"].startswith("whsec_")
    assert rotated["previous_secret_until"] is not None
    assert "secret" not in expect_json(admin.get("/endpoints"), 200)["items"][0]
    changed = expect_json(admin.patch(path, json={"enabled": False, "event_types": ["run.stopped"]}), 200)
    assert (changed["enabled"], changed["event_types"]) == (False, ["run.stopped"])
    listed = expect_json(
        admin.get("/deliveries", params={"endpoint_id": resources.ids["endpoint_id"], "state": "waiting"}), 200
    )
    assert "run.stop_requested" in {item["event_type"] for item in listed["items"]}
    expect_problem(admin.post(resources.path("/deliveries/{delivery_id}/retry")), 409)
    assert admin.delete(path).status_code == 204
    expect_problem(admin.patch(path, json={}), 404)
    assert expect_json(admin.get("/deliveries"), 200)["items"][0]["state"] == "cancelled"


def test_nothing_there(admin: httpx.Client) -> None:
    """A path that is not there and a method that it does not take are told in our own words."""
    assert "/docs" in expect_problem(admin.get("/nosuch"), 404)["detail"]
    response = admin.put("/runs", json={})
    assert "GET" in expect_problem(response, 405)["detail"]
    assert "GET" in response.headers["allow"]


OPENING = {("POST", "/kubeflow/{name}")}
"""Routes by which a name that nobody has is made."""

OF_THE_INSTALLATION = {("POST", "/projects/{project_id}/keys"), ("PUT", "/projects/{project_id}/quotas")}
"""Routes that a project's key may not use, whatever the id."""


@pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if "{" in route[1] and route not in OPENING | OF_THE_INSTALLATION],
    ids=" ".join,
)
def test_unknown_ids(admin: httpx.Client, route: tuple[str, str]) -> None:
    """An id that is no UUID is not valid; one that nobody has is not found."""
    if "{name}" in route[1] or "{event_type}" in route[1]:
        expect_problem(call_route(admin, route, Resources({"name": "nosuch", "event_type": "nosuch"})), 404)
        return
    ids = (
        *("run_id", "key_id", "decision_id", "endpoint_id", "delivery_id", "backtest_id"),
        *("request_id", "session_id", "proposal_id"),
    )
    expect_problem(call_route(admin, route, Resources(dict.fromkeys(ids, str(uuid.uuid4())))), 404)
    errors = expect_problem(call_route(admin, route, Resources(dict.fromkeys(ids, "nonsense"))), 422)["errors"]
    assert "_id" in errors[0]["pointer"]


def test_a_job_and_an_opening_tell_runs_of_one_name_apart(admin: httpx.Client) -> None:
    """Another job gets a run of its own, the same request gets its run again, and who resumes gets the latest."""
    name, opening = uuid.uuid4().hex, str(uuid.uuid4())
    of_name = {"name": name, "job": "slurm:alpha:1"}
    first = expect_json(admin.post("/runs", json=of_name | {"opening": opening}), 201)
    assert expect_json(admin.post("/runs", json=of_name), 200)["id"] == first["id"]
    second = expect_json(admin.post("/runs", json={"name": name, "job": "slurm:alpha:2"}), 201)
    assert (first["name"], second["name"]) == (name, f"{name}-2")
    answer = expect_json(admin.post(f"/runs/{first['id']}/finish", json={"status": "completed"}), 200)
    assert expect_json(admin.post("/runs", json=of_name | {"opening": opening}), 200) == answer
    point = {"metric": "eval", "step": 1, "value": 0.5}
    late = expect_json(admin.post(f"/runs/{first['id']}/observations", json={"observations": [point]}), 200)
    assert late["status"] == "completed"
    refused = expect_problem(admin.post("/runs", json=of_name | {"resume": "must", "mode": "shadow"}), 409)
    assert "mode enforce, not shadow" in refused["detail"]
    resumed = expect_json(admin.post("/runs", json=of_name | {"resume": "must"}), 200)
    assert (resumed["id"], resumed["status"]) == (first["id"], "running")
    expect_problem(admin.post("/runs", json={"name": uuid.uuid4().hex, "resume": "must"}), 404)
    expect_problem(admin.post("/runs", json=of_name | {"resume": "never"}), 422)
