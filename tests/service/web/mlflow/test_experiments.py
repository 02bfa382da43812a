"""Experiments of MLflow: created and searched, with their runs; models are accepted and not kept."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from evalstop_service.domain.project_settings import Quotas
from evalstop_service.store import projects

from tests.service.web.api.conftest import Service
from tests.service.web.mlflow.conftest import MlflowClient, expect_error, expect_json


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


def test_experiment_has_its_tags_and_artifact_location(client: MlflowClient) -> None:
    """Runs of an experiment store their artifacts below its location."""
    body = {"name": "a", "artifact_location": "s3://bucket/a", "tags": [{"key": "k", "value": "v"}]}
    experiment_id = client.post("experiments/create", body)["experiment_id"]
    experiment = client.get("experiments/get", experiment_id=experiment_id)["experiment"]
    assert (experiment["tags"], experiment["artifact_location"]) == (body["tags"], "s3://bucket/a")
    run_id = client.create_run(experiment_id=experiment_id)
    info = client.get("runs/get", run_id=run_id)["run"]["info"]
    assert info["artifact_uri"] == f"s3://bucket/a/{run_id}/artifacts"


def test_runs_are_searched_by_experiment_and_tag(client: MlflowClient) -> None:
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
    for body in ({"filter": "metrics.m > 1"}, {"order_by": ["metrics.m DESC"]}, {"page_token": "x"}):
        assert client.http.post("runs/search", json=body).status_code == 400


def test_search_in_an_unknown_experiment_finds_nothing(client: MlflowClient) -> None:
    """As in MLflow, unknown experiments are empty beside others, and an id that is no number is refused."""
    run_id = client.create_run(run_name="r")
    found = [client.post("runs/search", {"experiment_ids": ids}) for ids in (["7"], ["9" * 18], ["7", "0"])]
    assert [[run["info"]["run_id"] for run in answer["runs"]] for answer in found] == [[], [], [run_id]]
    answer = client.http.post("runs/search", json={"experiment_ids": ["0", "abc"]})
    expect_error(answer, 400, "INVALID_PARAMETER_VALUE")


FILTERS = {
    "": "abc",
    "run_name = 'ppo 7b'": "a",
    "attr . run_name = 'ppo 7b'": "a",
    "parameters.optimizer = 'adamw'": "a",
    "attributes.run_name != 'ppo 7b'": "bc",
    "run_name = 'ppo_b' and user_id = 'unknown'": "b",
    "tags.`a b` = 'c' AND tag.\"mlflow.user\"='Dana'": "a",
    "tags.größe = 'ü'": "a",
    "tags.missing != 'x'": "",
    "params.note = '100%\\' and status = 'FINISHED'": "b",
    "params.optimizer = 'adamw'": "a",
}


def test_runs_are_found_by_any_comparison(client: MlflowClient) -> None:
    """Texts are compared as in MLflow, by the same rules on each database."""
    a = client.create_run(run_name="ppo 7b", start_time=4, tags=build_items({"a b": "c", "größe": "ü"}), user_id="Dana")
    b = client.create_run(run_name="ppo_b", start_time=5)
    ids = {"a": a, "b": b, "c": expect_json(client.api.post("/runs", json={"name": "other"}))["id"].replace("-", "")}
    client.post("runs/log-batch", {"run_id": a, "params": build_items({"optimizer": "adamw", "lr": "1e-6"})})
    client.post("runs/log-parameter", {"run_id": b, "key": "note", "value": "100%\\"})
    client.post("runs/update", {"run_id": b, "status": "FINISHED"})
    for text, expected in (*FILTERS.items(), (f"run_id = '{a}'", "a")):
        found = client.post("runs/search", {"experiment_ids": ["0"], "filter": text})["runs"]
        assert {run["info"]["run_id"] for run in found} == {ids[name] for name in expected}, text


def build_items(items: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in items.items()]


def test_experiments_are_listed_as_a_whole(client: MlflowClient) -> None:
    """They come in pages, newest first, the default experiment, which is not stored, last; a filter is refused."""
    for number in range(3):
        client.post("experiments/create", {"name": f"sweep {number}"})
    page = client.post("experiments/search", {"max_results": 3})
    assert [item["name"] for item in page["experiments"]] == ["sweep 2", "sweep 1", "sweep 0"]
    rest = client.post("experiments/search", {"max_results": 3, "page_token": page["next_page_token"]})
    assert ([item["name"] for item in rest["experiments"]], "next_page_token" in rest) == (["Default"], False)
    for name in ("sweep 1", "Default"):  # as accelerate's tracker asks
        (found,) = client.post("experiments/search", {"filter": f"name = '{name}'"})["experiments"]
        assert found["name"] == name
    assert not client.post("experiments/search", {"filter": "name = 'other'"}).get("experiments")
    for body in ({"filter": "name LIKE 'sweep%'"}, {"order_by": ["name DESC"]}):
        expect_error(client.http.post("experiments/search", json=body), 400, "INVALID_PARAMETER_VALUE")


def test_key_that_searches_on_and_on_has_to_wait(client: MlflowClient) -> None:
    """Searches are counted as costly."""
    answers = (client.http.post("experiments/search", json={"max_results": 1}) for _ in range(1000))
    refused = next(answer for answer in answers if answer.status_code != 200)
    expect_error(refused, 429, "REQUEST_LIMIT_EXCEEDED")
    assert int(refused.headers["Retry-After"]) >= 1


def test_number_of_experiments_is_limited(service: Service, client: MlflowClient) -> None:
    """A project over its quota is told so, and keeps what it has."""
    project_id = UUID(expect_json(client.api.get("/project"))["id"])
    with service.database.transaction() as tx:
        project = projects.get_project(tx, project_id)
        projects.update_project(tx, replace(project, quotas=Quotas(experiments=2)))
    for name in ("a", "b"):
        client.post("experiments/create", {"name": name})
    message = expect_error(client.http.post("experiments/create", json={"name": "c"}), 409, "RESOURCE_CONFLICT")
    assert "experiments" in message
    assert client.get("experiments/get-by-name", experiment_name="a")["experiment"]["name"] == "a"


def test_inputs_and_models_are_accepted_and_not_kept(client: MlflowClient) -> None:
    """Clients go on, whatever they log; a model can be read back as far as its id says."""
    run_id = client.create_run()
    inputs = {"run_id": run_id, "datasets": [{"dataset": {"name": "d", "digest": "1"}, "tags": []}]}
    assert client.post("runs/log-inputs", inputs) == {}
    created = {"experiment_id": "0", "name": "m", "source_run_id": run_id, "params": build_items({"size": "7b"})}
    model = client.post("logged-models", created)["model"]["info"]
    assert (model["name"], model["status"]) == ("m", "LOGGED_MODEL_PENDING")
    client.post("runs/outputs", {"run_id": run_id, "models": [{"model_id": model["model_id"], "step": 0}]})
    path = f"logged-models/{model['model_id']}"
    ready = expect_json(client.http.patch(path, json={"status": "LOGGED_MODEL_READY"}))["model"]["info"]
    read = client.get(path)["model"]["info"]
    for info in (ready, read):
        assert (info["artifact_uri"], info["source_run_id"]) == (model["artifact_uri"], run_id)
    metric = {"key": "acc", "value": 0.5, "timestamp": 1, "step": 1}
    client.post("runs/log-metric", {"run_id": run_id, "model_id": model["model_id"]} | metric)
    expect_json(client.http.patch(f"{path}/tags", json={"tags": build_items({"k": "v"})}))
    client.post(f"{path}/params", {"params": build_items({"p": "v" * 8000})})
    run = client.get("runs/get", run_id=run_id)["run"]
    assert (run["inputs"], run["outputs"]) == ({}, {})
    assert expect_json(client.api.get(f"/runs/{run_id}/checkpoints"))["items"] == []
    assert client.post("logged-models/search", {"experiment_ids": ["0"]}) == {"models": []}
    expect_error(client.http.get("logged-models/m-0123"), 404, "RESOURCE_DOES_NOT_EXIST")
