"""Kubeflow's progress reports, as the callback of transformers posts them."""

from __future__ import annotations

from typing import Any

import httpx

from tests.service.web.api.api_calls import expect_json, expect_problem


def build_report(**metrics: float | str) -> dict[str, Any]:
    reported_metrics = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return {"trainerStatus": {"lastUpdatedTime": "2026-01-01T00:00:00+00:00", "metrics": reported_metrics}}


def list_values(admin: httpx.Client, run_id: str, metric: str) -> list[tuple[int, float | str]]:
    page = expect_json(admin.get(f"/runs/{run_id}/observations", params={"metric": metric}), 200)
    return [(item["step"], item["value"]) for item in page["items"]]


def test_repeated_value_is_stored_once_at_its_first_step(admin: httpx.Client) -> None:
    """A value that later reports repeat is stored once, at the step of the first report that held it."""
    first = expect_json(
        admin.post("/kubeflow/tiny", json=build_report(current_step=10, total_steps=100, eval_accuracy=0.5)), 200
    )
    run_id = first["run_id"]
    for step, value in ((20, 0.5), (30, 0.6), (40, 0.6)):
        expect_json(
            admin.post("/kubeflow/tiny", json=build_report(current_step=step, total_steps=100, eval_accuracy=value)),
            200,
        )
    expect_json(admin.post("/kubeflow/tiny", json=build_report(eval_accuracy=0.7, note="what")), 200)
    assert list_values(admin, run_id, "eval_accuracy") == [(10, 0.5), (30, 0.6), (31, 0.7)]
    run = expect_json(admin.get(f"/runs/{run_id}"), 200)
    assert (run["total_steps"], list(run["metrics"])) == (100, ["eval_accuracy"])
    expect_json(
        admin.post("/kubeflow/tiny", json=build_report(current_step=120, total_steps=110, eval_accuracy=0.8)), 200
    )
    run = expect_json(admin.get(f"/runs/{run_id}"), 200)
    assert (run["total_steps"], run["length_known"]) == (110, False)


def test_repeated_nan_is_stored_once(admin: httpx.Client) -> None:
    """NaN, which equals nothing, is stored once as any other value that later reports repeat."""
    for step in (10, 20, 30):
        report = build_report(current_step=step, eval_accuracy="nan")
        run_id = expect_json(admin.post("/kubeflow/tiny", json=report), 200)["run_id"]
    assert list_values(admin, run_id, "eval_accuracy") == [(10, "NaN")]


def test_late_report_does_not_reopen_an_ended_run(admin: httpx.Client) -> None:
    """A run that has ended stays completed when another report arrives."""
    run_id = expect_json(admin.post("/kubeflow/tiny", json=build_report(current_step=1, loss=0.5)), 200)["run_id"]
    expect_json(admin.post(f"/runs/{run_id}/finish", json={"status": "completed"}), 200)
    expect_json(admin.post("/kubeflow/tiny", json=build_report(current_step=2, loss=0.4)), 200)
    assert expect_json(admin.get(f"/runs/{run_id}"), 200)["status"] == "completed"
    expect_problem(admin.post("/kubeflow/tiny", json={"status": {}}), 422)
