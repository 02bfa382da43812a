"""Groups of runs and their rules over HTTP: who may set one, what it decides, and the copy that a trainer confirms."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.decisions import sweeps

from tests.service.decisions.grouped_runs import CURVES, PBT
from tests.service.web.api.api_calls import expect_json, expect_problem
from tests.service.web.api.conftest import Service

MEDIAN = {"kind": "median"}


def open_member(client: httpx.Client, name: str, **fields: Any) -> dict[str, Any]:
    """A run of the group `sweep` that rises at the rate of its name, with a checkpoint at step 4."""
    body = {"name": name, "group": "sweep", "mode": "enforce", "params": {"lr": "1e-6"}, **fields}
    run = client.post("/runs", json=body).raise_for_status().json()
    points = [{"metric": "eval", "step": step, "value": CURVES[name] * step} for step in range(6)]
    expect_json(client.post(f"/runs/{run['id']}/observations", json={"observations": points}), 200)
    expect_json(client.post(f"/runs/{run['id']}/checkpoints", json={"step": 4, "uri": f"file:///{name}"}), 201)
    document: dict[str, Any] = run
    return document


def compare(service: Service) -> None:
    """One round of the periodic job."""
    sweeps.create_job(service.database, utc_now).do(lambda _: False)


def test_trainer_gives_its_group_a_rule_which_others_do_not_change(service: Service) -> None:
    """The first rule stands; a later one is reported as a limit, and only a key with `operate` replaces it."""
    project = service.create_project()
    trainer, operator = service.open_client(project, "ingest"), service.open_client(project, "operate", "read")
    assert open_member(trainer, "best", population=PBT)["limits"] == []
    (limit,) = open_member(trainer, "good", population=MEDIAN)["limits"]
    assert limit.startswith("the rule of the group sweep is {")
    assert '"pbt"' in limit
    assert "operate" in expect_problem(trainer.post("/groups/sweep", json=MEDIAN), 403)["detail"]
    assert expect_json(operator.get("/groups/sweep"), 200)["rule"]["kind"] == "pbt"
    changed = expect_json(operator.post("/groups/sweep", json=MEDIAN), 200)
    assert (changed["rule"]["kind"], changed["rule"]["eta"], changed["actor"]) == ("median", 3, "key test")
    assert [group["name"] for group in expect_json(operator.get("/groups"), 200)["items"]] == ["sweep"]
    assert operator.delete("/groups/sweep").status_code == 204
    left = expect_json(operator.get("/groups/sweep"), 200)
    assert (left["rule"], [member["name"] for member in left["members"]]) == (None, ["best", "good"])
    expect_problem(operator.get("/groups/nosuch"), 404)


def test_rule_is_no_wider_than_the_project_allows(service: Service) -> None:
    """Where the highest mode is shadow, a rule that enforces only records; the opened run says so."""
    client = service.open_client(service.create_project())
    expect_json(client.patch("/project", json={"max_mode": "shadow", "default_mode": "shadow"}), 200)
    limit = open_member(client, "best", population=PBT)["limits"][-1]
    assert '"mode":"shadow"' in limit
    assert expect_json(client.get("/groups/sweep"), 200)["rule"]["mode"] == "shadow"


def test_only_an_admins_rule_enforces_where_stops_take_a_second_person(service: Service) -> None:
    """Whoever else sets one, or changes an enforcing one, sets one that records: nobody ends jobs alone."""
    project = service.create_project()
    admin, operator = service.open_client(project), service.open_client(project, "operate", "read")
    expect_json(admin.patch("/project", json={"second_person": True}), 200)
    (limit,) = open_member(admin, "best", population=PBT)["limits"]
    assert '"mode":"shadow"' in limit
    for client, fewest, mode in ((operator, 2, "shadow"), (admin, 2, "enforce"), (operator, 1, "shadow")):
        answer = client.post("/groups/sweep", json={**MEDIAN, "mode": "enforce", "fewest": fewest})
        assert expect_json(answer, 200)["rule"]["mode"] == mode


@pytest.mark.parametrize(
    ("rule", "detail"),
    [
        ({"kind": "nosuch"}, "kind"),
        ({"kind": "median", "nosuch": 1}, "nosuch"),
        ({"kind": "pbt"}, "ready_steps"),
        ({"kind": "median", "most_share": 2}, "most_share"),
        ({"kind": "pbt", "ready_steps": 4, "hyperparameters": {"lr": {"low": 2.0, "high": 1.0}}}, "high"),
    ],
)
def test_invalid_rule_is_refused_in_words(admin: httpx.Client, rule: dict[str, Any], detail: str) -> None:
    """The detail names the key; a rule without a group is refused too."""
    assert detail in expect_problem(admin.post("/groups/sweep", json=rule), 422)["detail"]
    assert "group" in expect_problem(admin.post("/runs", json={"name": "r", "population": MEDIAN}), 422)["detail"]


def test_whole_numbers_may_be_written_as_floats(admin: httpx.Client) -> None:
    """JSON has one kind of number: 200.0 steps are 200."""
    answer = admin.post("/groups/sweep", json={"kind": "pbt", "ready_steps": 200.0, "sigmas": 1.0})
    assert answer.raise_for_status().json()["rule"]["ready_steps"] == 200


@pytest.mark.parametrize("choice", [rb'"\ud800"', b"1e400"])
def test_rule_that_could_not_be_stored_is_refused(admin: httpx.Client, choice: bytes) -> None:
    """An unpaired surrogate, or a number beyond all floats: the groups can still be listed."""
    content = b'{"kind": "pbt", "ready_steps": 4, "hyperparameters": {"x": {"choices": [' + choice + b"]}}}"
    headers = {"Content-Type": "application/json"}
    expect_problem(admin.post("/groups/sweep", content=content, headers=headers), 422)
    assert expect_json(admin.get("/groups"), 200)["items"] == []


def test_run_joins_no_group_by_another_trainers_key(service: Service) -> None:
    """The rule of a group may stop its runs, so whoever opened one says whether it joins."""
    project = service.create_project()
    owner, other = service.open_client(project, "ingest"), service.open_client(project, "ingest")
    body = {"name": "r", "mode": "enforce"}
    run = expect_json(owner.post("/runs", json=body), 201)
    assert "group" in expect_problem(other.post("/runs", json={**body, "group": "sweep"}), 409)["detail"]
    assert expect_json(other.post("/runs", json=body), 200)["group"] is None
    joined = expect_json(owner.post("/runs", json={**body, "group": "sweep"}), 200)
    assert (joined["id"], joined["group"]) == (run["id"], "sweep")
    expect_json(other.post("/runs", json={**body, "group": "sweep"}), 200)


def test_group_with_a_slash_in_its_name_is_found(admin: httpx.Client) -> None:
    """Groups are often named by team and experiment."""
    assert expect_json(admin.post("/groups/team/lr sweep", json=MEDIAN), 200)["name"] == "team/lr sweep"
    assert expect_json(admin.get("/groups/team%2Flr%20sweep"), 200)["rule"]["kind"] == "median"


def test_trainer_copies_the_best_run_and_goes_on_from_its_step(service: Service, admin: httpx.Client) -> None:
    """Every answer to the trainer asks for the copy, never for a stop, until it is confirmed; the group shows it."""
    members = {name: open_member(admin, name, population=PBT) for name in CURVES}
    run, compared = members["worst"], members["best"]
    path = f"/runs/{run['id']}"
    compare(service)
    point = {"metric": "loss", "step": 6, "value": 1.0}
    posted = expect_json(admin.post(f"{path}/observations", json={"observations": [point]}), 200)
    exploit = posted["exploit"]
    assert exploit == {
        "decision_id": exploit["decision_id"],
        "source_run": compared["id"],
        "source_name": "best",
        "source_step": 4,
        "source_checkpoint": "file:///best",
        "hyperparameters": {"lr": pytest.approx(2e-6)},
    }
    assert (posted["should_stop"], posted["decision"]) == (False, None)
    routed = expect_json(admin.post(f"{path}/observations", json={"observations": [point | {"time": None}]}), 200)
    many = {"runs": [{"run_id": run["id"], "observations": [point]}]}
    together = expect_json(admin.post("/observations", json=many), 200)["runs"][0]
    heartbeat = expect_json(admin.post(f"{path}/heartbeat"), 200)
    assert routed["exploit"] == together["exploit"] == heartbeat["exploit"] == exploit
    assert (routed["should_stop"], together["should_stop"], heartbeat["should_stop"]) == (False, False, False)
    (decision,) = expect_json(admin.get("/decisions", params={"run_id": run["id"]}), 200)["items"]
    assert (decision["action"], decision["group"], decision["exploit"]) == ("exploit", "sweep", exploit)
    vetoed = admin.post(f"/decisions/{decision['id']}/veto", json={"reason": "too late"})
    assert "handed over to the trainer" in expect_problem(vetoed, 409)["detail"]
    confirmed = expect_json(admin.post(f"{path}/exploited", json={"decision_id": decision["id"]}), 200)
    assert (confirmed["attempt"], confirmed["last_step"], confirmed["exploit"]) == (2, 4, None)
    again = expect_json(admin.post(f"{path}/exploited", json={"decision_id": decision["id"]}), 200)
    assert again["attempt"] == 2
    point = {"metric": "eval", "step": 5, "value": 0.5}
    assert expect_json(admin.post(f"{path}/observations", json={"observations": [point]}), 200)["exploit"] is None
    member = next(
        item for item in expect_json(admin.get("/groups/sweep"), 200)["members"] if item["run_id"] == run["id"]
    )
    assert (member["attempt"], member["since"], member["score"], member["step"]) == (2, 4, 0.5, 5)
    assert member["hyperparameters"] == exploit["hyperparameters"]
    (copy,) = member["descent"]
    assert copy == {**exploit, "attempt": 2, "at": copy["at"]}
