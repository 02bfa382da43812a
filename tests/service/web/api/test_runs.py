"""Runs and their observations over HTTP: changes of what their eval measures, and requests to evaluate."""

from __future__ import annotations

import uuid
from typing import Any

import httpx

from tests.service.web.api.api_calls import (
    FALLING,
    create_eval_request,
    expect_json,
    expect_problem,
    list_pages,
    open_run,
)
from tests.service.web.api.conftest import Service


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
    assert [(item["step"], item["value"]) for item in items] == [(0, 0.5), (1, 0.9), (2, 1.0)]


def test_heartbeat_renews_the_health_of_a_run(admin: httpx.Client) -> None:
    """A heartbeat counts as a report; a run that has ended has no health."""
    run = open_run(admin)
    assert run["health"]["state"] == "alive"
    answered = expect_json(admin.post(f"/runs/{run['id']}/heartbeat"), 200)
    assert answered["health"]["last_report_at"] > run["health"]["last_report_at"]
    expect_json(admin.post(f"/runs/{run['id']}/finish", json={"status": "completed"}), 200)
    assert expect_json(admin.post(f"/runs/{run['id']}/heartbeat"), 200)["health"] is None


VERSION = {"gold": {"role": "eval", "version": "v1"}}


def post_evals(admin: httpx.Client, path: str, *values: float, start: int = 0) -> dict[str, Any]:
    points = [{"metric": "gold", "step": step, "value": value} for step, value in enumerate(values, start)]
    return expect_json(admin.post(f"{path}/observations", json={"observations": points}), 200)


def list_changes(run: dict[str, Any]) -> list[tuple[int, str | None, str]]:
    return [(change["step"], change["version"], change["reason"]) for change in run["eval_changes"]]


def test_evals_before_and_after_a_change_are_not_compared(admin: httpx.Client) -> None:
    """Evals after a change are compared with each other only, whether the change is posted before or after them."""
    falling_values = (0.5, 0.9, 0.8, 0.7, 0.6)
    early, late = (open_run(admin, name=name, metrics=VERSION, mode="shadow") for name in ("early", "late"))
    for run in (early, late):
        path = f"/runs/{run['id']}"
        expect_json(admin.post(f"{path}/checkpoints", json={"step": 1, "uri": "file:///1"}), 201)
        change = {"step": 3, "reason": "a stricter grader", "version": "v2"}
        if run is early:
            expect_json(admin.post(f"{path}/eval-changes", json=change), 200)
        post_evals(admin, path, *falling_values)
        answer = expect_json(admin.post(f"{path}/eval-changes", json=change), 200)
        assert answer["verdict"]["verdict"] == "continue"
        assert list_changes(answer) == [(0, "v1", "version v1"), (3, "v2", "a stricter grader")]
        assert (answer["best_checkpoint"]["step"], answer["best_is_outdated"]) == (1, True)
        assert answer["raw_maximum"] == {"step": 3, "score": 0.7}
        expect_json(admin.post(f"{path}/checkpoints", json={"step": 4, "uri": "file:///4"}), 201)
        answer = expect_json(admin.get(path), 200)
        assert (answer["best_checkpoint"]["step"], answer["best_is_outdated"]) == (4, False)
        assert post_evals(admin, path, 0.5, 0.4, start=5)["verdict"]["verdict"] == "stop"


def test_reopening_with_another_eval_version_records_a_change(admin: httpx.Client) -> None:
    """A run that is opened again with another version of its eval has an eval change from its next step on."""
    run = open_run(admin, metrics=VERSION)
    path, name = f"/runs/{run['id']}", run["name"]
    post_evals(admin, path, 0.5, 0.9)
    assert list_changes(expect_json(admin.post("/runs", json={"name": name, "metrics": VERSION}), 200)) == [
        (0, "v1", "version v1")
    ]
    version_2 = {"gold": {"role": "eval", "version": "v2"}}
    reopened = expect_json(admin.post("/runs", json={"name": name, "metrics": version_2, "resume": "must"}), 200)
    assert list_changes(reopened) == [(0, "v1", "version v1"), (2, "v2", "version v2")]
    resumed = expect_json(admin.post(f"{path}/resume", json={"step": 0}), 200)
    assert list_changes(resumed) == [(0, "v1", "version v1"), (1, "v2", "version v2")]


