"""Outcomes and precision over HTTP: labels, the figures, the cases behind them, and the rollout stage they earn."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.evaluation import rollout_stage
from evalstop_service.store import runs
from evalstop_service.store.runs import Run

from tests.service.case_rows import insert_cases
from tests.service.web.api.api_calls import FALLING, expect_json, expect_problem, open_run
from tests.service.web.api.conftest import Service


def open_stored_run(service: Service, admin: httpx.Client, policy: str) -> Run:
    """The stored row of a new run with this policy."""
    run_id = UUID(open_run(admin, policy=policy)["id"])
    project_id = UUID(expect_json(admin.get("/project"), 200)["id"])
    with service.database.reading() as tx:
        run = runs.find_run(tx, project_id, run_id)
    assert run is not None
    return run


def test_figures_have_intervals_and_cases_are_paged(service: Service) -> None:
    """Each group has its figures with intervals; the cases behind them are listed page by page."""
    project = service.create_project()
    admin = service.open_client(project)
    run = open_stored_run(service, admin, "paper")
    insert_cases(service.database, run, 9, job_kind="dpo")
    insert_cases(service.database, run, 3, outcome="wrong", run_outcome="healthy")
    insert_cases(service.database, run, 20, treatment=None, run_outcome="healthy")
    (total,) = expect_json(admin.get("/precision"), 200)["groups"]
    assert total["precision"]["value"] == 0.75
    assert total["precision"]["low"] < 0.75 < total["precision"]["high"]
    assert total["recall"]["value"] == 1
    assert total["false_stops_per_healthy_run"]["value"] == pytest.approx(3 / 23)
    groups = expect_json(admin.get("/precision", params={"group_by": ["policy", "week"], "job_kind": "dpo"}), 200)[
        "groups"
    ]
    assert [(group["policy"]["name"], group["begins"], group["counts"]["observed"]["right"]) for group in groups] == [
        ("paper", "2025-12-29", 9)
    ]
    of_kind = {"job_kind": "dpo", "treatment": "observed", "outcome": "right"}
    cases = expect_json(admin.get("/cases", params=of_kind), 200)
    assert len(cases["items"]) == 9
    assert {case["run_id"] for case in cases["items"]} == {str(run.id)}
    first = expect_json(admin.get("/cases", params={"limit": 30}), 200)
    rest = expect_json(admin.get("/cases", params={"limit": 30, "cursor": first["next_cursor"]}), 200)
    assert (len(first["items"]), len(rest["items"]), rest["next_cursor"]) == (30, 2, None)


def test_rollout_stage_is_set_changed_and_removed(admin: httpx.Client) -> None:
    """The stage starts in shadow and stays there when its terms change; without one the mode of the run counts."""
    path = "/policies/early/rollout-stage"
    assert "mode of its runs" in expect_problem(admin.get(path), 404)["detail"]
    stage = expect_json(admin.put(path, json={"required_precision": 0.9}), 200)
    assert (stage["stage"], stage["version"], stage["canary_share"], stage["numbers"]) == (
        "shadow",
        1,
        0.2,
        {"precision": None, "precision_since": None},
    )
    assert stage["cases"] == {"counted": 0, "not_counted": 0}
    changed = expect_json(admin.put(path, json={"required_precision": 0.8, "canary_share": 0.5}), 200)
    assert changed == stage | {"required_precision": 0.8, "canary_share": 0.5} == expect_json(admin.get(path), 200)
    assert [admin.delete(path).status_code for _ in range(2)] == [204, 204]
    expect_problem(admin.get(path), 404)
    expect_problem(admin.put("/policies/nosuch/rollout-stage", json={"required_precision": 0.9}), 404)
    for precision in (0.4, 1.0, "NaN"):
        expect_problem(admin.put(path, json={"required_precision": precision}), 422)


def test_promotion_needs_a_confirmation_and_demotion_a_reason(service: Service, admin: httpx.Client) -> None:
    """After a demotion the cases that earned the earlier promotion no longer count."""
    path = "/policies/early/rollout-stage"
    demotion = {"reason": "the eval set was replaced"}
    expect_problem(admin.post("/policies/nosuch/rollout-stage/demote", json=demotion), 404)
    expect_problem(admin.post(f"{path}/demote", json=demotion), 409)
    expect_json(admin.put(path, json={"required_precision": 0.8}), 200)
    assert "above shadow" in expect_problem(admin.post(f"{path}/demote", json=demotion), 409)["detail"]
    project_id = UUID(expect_json(admin.get("/project"), 200)["id"])
    run = open_stored_run(service, admin, "early")
    insert_cases(service.database, run, 40, utc_now())
    rollout_stage.review_rollout_stage(service.database, project_id, "early", utc_now())
    (proposal,) = expect_json(admin.get("/proposals", params={"state": "open"}), 200)["items"]
    assert expect_json(admin.post(f"/proposals/{proposal['id']}/confirm"), 200)["state"] == "confirmed"
    assert expect_json(admin.get(path), 200)["stage"] == "canary"
    expect_problem(admin.post(f"{path}/demote", json={"reason": ""}), 422)
    demoted = expect_json(admin.post(f"{path}/demote", json=demotion), 200)
    assert (demoted["stage"], demoted["cases"]["counted"]) == ("shadow", 40)
    assert expect_json(admin.get(path), 200) == demoted
    entry = expect_json(admin.get("/audit"), 200)["items"][0]
    assert (entry["action"], entry["actor"], entry["subject"]) == ("rollout_stage.moved", "key test", "policy early")
    assert (entry["details"]["from"], entry["details"]["to"]) == ("canary", "shadow")
    assert entry["details"]["reason"] == demotion["reason"]
    rollout_stage.review_rollout_stage(service.database, project_id, "early", utc_now())
    assert expect_json(admin.get("/proposals", params={"state": "open"}), 200)["items"] == []


def test_easing_a_rollout_stage_is_proposed_where_two_people_decide(admin: httpx.Client) -> None:
    """The answer is 202 with the proposal, and the terms stay; stricter terms are set and answered with the stage."""
    expect_json(admin.patch("/project", json={"second_person": True}), 200)
    terms = {"required_precision": 0.9, "canary_share": 0.2}
    path = "/policies/default/rollout-stage"
    assert expect_json(admin.put(path, json=terms), 200)["stage"] == "shadow"
    proposal = expect_json(admin.put(path, json=terms | {"canary_share": 0.5}), 202)
    assert (proposal["kind"], proposal["state"]) == ("change_stage", "open")
    assert expect_json(admin.get(path), 200)["canary_share"] == 0.2
    assert expect_json(admin.put(path, json=terms | {"canary_share": 0.1}), 200)["canary_share"] == 0.1
    expect_problem(admin.put("/policies/nosuch/rollout-stage", json=terms), 404)


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
