"""Projects over HTTP: their settings, policies, keys and endpoints."""

from __future__ import annotations

import uuid

import httpx

from tests.service.web.api.api_calls import create_resources, expect_json, expect_problem, list_pages, open_run
from tests.service.web.api.conftest import Service
from tests.service.web.api.routes import BODIES


def test_project_is_created_and_its_settings_changed(service: Service) -> None:
    """A key to the installation creates projects; a project's own keys change its settings within limits."""
    installation_admin = service.open_client(None, "admin")
    name = uuid.uuid4().hex
    project = expect_json(installation_admin.post("/projects", json={"name": name, "veto_window_seconds": 5}), 201)
    assert project["default_mode"] == "shadow"
    expect_problem(installation_admin.post("/projects", json={"name": name}), 409)
    assert project in expect_json(installation_admin.get("/projects"), 200)["items"]
    tenant = service.open_client(name)
    assert expect_json(tenant.get("/project"), 200) == project
    expect_problem(tenant.patch("/project", json={"default_mode": "enforce"}), 409)
    run = expect_json(tenant.post("/runs", json={"name": "limited", "mode": "enforce"}), 201)
    limit = "mode enforce was requested, but the project allows shadow: a key with the scope admin can change max_mode"
    assert (run["mode"], run["limits"]) == ("shadow", [limit])
    modes = {"default_mode": "enforce", "max_mode": "enforce"}
    assert expect_json(tenant.patch("/project", json=modes), 200) == project | modes
    assert expect_json(tenant.get("/project"), 200) == project | modes
    assert open_run(tenant)["mode"] == "enforce"
    expect_problem(tenant.patch("/project", json={"default_policy": "nosuch"}), 422)
    changes = {"stops_per_hour": 3, "stops_share": None, "confirm_seconds": 60.0, "stale_seconds": 900.0}
    changed = expect_json(tenant.patch("/project", json=changes), 200)
    assert changed == project | modes | changes
    assert expect_json(tenant.patch("/project", json={"confirm_seconds": None}), 200) == changed
    for invalid in ({"stops_per_hour": 0}, {"stops_share": 1.5}, {"stops_share": 0}, {"stale_seconds": 0}):
        assert (
            next(iter(invalid)) in expect_problem(tenant.patch("/project", json=invalid), 422)["errors"][0]["pointer"]
        )


def test_panel_is_observed_by_runs_opened_from_then_on(service: Service) -> None:
    """A changed panel is a new version of the shipped policies: open runs keep theirs, and verdicts stay the same."""
    name = uuid.uuid4().hex
    expect_json(service.open_client(None, "admin").post("/projects", json={"name": name}), 201)
    tenant = service.open_client(name)
    chosen = ["focus", "posterior", "river_drift"]
    panels: list[list[str] | None] = [None, chosen, [], None]
    seen = []
    for number, panel in enumerate(panels):
        assert expect_json(tenant.patch("/project", json={"panel": panel}), 200)["panel"] == panel
        seen.append(open_run(tenant, name=f"run-{number}"))
    evals = [{"metric": "eval", "step": step, "value": min(step, 60 - step)} for step in range(80)]
    observers, verdicts = [], []
    for run in seen:
        path = f"/runs/{run['id']}"
        answer = expect_json(tenant.post(f"{path}/observations", json={"observations": evals}), 200)
        verdicts.append(answer["verdict"])
        calls = expect_json(tenant.get(f"{path}/calls"), 200)["items"]
        observers.append([call["detector"] for call in calls if call["observes"]])
    shipped = ["k_decline", "focus", "river_drift", "divergence", "gao_fit"]
    assert observers == [shipped, ["focus", "river_drift"], [], shipped], "the posterior decides: it observes nothing"
    assert [run["policy"]["version"] for run in seen] == [1, 2, 3, 4]
    assert verdicts[0]["verdict"] == "stop"
    assert verdicts == verdicts[:1] * 4
    assert expect_json(tenant.patch("/project", json={"panel": None}), 200)["panel"] is None
    listed = expect_json(tenant.get("/policies"), 200)["items"]
    versions = {item["version"]: item["document"] for item in listed if item["name"] == "paper"}
    assert list(versions) == [4, 3, 2, 1]
    assert versions[4] == versions[1]
    assert [item["detector"] for item in versions[2]["members"]] == ["k_decline", *chosen]