def test_invalid_and_excess_eval_changes_are_refused(admin: httpx.Client) -> None:
    """Only the eval metric may have a version, a change needs a reason, and a run may have 100 of them."""
    answer = admin.post("/runs", json={"name": "r", "metrics": {"kl": {"role": "kl", "version": "2"}}})
    assert "only the metric with the role eval has a version" in str(expect_problem(answer, 422))
    path = f"/runs/{open_run(admin)['id']}/eval-changes"
    expect_problem(admin.post(path, json={"step": 1, "reason": ""}), 422)
    expect_problem(admin.post(path, json={"step": -1, "reason": "why"}), 422)
    for step in range(100):
        expect_json(admin.post(path, json={"step": step, "reason": "why"}), 200)
    assert (
        "has changed 100 times" in expect_problem(admin.post(path, json={"step": 100, "reason": "why"}), 409)["detail"]
    )
    expect_json(admin.post(path, json={"step": 99, "reason": "again"}), 200)


def test_invalid_answers_are_refused(admin: httpx.Client) -> None:
    """An answer without a standard error, or to an unknown request, changes nothing."""
    run_id, request_id = create_eval_request(admin)
    path = f"/runs/{run_id}/eval-requests/{request_id}/answer"
    expect_problem(admin.post(path, json={"difference": -2.0}), 422)
    expect_problem(admin.post(path, json={"difference": -2.0, "stderr": -1}), 422)
    expect_problem(
        admin.post(f"/runs/{run_id}/eval-requests/{run_id}/answer", json={"difference": 0, "stderr": 1}), 404
    )
    assert expect_json(admin.get(f"/runs/{run_id}/eval-requests"), 200)["items"][0]["answered_at"] is None


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


def test_answered_request_is_no_longer_listed_as_open(service: Service, admin: httpx.Client) -> None:
    """A request shows the current checkpoint once it exists, and only the first answer counts."""
    run_id, request_id = create_eval_request(admin)
    project = expect_json(admin.get("/project"), 200)["name"]
    trainer = service.open_client(project, "ingest")
    receiver = service.open_client(project, "report")
    reader = service.open_client(project, "read")
    (eval_request,) = expect_json(receiver.get("/eval-requests", params={"run_id": run_id}), 200)["items"]
    assert (eval_request["id"], eval_request["number"], eval_request["multiplier"]) == (request_id, 1, 4)
    assert eval_request["best_checkpoint"] == {"step": 30, "uri": "file:///30"}
    assert eval_request["current_checkpoint"] is None
    checkpoint = {"step": eval_request["step"] + 1, "uri": "file:///now"}
    expect_json(trainer.post(f"/runs/{run_id}/checkpoints", json=checkpoint), 201)
    assert expect_json(reader.get("/eval-requests"), 200)["items"][0]["current_checkpoint"] == checkpoint

    path, answer = f"/runs/{run_id}/eval-requests/{request_id}/answer", {"difference": -2.0, "stderr": 0.5}
    expect_problem(reader.post(path, json=answer), 403)
    answered = expect_json(receiver.post(path, json=answer), 200)
    assert answered["request"]["probability_after"] > answered["request"]["probability"]
    assert expect_json(trainer.post(path, json=answer), 200)["request"] == answered["request"]
    assert (
        "the first answer stands"
        in expect_problem(trainer.post(path, json={"difference": 1, "stderr": 0}), 409)["detail"]
    )
    assert expect_json(reader.get("/eval-requests"), 200)["items"] == []
    assert expect_json(reader.get(f"/runs/{run_id}/eval-requests"), 200)["items"] == [answered["request"]]
