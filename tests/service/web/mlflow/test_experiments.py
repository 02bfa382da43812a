"""Experiments of MLflow: made, found, changed and searched, with the runs and models in them."""

from __future__ import annotations

from tests.service.web.mlflow.rest_client import Client, refused, taken


def test_experiments(client: Client) -> None:
    """An experiment is made once, found by name and id and listed beside the default one."""
    refused(client.http.get("experiments/get-by-name", params={"experiment_name": "a"}), 404, "RESOURCE_DOES_NOT_EXIST")
    own_id = client.post("experiments/create", {"name": "a"})["experiment_id"]
    refused(client.http.post("experiments/create", json={"name": "a"}), 400, "RESOURCE_ALREADY_EXISTS")
    by_name = client.get("experiments/get-by-name", experiment_name="a")["experiment"]
    assert by_name == client.get("experiments/get", experiment_id=own_id)["experiment"]
    assert (by_name["experiment_id"], by_name["lifecycle_stage"]) == (own_id, "active")
    listed = client.post("experiments/search", {"max_results": 10})["experiments"]
    assert [item["name"] for item in listed] == ["a", "Default"]
    assert client.get("experiments/get", experiment_id="0")["experiment"]["name"] == "Default"
    refused(client.http.get("experiments/get", params={"experiment_id": "7"}), 404, "RESOURCE_DOES_NOT_EXIST")


def test_experiments_change(client: Client) -> None:
    """An experiment is renamed, tagged, hidden with its runs and shown again; its name and place stay its own."""
    body = {"name": "a", "artifact_location": "s3://bucket/a", "tags": [{"key": "k", "value": "v"}]}
    own_id = client.post("experiments/create", body)["experiment_id"]
    client.post("experiments/create", {"name": "b"})
    rename = {"experiment_id": own_id, "new_name": "b"}
    refused(client.http.post("experiments/update", json=rename), 400, "RESOURCE_ALREADY_EXISTS")
    client.post("experiments/update", rename | {"new_name": "c"})
    client.post("experiments/set-experiment-tag", {"experiment_id": own_id, "key": "t", "value": "x"})
    client.post("experiments/delete-experiment-tag", {"experiment_id": own_id, "key": "k"})
    experiment = client.get("experiments/get", experiment_id=own_id)["experiment"]
    assert (experiment["name"], experiment["tags"]) == ("c", [{"key": "t", "value": "x"}])
    assert experiment["artifact_location"] == "s3://bucket/a"
    run_id = client.run(experiment_id=own_id)
    info = client.get("runs/get", run_id=run_id)["run"]["info"]
    assert info["artifact_uri"] == f"s3://bucket/a/{run_id}/artifacts"
    wanted = {"experiment_ids": [own_id]}
    for verb, count in (("delete", 0), ("restore", 1)):
        client.post(f"experiments/{verb}", {"experiment_id": own_id})
        assert len(client.post("runs/search", wanted)["runs"]) == count
        listed = client.post("experiments/search", {"filter": "name LIKE 'c%'"})["experiments"]
        assert len(listed) == count


def test_searching(client: Client) -> None:
    """Runs are found newest first by experiment, tag and name, page by page."""
    own_id = client.post("experiments/create", {"name": "a"})["experiment_id"]
    made = [client.run(run_name=f"r{number}", experiment_id=own_id, start_time=number) for number in range(5)]
    client.run(run_name="elsewhere")
    client.post("runs/set-tag", {"run_id": made[1], "key": "t", "value": "x"})
    found: list[str] = []
    token: dict[str, str] = {}
    while True:
        page = client.post("runs/search", {"experiment_ids": [own_id], "max_results": 2} | token)
        found += [run["info"]["run_id"] for run in page["runs"]]
        if "next_page_token" not in page:
            break
        token = {"page_token": page["next_page_token"]}
    assert found == made[::-1]
    for most in (1, 1000):  # what is wanted is looked for past what is not
        wanted = {"experiment_ids": [own_id], "filter": "tags.t = 'x'", "max_results": most}
        tagged = client.post("runs/search", wanted)["runs"]
        assert [run["info"]["run_id"] for run in tagged] == [made[1]]
    client.post("runs/log-metric", {"run_id": made[3], "key": "m", "value": 2, "timestamp": 1})
    client.post("runs/log-metric", {"run_id": made[4], "key": "m", "value": 1, "timestamp": 1})
    best = client.post(
        "runs/search", {"experiment_ids": [own_id], "filter": "metrics.m > 0", "order_by": ["metrics.m"]}
    )
    assert [run["info"]["run_id"] for run in best["runs"]] == [made[4], made[3]]
    for body in ({"filter": "metrics.m > 'x'"}, {"order_by": ["shapes.m DESC"]}, {"page_token": "x"}):
        assert client.http.post("runs/search", json=body).status_code in (400, 404)


def test_inputs_and_models(client: Client) -> None:
    """Datasets and models come back as they were sent, and one that is sent again is there once."""
    run_id = client.run()
    inputs = {"run_id": run_id, "datasets": [{"dataset": {"name": "d", "digest": "1"}, "tags": []}]}
    client.post("runs/log-inputs", inputs)
    client.post("runs/log-inputs", inputs)
    model = client.post("logged-models", {"experiment_id": "0", "name": "m", "source_run_id": run_id})["model"]["info"]
    client.post("runs/outputs", {"run_id": run_id, "models": [{"model_id": model["model_id"], "step": 1}]})
    run = client.get("runs/get", run_id=run_id)["run"]
    assert run["inputs"]["dataset_inputs"] == inputs["datasets"]
    assert run["outputs"]["model_outputs"] == [{"model_id": model["model_id"], "step": 1}]
    path = f"logged-models/{model['model_id']}"
    taken(client.http.patch(path, json={"status": "LOGGED_MODEL_READY"}))
    for value in (0.25, 0.5):
        metric = {"key": "acc", "value": value, "timestamp": 1, "step": int(4 * value)}
        client.post("runs/log-metric", {"run_id": run_id, "model_id": model["model_id"]} | metric)
    logged = client.get(path)["model"]["data"]["metrics"]
    assert [(item["key"], item["value"], item["run_id"]) for item in logged] == [("acc", 0.5, run_id)]
    found = client.post("logged-models/search", {"experiment_ids": ["0"], "filter": "name = 'm'"})["models"]
    assert [item["info"]["status"] for item in found] == ["LOGGED_MODEL_READY"]
    taken(client.http.delete(path))
    refused(client.http.get(path), 404, "RESOURCE_DOES_NOT_EXIST")
