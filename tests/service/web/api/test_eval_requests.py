"""Requests to evaluate now by HTTP: who may list and answer them, and what an answer leads to."""

from __future__ import annotations

import httpx

from tests.service.web.api.api_calls import create_eval_request, expect_json, expect_problem
from tests.service.web.api.conftest import Service


def test_a_request_is_listed_answered_and_gone(service: Service, admin: httpx.Client) -> None:
    """Trainers and receivers see it, with the checkpoint of now once it is there; the first answer stands."""
    run_id, request_id = create_eval_request(admin)
    project = expect_json(admin.get("/project"), 200)["name"]
    trainer = service.open_client(project, "ingest")
    receiver = service.open_client(project, "report")
    reader = service.open_client(project, "read")
    (asked,) = expect_json(receiver.get("/eval-requests", params={"run_id": run_id}), 200)["items"]
    assert (asked["id"], asked["number"], asked["multiplier"]) == (request_id, 1, 4)
    assert asked["best_checkpoint"] == {"step": 30, "uri": "file:///30"}
    assert asked["current_checkpoint"] is None
    place = {"step": asked["step"] + 1, "uri": "file:///now"}
    expect_json(trainer.post(f"/runs/{run_id}/checkpoints", json=place), 201)
    assert expect_json(reader.get("/eval-requests"), 200)["items"][0]["current_checkpoint"] == place

    path, answer = f"/runs/{run_id}/eval-requests/{request_id}/answer", {"difference": -2.0, "stderr": 0.5}
    expect_problem(reader.post(path, json=answer), 403)
    told = expect_json(receiver.post(path, json=answer), 200)
    assert told["request"]["probability_after"] > told["request"]["probability"]
    assert expect_json(trainer.post(path, json=answer), 200)["request"] == told["request"]
    assert (
        "the first answer stands"
        in expect_problem(trainer.post(path, json={"difference": 1, "stderr": 0}), 409)["detail"]
    )
    assert expect_json(reader.get("/eval-requests"), 200)["items"] == []
    assert expect_json(reader.get(f"/runs/{run_id}/eval-requests"), 200)["items"] == [told["request"]]


def test_what_is_no_answer_is_refused(service: Service, admin: httpx.Client) -> None:
    """An answer without a standard error, of no request, or of another project's run changes nothing."""
    run_id, request_id = create_eval_request(admin)
    path = f"/runs/{run_id}/eval-requests/{request_id}/answer"
    expect_problem(admin.post(path, json={"difference": -2.0}), 422)
    expect_problem(admin.post(path, json={"difference": -2.0, "stderr": -1}), 422)
    expect_problem(
        admin.post(f"/runs/{run_id}/eval-requests/{run_id}/answer", json={"difference": 0, "stderr": 1}), 404
    )
    stranger = service.open_client(service.create_project())
    expect_problem(stranger.post(path, json={"difference": 0, "stderr": 1}), 404)
    assert expect_json(stranger.get("/eval-requests"), 200)["items"] == []
    assert expect_json(admin.get(f"/runs/{run_id}/eval-requests"), 200)["items"][0]["answered_at"] is None
