"""Requests for an evaluation over HTTP: who may list and answer them, and what an answer changes."""

from __future__ import annotations

import httpx

from tests.service.web.api.api_calls import create_eval_request, expect_json, expect_problem
from tests.service.web.api.conftest import Service


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
