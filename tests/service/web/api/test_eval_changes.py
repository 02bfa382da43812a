"""Changes of what the eval measures, over HTTP."""

from __future__ import annotations

from typing import Any

import httpx

from tests.service.web.api.api_calls import expect_json, expect_problem, open_run

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
