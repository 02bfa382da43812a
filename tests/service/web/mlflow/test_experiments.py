"""Experiments of MLflow: created, changed and searched, with their runs and models."""

from __future__ import annotations

import pytest

from tests.service.web.mlflow.rest_client import MlflowClient, expect_error, expect_json


def test_experiment_is_created_once_and_found(client: MlflowClient) -> None:
    """It is found by name and id, and listed before the default experiment."""
    expect_error(
        client.http.get("experiments/get-by-name", params={"experiment_name": "a"}), 404, "RESOURCE_DOES_NOT_EXIST"
    )
    experiment_id = client.post("experiments/create", {"name": "a"})["experiment_id"]
    expect_error(client.http.post("experiments/create", json={"name": "a"}), 400, "RESOURCE_ALREADY_EXISTS")
    by_name = client.get("experiments/get-by-name", experiment_name="a")["experiment"]
    assert by_name == client.get("experiments/get", experiment_id=experiment_id)["experiment"]
    assert (by_name["experiment_id"], by_name["lifecycle_stage"]) == (experiment_id, "active")
    experiments = client.post("experiments/search", {"max_results": 10})["experiments"]
    assert [item["name"] for item in experiments] == ["a", "Default"]
    assert client.get("experiments/get", experiment_id="0")["experiment"]["name"] == "Default"
    expect_error(client.http.get("experiments/get", params={"experiment_id": "7"}), 404, "RESOURCE_DOES_NOT_EXIST")


def test_experiment_is_renamed_tagged_deleted_and_restored(client: MlflowClient) -> None:
    """A deleted experiment is hidden with its runs; its artifact location never changes."""
    body = {"name": "a", "artifact_location": "s3://bucket/a", "tags": [{"key": "k", "value": "v"}]}
    experiment_id = client.post("experiments/create", body)["experiment_id"]
    client.post("experiments/create", {"name": "b"})
    rename = {"experiment_id": experiment_id, "new_name": "b"}
    expect_error(client.http.post("experiments/update", json=rename), 400, "RESOURCE_ALREADY_EXISTS")
    client.post("experiments/update", rename | {"new_name": "c"})
    client.post("experiments/set-experiment-tag", {"experiment_id": experiment_id, "key": "t", "value": "x"})
    client.post("experiments/delete-experiment-tag", {"experiment_id": experiment_id, "key": "k"})
    experiment = client.get("experiments/get", experiment_id=experiment_id)["experiment"]
    assert (experiment["name"], experiment["tags"]) == ("c", [{"key": "t", "value": "x"}])
    assert experiment["artifact_location"] == "s3://bucket/a"
    run_id = client.create_run(experiment_id=experiment_id)
    info = client.get("runs/get", run_id=run_id)["run"]["info"]
    assert info["artifact_uri"] == f"s3://bucket/a/{run_id}/artifacts"
    search = {"experiment_ids": [experiment_id]}
    for verb, count in (("delete", 0), ("restore", 1)):
        client.post(f"experiments/{verb}", {"experiment_id": experiment_id})
        assert len(client.post("runs/search", search)["runs"]) == count
        experiments = client.post("experiments/search", {"filter": "name LIKE 'c%'"})["experiments"]
        assert len(experiments) == count


def test_runs_are_searched_by_experiment_tag_and_metric(client: MlflowClient) -> None:
    """Pages are newest first, and a filter also finds runs behind those that do not match."""
    experiment_id = client.post("experiments/create", {"name": "a"})["experiment_id"]
    run_ids = [
        client.create_run(run_name=f"r{number}", experiment_id=experiment_id, start_time=number) for number in range(5)
    ]
    client.create_run(run_name="elsewhere")
    client.post("runs/set-tag", {"run_id": run_ids[1], "key": "t", "value": "x"})
    found_ids: list[str] = []
    token: dict[str, str] = {}
    while True:
        page = client.post("runs/search", {"experiment_ids": [experiment_id], "max_results": 2} | token)
        found_ids += [run["info"]["run_id"] for run in page["runs"]]
        if "next_page_token" not in page:
            break
        token = {"page_token": page["next_page_token"]}
    assert found_ids == run_ids[::-1]
    for max_results in (1, 1000):  # the match is behind runs that do not match
        search = {"experiment_ids": [experiment_id], "filter": "tags.t = 'x'", "max_results": max_results}
        tagged = client.post("runs/search", search)["runs"]
        assert [run["info"]["run_id"] for run in tagged] == [run_ids[1]]
    client.post("runs/log-metric", {"run_id": run_ids[3], "key": "m", "value": 2, "timestamp": 1})
    client.post("runs/log-metric", {"run_id": run_ids[4], "key": "m", "value": 1, "timestamp": 1})
    best = client.post(
        "runs/search", {"experiment_ids": [experiment_id], "filter": "metrics.m > 0", "order_by": ["metrics.m"]}
    )
    assert [run["info"]["run_id"] for run in best["runs"]] == [run_ids[4], run_ids[3]]
    for body in ({"filter": "metrics.m > 'x'"}, {"order_by": ["shapes.m DESC"]}, {"page_token": "x"}):
        assert client.http.post("runs/search", json=body).status_code == 400


