"""Requests to evaluate now by HTTP: who may list and answer them, and what an answer leads to."""

from __future__ import annotations

import httpx

from tests.service.web.api.conftest import Service
from tests.service.web.api.speaking import populate_request, problem, said


def test_a_request_is_listed_answered_and_gone(service: Service, admin: httpx.Client) -> None:
    """Trainers and receivers see it, with the checkpoint of now once it is there; the first answer stands."""
    run_id, request_id = populate_request(admin)
    project = said(admin.get("/project"), 200)["name"]
    trainer = service.client(service.key(project, "ingest"))
    receiver = service.client(service.key(project, "report"))
    reader = service.client(service.key(project, "read"))
    (asked,) = said(receiver.get("/eval-requests", params={"run_id": run_id}), 200)["items"]
    assert (asked["id"], asked["number"], asked["multiplier"]) == (request_id, 1, 4)
    assert asked["best_checkpoint"] == {"step": 30, "uri": "file:///30"}
    assert asked["current_checkpoint"] is None
    place = {"step": asked["step"] + 1, "uri": "file:///now"}
    said(trainer.post(f"/runs/{run_id}/checkpoints", json=place), 201)
    assert said(reader.get("/eval-requests"), 200)["items"][0]["current_checkpoint"] == place

    path, answer = f"/runs/{run_id}/eval-requests/{request_id}/answer", {"difference": -2.0, "stderr": 0.5}
    problem(reader.post(path, json=answer), 403)
    told = said(receiver.post(path, json=answer), 200)
    assert told["request"]["probability_after"] > told["request"]["probability"]
    assert said(trainer.post(path, json=answer), 200)["request"] == told["request"]
    assert "the first answer stands" in problem(trainer.post(path, json={"difference": 1, "stderr": 0}), 409)["detail"]
    assert said(reader.get("/eval-requests"), 200)["items"] == []
    assert said(reader.get(f"/runs/{run_id}/eval-requests"), 200)["items"] == [told["request"]]


def test_what_is_no_answer_is_refused(service: Service, admin: httpx.Client) -> None:
    """An answer without a standard error, of no request, or of another project's run changes nothing."""
    run_id, request_id = populate_request(admin)
    path = f"/runs/{run_id}/eval-requests/{request_id}/answer"
    problem(admin.post(path, json={"difference": -2.0}), 422)
    problem(admin.post(path, json={"difference": -2.0, "stderr": -1}), 422)
    problem(admin.post(f"/runs/{run_id}/eval-requests/{run_id}/answer", json={"difference": 0, "stderr": 1}), 404)
    stranger = service.client(service.key(service.project()))
    problem(stranger.post(path, json={"difference": 0, "stderr": 1}), 404)
    assert said(stranger.get("/eval-requests"), 200)["items"] == []
    assert said(admin.get(f"/runs/{run_id}/eval-requests"), 200)["items"][0]["answered_at"] is None
