"""Outcomes over HTTP: derived for held-out decisions, or posted for any run."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.service.web.api.api_calls import FALLING, expect_json, expect_problem, open_run
from tests.service.web.api.conftest import Service

Points = list[dict[str, Any]]


@pytest.fixture
def admin(service: Service) -> httpx.Client:
    """A client of a project that holds out every stop."""
    client = service.open_client(service.create_project())
    assert expect_json(client.patch("/project", json={"held_out_share": 1}), 200)["held_out_share"] == 1
    return client


def post_run(client: httpx.Client, *posts: Points, **terms: Any) -> str:
    """The id of a new run with these posts of observations."""
    run_id: str = open_run(client, **terms)["id"]
    for points in posts:
        expect_json(client.post(f"/runs/{run_id}/observations", json={"observations": points}), 200)
    return run_id


def build_evals(*values: float, start: int) -> Points:
    return [{"metric": "eval", "step": step, "value": value} for step, value in enumerate(values, start)]


def test_held_out_decision_gets_an_outcome_at_the_run_end(admin: httpx.Client) -> None:
    """Later evals decide the outcome, and a posted outcome replaces the derived one in the case."""
    run_id = post_run(admin, FALLING, labels={"gpus": "8"})
    run = expect_json(admin.get(f"/runs/{run_id}"), 200)
    decision = run["decision"]
    assert (decision["state"], run["should_stop"]) == ("held_out", False)
    assert decision["history"][0]["details"]["held_out_share"] == 1
    assert expect_json(admin.get("/deliveries"), 200)["items"] == []
    expect_problem(admin.post(f"/decisions/{decision['id']}/undo", json={"reason": "no"}), 409)
    expect_json(
        admin.post(f"/runs/{run_id}/observations", json={"observations": build_evals(0.5, 0.4, 0.3, start=5)}), 200
    )
    expect_json(admin.post(f"/runs/{run_id}/finish", json={"status": "completed"}), 200)

    outcomes = expect_json(admin.get(f"/runs/{run_id}/outcomes"), 200)
    (outcome,) = outcomes["items"]
    assert (outcome["outcome"], outcome["derived"], outcome["actor"]) == ("right", True, "evalstop")
    assert outcome["assessment"]["run_outcome"] == "turned"
    case = outcomes["case"]
    assert (case["run_outcome"], case["treatment"], case["observed_probability"]) == ("turned", "observed", 1)
    assert (case["detectors"], case["stated_risk"], case["gpu_hours_lost"]) == (["k_decline"], None, 0)
    assert expect_json(admin.get(f"/runs/{run_id}"), 200)["decision"]["outcome"] == outcome

    posted_outcome = {"outcome": "wrong", "note": "the eval set was replaced"}
    expect_json(admin.post(f"/decisions/{decision['id']}/outcome", json=posted_outcome), 200)
    outcomes = expect_json(admin.get(f"/runs/{run_id}/outcomes"), 200)
    assert [item["actor"] for item in outcomes["items"]] == ["evalstop", "key test"]
    assert (outcomes["case"]["run_outcome"], outcomes["case"]["derived"], outcomes["case"]["outcome"]) == (
        "healthy",
        False,
        "wrong",
    )


def test_outcome_is_posted_for_a_run_without_a_decision(admin: httpx.Client) -> None:
    """The outcome says whether a turn was missed; a case exists once the run has ended."""
    run_id = post_run(admin, build_evals(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, start=0))
    outcomes = expect_json(admin.post(f"/runs/{run_id}/outcome", json={"outcome": "unknown"}), 200)
    assert (len(outcomes["items"]), outcomes["case"]) == (1, None)
    expect_json(admin.post(f"/runs/{run_id}/finish", json={"status": "completed"}), 200)
    outcomes = expect_json(admin.get(f"/runs/{run_id}/outcomes"), 200)
    assert (outcomes["case"]["run_outcome"], outcomes["case"]["treatment"]) == ("undecided", None)
    outcomes = expect_json(admin.post(f"/runs/{run_id}/outcome", json={"outcome": "wrong", "turn_step": 3}), 200)
    assert (outcomes["case"]["run_outcome"], outcomes["case"]["turn_step"], len(outcomes["items"])) == ("turned", 3, 2)
    assert expect_json(admin.get(f"/runs/{run_id}/outcomes", params={"attempt": 2}), 200)["items"] == []


def test_contradictory_outcome_is_refused(admin: httpx.Client) -> None:
    """A right stop is at or after the turn, and a run without a stop that turned cannot be `right`."""
    flagged = post_run(admin, FALLING)
    detail = expect_problem(admin.post(f"/runs/{flagged}/outcome", json={"outcome": "right", "turn_step": 5}), 422)[
        "detail"
    ]
    assert "decided at step 4, before 5" in detail
    healthy = post_run(admin, build_evals(0.1, start=0))
    outcome = {"outcome": "right", "turn_step": 0}
    assert "label it wrong" in expect_problem(admin.post(f"/runs/{healthy}/outcome", json=outcome), 422)["detail"]


@pytest.mark.parametrize("invalid", [{"held_out_share": -0.1}, {"held_out_share": 1.1}])
def test_invalid_outcome_settings_are_refused(admin: httpx.Client, invalid: dict[str, Any]) -> None:
    """A share is from 0 to 1."""
    assert next(iter(invalid)) in str(expect_problem(admin.patch("/project", json=invalid), 422))


def test_new_project_holds_out_a_tenth_by_default(service: Service) -> None:
    """Without other settings the share is 0.1."""
    installation_admin = service.open_client(None, "admin")
    project = expect_json(installation_admin.post("/projects", json={"name": "holds out"}), 201)
    assert project["held_out_share"] == 0.1
    assert "seed" not in project