def test_panel_names_different_detectors_and_is_set_by_admins(service: Service) -> None:
    """An unknown name, one that occurs twice, and more members than a policy may have are refused, as is a key without
    admin; nothing changes."""
    name = uuid.uuid4().hex
    installation = service.open_client(None, "admin")
    created = expect_json(installation.post("/projects", json={"name": name, "panel": ["focus"]}), 201)
    tenant = service.open_client(name)
    twice = ["focus", "divergence", "focus"]
    for wrong, said in ((["loud"], "k_decline"), (twice, "once"), (["default"], "k_decline")):
        problem = str(expect_problem(tenant.patch("/project", json={"panel": wrong}), 422))
        assert "panel" in problem
        assert said in problem
    deciding = [{"detector": "k_decline", "id": f"k_decline-{number}"} for number in range(31)]
    expect_json(tenant.post("/policies", json={"name": "early", "members": deciding}), 201)
    assert "<= 32" in str(expect_problem(tenant.patch("/project", json={"panel": ["focus", "divergence"]}), 422))
    expect_problem(service.open_client(name, "ingest", "read", "report", "operate").patch("/project", json={}), 403)
    assert expect_json(tenant.get("/project"), 200) == created
    listed = expect_json(tenant.get("/policies"), 200)["items"]
    assert [item["version"] for item in listed if item["name"] == "early"] == [3, 2, 1]
    assert [item["version"] for item in listed if item["name"] == "default"] == [2, 1]


def test_durations_and_hours_are_written_as_people_write_them(service: Service) -> None:
    """Settings take durations as texts or numbers, which answers hold, and hours as texts."""
    name = uuid.uuid4().hex
    created = expect_json(service.open_client(None, "admin").post("/projects", json={"name": name}), 201)
    assert created["veto_window_seconds"] == 900.0, "a project that allows stops gives people time to veto them"
    tenant = service.open_client(name)
    hours = "mon-tue 09:00-18:00 Europe/Berlin"
    changes = {"veto_window_seconds": "1h30m", "confirm_seconds": 60, "stop_hours": hours}
    changed = expect_json(tenant.patch("/project", json=changes), 200)
    assert (changed["veto_window_seconds"], changed["confirm_seconds"]) == (5400.0, 60.0)
    assert changed["stop_hours"] == "mon,tue 09:00-18:00 Europe/Berlin"
    assert expect_json(tenant.patch("/project", json={"stop_hours": None}), 200)["stop_hours"] is None
    for name, invalid in (("stop_hours", "mon"), ("stop_hours", 7), ("confirm_seconds", "soon")):
        problem = expect_problem(tenant.patch("/project", json={name: invalid}), 422)
        assert problem["errors"][0]["pointer"] == f"/{name}"


def test_rules_on_metrics_are_set_by_the_api(service: Service) -> None:
    """A project keeps its rules as they are written; one that cannot be read is refused, with examples."""
    name = uuid.uuid4().hex
    expect_json(service.open_client(None, "admin").post("/projects", json={"name": name}), 201)
    tenant = service.open_client(name)
    rules = ["kl > 20", "eval/gsm8k absent_for 2h every 6h"]
    assert expect_json(tenant.patch("/project", json={"rules": rules}), 200)["rules"] == rules
    for wrong in ("kl above 20", 7):
        problem = expect_problem(tenant.patch("/project", json={"rules": ["kl > 20", wrong]}), 422)
        assert problem["errors"][0]["pointer"] == "/rules/1"
    assert expect_json(tenant.get("/project"), 200)["rules"] == rules


def test_pause_ends_by_itself(service: Service) -> None:
    """Of two pauses the one that ends later holds, whichever came first, and the second says that one is there."""
    tenant = service.open_client(service.create_project())
    first = expect_json(tenant.post("/project/pause", json={"until": "4h"}), 200)
    assert not first["already_paused"]
    shorter = expect_json(tenant.post("/project/pause", json={"until": "1h"}), 200)
    assert shorter == first | {"already_paused": True}
    longer = expect_json(tenant.post("/project/pause", json={"until": "2999-01-31T09:00:00Z"}), 200)
    assert (longer["paused_by"], longer["paused_at"]) == ("key test", first["paused_at"])
    assert longer["paused_until"] == "2999-01-31T09:00:00Z"
    assert expect_json(tenant.post("/project/pause", json={}), 200)["paused_until"] is None
    assert expect_json(tenant.post("/project/pause", json={"until": "4h"}), 200)["paused_until"] is None
    for invalid in ("soon", "0s", "2020-01-31T09:00:00Z", "999999999d"):
        assert "a time to come" in expect_problem(tenant.post("/project/pause", json={"until": invalid}), 422)["detail"]


def test_changed_policy_becomes_the_next_version(admin: httpx.Client) -> None:
    """The same policy again keeps its version; runs use the latest or a given version; invalid policies are refused."""
    body = BODIES["POST", "/policies"]
    assert expect_json(admin.post("/policies", json=body), 201)["version"] == 1
    assert expect_json(admin.post("/policies", json=body), 201)["version"] == 1
    assert expect_json(admin.post("/policies", json=body | {"min_evals": 11}), 201)["version"] == 2
    listed = expect_json(admin.get("/policies"), 200)["items"]
    assert [item["version"] for item in listed if item["name"] == "patient"] == [2, 1]
    assert {"paper", "default", "patient"} <= {
        item["name"] for item in expect_json(admin.get("/policies"), 200)["items"]
    }
    assert open_run(admin, policy="patient@1")["policy"] == {"name": "patient", "version": 1}
    assert open_run(admin, policy="patient")["policy"] == {"name": "patient", "version": 2}
    assert "nosuch" in expect_problem(admin.post("/runs", json={"name": "x", "policy": "nosuch"}), 422)["detail"]
    detail = expect_problem(admin.post("/policies", json=body | {"members": []}), 422)["detail"]
    assert "members" in detail
    out_of_reach = body | {"members": [{"detector": "posterior", "stop_at": 1.7}]}
    detail = expect_problem(admin.post("/policies", json=out_of_reach), 422)["detail"]
    assert "stop_at is 1.7, but the evidence of posterior is from 0 to 1" in detail


