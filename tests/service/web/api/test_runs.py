"""Runs and their observations over HTTP."""

from __future__ import annotations

import uuid

import httpx

from tests.service.web.api.api_calls import FALLING, expect_json, expect_problem, list_pages, open_run


def test_run_is_opened_once_by_name_and_found(admin: httpx.Client) -> None:
    """A second opening returns the same run; lists find it by name and status; a run ends once."""
    run = open_run(admin, labels={"job": "1"}, total_steps=10)
    assert run["status"] == "running"
    assert run["policy"] == {"name": "paper", "version": 1}
    assert run["verdict"]["verdict"] == "continue"
    assert run["metrics"]["eval"] == {"role": "eval", "direction": "maximize"}
    reopened = expect_json(admin.post("/runs", json={"name": run["name"]}), 200)
    assert reopened == run
    assert expect_json(admin.get(f"/runs/{run['id']}"), 200) == run
    assert expect_json(admin.get("/runs", params={"name": run["name"][3:9], "status": "running"}), 200)["items"] == [
        run
    ]
    ended = expect_json(admin.post(f"/runs/{run['id']}/finish", json={"status": "completed"}), 200)
    assert (ended["status"], ended["ended_at"] is None) == ("completed", False)
    assert expect_json(admin.post(f"/runs/{run['id']}/finish", json={"status": "failed"}), 200) == ended
    assert expect_json(admin.get("/runs", params={"status": "running"}), 200)["items"] == []


def test_params_are_fixed_when_the_run_is_opened(admin: httpx.Client) -> None:
    """A later opening changes no parameter; one that names the planned length sets `total_steps`."""
    run = open_run(admin, params={"lr": "1e-6", "max_steps": "500"})
    assert (run["params"], run["total_steps"]) == ({"lr": "1e-6", "max_steps": "500"}, 500)
    reopened = expect_json(admin.post("/runs", json={"name": run["name"], "params": {"lr": "1"}}), 200)
    assert reopened["params"] == expect_json(admin.get(f"/runs/{run['id']}"), 200)["params"] == run["params"]


def test_default_direction_of_each_role_is_shown(admin: httpx.Client) -> None:
    """A metric without a direction gets the default of its role; an eval called a loss is minimized."""
    roles = {"a/gold": "eval", "val_loss": "eval", "b": "kl", "c": "loss"}
    run = open_run(admin, metrics={metric: {"role": role} for metric, role in roles.items()})
    assert {name: role["direction"] for name, role in run["metrics"].items()} == {
        "a/gold": "maximize",
        "val_loss": "minimize",
        "b": "minimize",
        "c": "minimize",
    }


def test_non_finite_values_are_returned_as_strings(admin: httpx.Client) -> None:
    """NaN and the infinities are posted and returned as strings, in lists and conflicts."""
    run = open_run(admin)
    path = f"/runs/{run['id']}/observations"
    values = ["NaN", "Infinity", "-Infinity"]
    points = [{"metric": "eval", "step": step, "value": value} for step, value in enumerate(values)]
    assert expect_json(admin.post(path, json={"observations": points}), 200)["accepted"] == 3
    assert expect_json(admin.post(path, json={"observations": points}), 200)["duplicates"] == 3
    conflict = expect_json(admin.post(path, json={"observations": [points[0] | {"value": 1}]}), 200)["conflicts"]
    assert conflict == [{"metric": "eval", "step": 0, "stored_value": "NaN", "sent_value": 1.0}]
    conflict = expect_json(admin.post(path, json={"observations": [points[1] | {"value": "NaN"}]}), 200)["conflicts"]
    assert conflict == [{"metric": "eval", "step": 1, "stored_value": "Infinity", "sent_value": "NaN"}]
    items = expect_json(admin.get(path, params={"metric": "eval"}), 200)["items"]
    assert [item["value"] for item in items] == values


def test_resumed_run_lists_superseded_observations(admin: httpx.Client) -> None:
    """Pages show the observations of the earlier attempt as superseded after the resume step."""
    run = open_run(admin)
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
    items = list_pages(admin, f"{path}/observations", metric="eval", limit=2)
    assert [(item["step"], item["value"], item["superseded_by"]) for item in items] == [
        (0, 0.5, None),
        (1, 0.9, None),
        (2, 1.0, None),
        (2, 0.8, 2),
        (3, 0.7, 2),
        (4, 0.6, 2),
    ]


def test_heartbeat_renews_the_health_of_a_run(admin: httpx.Client) -> None:
    """A heartbeat counts as a report; a run that has ended has no health."""
    run = open_run(admin)
    assert run["health"]["state"] == "alive"
    answered = expect_json(admin.post(f"/runs/{run['id']}/heartbeat"), 200)
    assert answered["health"]["last_report_at"] > run["health"]["last_report_at"]
    expect_json(admin.post(f"/runs/{run['id']}/finish", json={"status": "completed"}), 200)
    assert expect_json(admin.post(f"/runs/{run['id']}/heartbeat"), 200)["health"] is None


def test_job_and_opening_distinguish_runs_of_one_name(admin: httpx.Client) -> None:
    """Another job gets a new run, a repeated request its own run, and `resume` the latest run of the job."""
    name, opening = uuid.uuid4().hex, str(uuid.uuid4())
    job_run = {"name": name, "job": "slurm:alpha:1"}
    first = expect_json(admin.post("/runs", json=job_run | {"opening": opening}), 201)
    assert expect_json(admin.post("/runs", json=job_run), 200)["id"] == first["id"]
    second = expect_json(admin.post("/runs", json={"name": name, "job": "slurm:alpha:2"}), 201)
    assert (first["name"], second["name"]) == (name, f"{name}-2")
    finished = expect_json(admin.post(f"/runs/{first['id']}/finish", json={"status": "completed"}), 200)
    assert expect_json(admin.post("/runs", json=job_run | {"opening": opening}), 200) == finished
    point = {"metric": "eval", "step": 1, "value": 0.5}
    receipt = expect_json(admin.post(f"/runs/{first['id']}/observations", json={"observations": [point]}), 200)
    assert receipt["status"] == "completed"
    refused = expect_problem(admin.post("/runs", json=job_run | {"resume": "must", "mode": "shadow"}), 409)
    assert "mode enforce, not shadow" in refused["detail"]
    resumed = expect_json(admin.post("/runs", json=job_run | {"resume": "must"}), 200)
    assert (resumed["id"], resumed["status"]) == (first["id"], "running")
    expect_problem(admin.post("/runs", json={"name": uuid.uuid4().hex, "resume": "must"}), 404)
    expect_problem(admin.post("/runs", json=job_run | {"resume": "never"}), 422)
