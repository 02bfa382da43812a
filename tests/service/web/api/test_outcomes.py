"""What turned out to be true, by HTTP: of what was held out, of what nobody flagged, and who said so."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.service.web.api.api_calls import FALLING, expect_json, expect_problem
from tests.service.web.api.conftest import Service

Points = list[dict[str, Any]]


@pytest.fixture
def admin(service: Service) -> httpx.Client:
    """A key to a project that holds all of its stops out."""
    client = service.open_client(service.create_project())
    terms = {"held_out_share": 1, "price_per_gpu_hour": 2.5, "currency": "EUR"}
    changed = expect_json(client.patch("/project", json=terms), 200)
    assert {name: changed[name] for name in terms} == terms
    return client


def run_with(client: httpx.Client, *posts: Points, **terms: Any) -> str:
    run_id: str = expect_json(client.post("/runs", json={"name": "ppo"} | terms), 201)["id"]
    for points in posts:
        expect_json(client.post(f"/runs/{run_id}/observations", json={"observations": points}), 200)
    return run_id


def evals(*values: float, start: int) -> Points:
    return [{"metric": "eval", "step": step, "value": value} for step, value in enumerate(values, start)]


def test_a_held_out_stop_shows_whether_it_was_right(admin: httpx.Client) -> None:
    """The run goes on to its own end, later evals tell, and a person may know better."""
    run_id = run_with(admin, FALLING, labels={"gpus": "8", "job_kind": "rlhf"})
    run = expect_json(admin.get(f"/runs/{run_id}"), 200)
    decision = run["decision"]
    assert (decision["state"], run["should_stop"]) == ("held_out", False)
    assert decision["history"][0]["details"]["held_out_share"] == 1
    assert expect_json(admin.get("/deliveries"), 200)["items"] == []
    expect_problem(admin.post(f"/decisions/{decision['id']}/undo", json={"reason": "no"}), 409)
    expect_json(admin.post(f"/runs/{run_id}/observations", json={"observations": evals(0.5, 0.4, 0.3, start=5)}), 200)
    expect_json(admin.post(f"/runs/{run_id}/finish", json={"status": "completed"}), 200)

    told = expect_json(admin.get(f"/decisions/{decision['id']}/outcomes"), 200)
    (outcome,) = told["items"]
    assert (outcome["outcome"], outcome["derived"], outcome["actor"]) == ("right", True, "evalstop")
    assert outcome["assessment"]["run_outcome"] == "turned"
    case = told["case"]
    assert (case["run_outcome"], case["treatment"], case["observed_probability"]) == ("turned", "observed", 1)
    assert (case["detectors"], case["stated_risk"], case["gpu_hours_lost"]) == (["k_decline"], None, 0)
    assert expect_json(admin.get(f"/runs/{run_id}"), 200)["decision"]["outcome"] == outcome

    word = {"outcome": "wrong", "note": "the eval set was replaced", "actor": "dana"}
    expect_json(admin.post(f"/decisions/{decision['id']}/outcome", json=word), 200)
    told = expect_json(admin.get(f"/runs/{run_id}/outcomes"), 200)
    assert [one["actor"] for one in told["items"]] == ["evalstop", "dana"]
    assert (told["case"]["run_outcome"], told["case"]["derived"], told["case"]["outcome"]) == (
        "healthy",
        False,
        "wrong",
    )


def test_a_run_that_was_never_flagged_can_be_judged(admin: httpx.Client) -> None:
    """It was right to let it go on, or a turn was missed; while it goes on there is no case of it."""
    run_id = run_with(admin, evals(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, start=0))
    told = expect_json(admin.post(f"/runs/{run_id}/outcome", json={"outcome": "unknown"}), 200)
    assert (len(told["items"]), told["case"]) == (1, None)
    expect_json(admin.post(f"/runs/{run_id}/finish", json={"status": "completed"}), 200)
    told = expect_json(admin.get(f"/runs/{run_id}/outcomes"), 200)
    assert (told["case"]["run_outcome"], told["case"]["treatment"]) == ("undecided", None)
    told = expect_json(admin.post(f"/runs/{run_id}/outcome", json={"outcome": "wrong", "turn_step": 3}), 200)
    assert (told["case"]["run_outcome"], told["case"]["turn_step"], len(told["items"])) == ("turned", 3, 2)
    assert expect_json(admin.get(f"/runs/{run_id}/outcomes", params={"attempt": 2}), 200)["items"] == []


def test_what_contradicts_itself_is_refused(admin: httpx.Client) -> None:
    """A right stop comes at the turn or after it, and a run that turned was not rightly let go on."""
    flagged = run_with(admin, FALLING)
    detail = expect_problem(admin.post(f"/runs/{flagged}/outcome", json={"outcome": "right", "turn_step": 5}), 422)[
        "detail"
    ]
    assert "decided at step 4, before 5" in detail
    healthy = run_with(admin, evals(0.1, start=0), name="healthy")
    word = {"outcome": "right", "turn_step": 0}
    assert "label it wrong" in expect_problem(admin.post(f"/runs/{healthy}/outcome", json=word), 422)["detail"]


@pytest.mark.parametrize(
    "wrong", [{"held_out_share": -0.1}, {"held_out_share": 1.1}, {"price_per_gpu_hour": -1}, {"currency": "dollars"}]
)
def test_settings_that_make_no_sense(admin: httpx.Client, wrong: dict[str, Any]) -> None:
    """A share is between 0 and 1, a price is not negative, a currency has three letters."""
    assert next(iter(wrong)) in str(expect_problem(admin.patch("/project", json=wrong), 422))


def test_new_projects_hold_out_a_tenth(service: Service) -> None:
    """Unless they say otherwise; a price can be taken away again."""
    landlord = service.open_client(None, "admin")
    made = expect_json(landlord.post("/projects", json={"name": "holds out"}), 201)
    assert (made["held_out_share"], made["price_per_gpu_hour"], made["currency"]) == (0.1, None, "USD")
    assert "seed" not in made