def test_key_works_until_revoked_and_is_shown_once(service: Service, admin: httpx.Client) -> None:
    """The secret is in the response of the creation and in no list."""
    key = expect_json(admin.post("/keys", json={"name": "trainers", "scopes": ["read", "ingest", "read"]}), 201)
    assert key["scopes"] == ["ingest", "read"]
    trainer = service.open_client_with_key(key["key"])
    expect_json(trainer.get("/runs"), 200)
    items = expect_json(admin.get("/keys"), 200)["items"]
    assert key["id"] in {item["id"] for item in items}
    assert all("key" not in item for item in items)
    first, second = (expect_json(admin.get("/keys", params=query), 200) for query in ({"limit": 1}, {"limit": 2}))
    assert [item["id"] for item in second["items"]] == [item["id"] for item in items[:2]]
    rest = expect_json(admin.get("/keys", params={"cursor": first["next_cursor"]}), 200)
    assert [item["id"] for item in rest["items"]] == [item["id"] for item in items[1:]]
    assert rest["next_cursor"] is None
    assert admin.delete(f"/keys/{key['id']}").status_code == 204
    expect_problem(trainer.get("/runs"), 401)
    expect_problem(admin.delete(f"/keys/{key['id']}"), 404)


def test_endpoint_secret_is_shown_on_creation_and_rotation_only(admin: httpx.Client) -> None:
    """Lists have no secret; deleting the endpoint cancels its deliveries."""
    resources = create_resources(admin)
    path = resources.path("/endpoints/{endpoint_id}")
    rotated = expect_json(admin.post(f"{path}/rotate-secret"), 200)
    assert rotated["secret"].startswith("whsec_")
    assert rotated["previous_secret_until"] is not None
    assert "secret" not in expect_json(admin.get("/endpoints"), 200)["items"][0]
    changed = expect_json(admin.patch(path, json={"enabled": False, "event_types": ["run.stopped"]}), 200)
    assert (changed["enabled"], changed["event_types"]) == (False, ["run.stopped"])
    waiting = expect_json(
        admin.get("/deliveries", params={"endpoint_id": resources.ids["endpoint_id"], "state": "waiting"}), 200
    )
    assert "run.stop_requested" in {item["event_type"] for item in waiting["items"]}
    assert admin.delete(path).status_code == 204
    expect_problem(admin.patch(path, json={}), 404)
    assert expect_json(admin.get("/deliveries"), 200)["items"][0]["state"] == "cancelled"


def test_url_has_one_endpoint(admin: httpx.Client) -> None:
    """A second endpoint with a URL is refused and the first one named: its receiver would lack the other's secret."""
    body = {"url": "https://receiver.example/", "event_types": ["run.stop_requested"]}
    first = expect_json(admin.post("/endpoints", json=body), 201)
    again = body | {"event_types": ["run.park_requested"]}
    assert first["id"] in expect_problem(admin.post("/endpoints", json=again), 409)["detail"]
    assert admin.delete(f"/endpoints/{first['id']}").status_code == 204
    expect_json(admin.post("/endpoints", json=again), 201)


def test_change_of_url_to_that_of_another_endpoint_is_refused(admin: httpx.Client) -> None:
    """The endpoint that has the URL is named; an endpoint may be given its own URL again."""
    urls = ["https://receiver.example/a", "https://receiver.example/b"]
    bodies = [{"url": url, "event_types": ["run.stop_requested"]} for url in urls]
    first, second = (expect_json(admin.post("/endpoints", json=body), 201)["id"] for body in bodies)
    assert first in expect_problem(admin.patch(f"/endpoints/{second}", json={"url": urls[0]}), 409)["detail"]
    assert [item["url"] for item in expect_json(admin.get("/endpoints"), 200)["items"]] == urls
    expect_json(admin.patch(f"/endpoints/{second}", json={"url": urls[1]}), 200)


def test_policies_are_listed_page_by_page(admin: httpx.Client) -> None:
    """The pages are the whole list, which has stored and shipped versions, in order; a malformed cursor is refused."""
    body = BODIES["POST", "/policies"]
    for description in ("one", "two", "three"):
        expect_json(admin.post("/policies", json=body | {"description": description}), 201)
    whole = expect_json(admin.get("/policies", params={"limit": 200}), 200)
    assert whole["next_cursor"] is None
    assert len(expect_json(admin.get("/policies", params={"limit": 2}), 200)["items"]) == 2
    assert list_pages(admin, "/policies", limit=2) == whole["items"]
    expect_problem(admin.get("/policies", params={"cursor": "early"}), 422)