@pytest.mark.parametrize("path", ["runs/search", "logged-models/search"])
def test_search_in_an_unknown_experiment_finds_nothing(client: MlflowClient, path: str) -> None:
    """As in MLflow, unknown experiments are empty beside others, and an id that is no number is refused."""
    run_id = client.create_run(run_name="r")
    found = [client.post(path, {"experiment_ids": ids}) for ids in (["7"], ["9" * 30], ["7", "0"])]
    assert [[run["info"]["run_id"] for run in answer.get("runs", [])] for answer in found] == (
        [[], [], [run_id]] if path == "runs/search" else [[], [], []]
    )
    answer = client.http.post(path, json={"experiment_ids": ["0", "abc"]})
    expect_error(answer, 400, "INVALID_PARAMETER_VALUE")


def test_datasets_and_models_are_returned_as_sent(client: MlflowClient) -> None:
    """What is sent twice is stored once; a deleted model is not found."""
    run_id = client.create_run()
    inputs = {"run_id": run_id, "datasets": [{"dataset": {"name": "d", "digest": "1"}, "tags": []}]}
    client.post("runs/log-inputs", inputs)
    client.post("runs/log-inputs", inputs)
    model = client.post("logged-models", {"experiment_id": "0", "name": "m", "source_run_id": run_id})["model"]["info"]
    client.post("runs/outputs", {"run_id": run_id, "models": [{"model_id": model["model_id"], "step": 1}]})
    run = client.get("runs/get", run_id=run_id)["run"]
    assert run["inputs"]["dataset_inputs"] == inputs["datasets"]
    assert run["outputs"]["model_outputs"] == [{"model_id": model["model_id"], "step": 1}]
    path = f"logged-models/{model['model_id']}"
    expect_json(client.http.patch(path, json={"status": "LOGGED_MODEL_READY"}))
    for value in (0.25, 0.5):
        metric = {"key": "acc", "value": value, "timestamp": 1, "step": int(4 * value)}
        client.post("runs/log-metric", {"run_id": run_id, "model_id": model["model_id"]} | metric)
    metrics = client.get(path)["model"]["data"]["metrics"]
    assert [(item["key"], item["value"], item["run_id"]) for item in metrics] == [("acc", 0.5, run_id)]
    models = client.post("logged-models/search", {"experiment_ids": ["0"], "filter": "name = 'm'"})["models"]
    assert [item["info"]["status"] for item in models] == ["LOGGED_MODEL_READY"]
    expect_json(client.http.delete(path))
    expect_error(client.http.get(path), 404, "RESOURCE_DOES_NOT_EXIST")


def test_models_are_found_by_a_metric_that_is_not_finite_for_some(client: MlflowClient) -> None:
    """A model whose metric is NaN matches no comparison, and comes last."""
    values = {"low": 0.25, "none": "NaN", "high": 0.5}
    for name, value in values.items():
        model = client.post("logged-models", {"experiment_id": "0", "name": name})["model"]["info"]
        metric = {"key": "acc", "value": value, "timestamp": 1, "model_id": model["model_id"]}
        client.post("runs/log-metric", {"run_id": client.create_run()} | metric)
    search = {"experiment_ids": ["0"], "order_by": [{"field_name": "metrics.acc", "ascending": False}]}
    found = client.post("logged-models/search", search)["models"]
    assert [item["info"]["name"] for item in found] == ["high", "low", "none"]
    found = client.post("logged-models/search", search | {"filter": "metrics.acc > 0.4"})["models"]
    assert [item["info"]["name"] for item in found] == ["high"]
