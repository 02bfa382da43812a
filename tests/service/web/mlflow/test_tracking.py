"""MLflow's tracking API as it is on the wire: what is taken, what is refused and how, what comes back."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.service.web.api.conftest import Service

RISE_AND_FALL = [0.5, 0.9, 0.8, 0.7, 0.6]
"""Three declines: the paper's rule stops at step 4."""


@dataclass
class Client:
    """Speaks to `/mlflow`; `api` speaks to the service's own API with the same key."""

    http: httpx.Client
    api: httpx.Client

    def post(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        return taken(self.http.post(verb, json=body))

    def get(self, verb: str, **params: str | int) -> dict[str, Any]:
        return taken(self.http.get(verb, params=params))

    def run(self, **body: Any) -> str:
        run_id: str = self.post("runs/create", {"experiment_id": "0"} | body)["run"]["info"]["run_id"]
        return run_id

    def tags(self, run_id: str) -> dict[str, str]:
        run = self.get("runs/get", run_id=run_id)["run"]
        return {tag["key"]: tag["value"] for tag in run["data"]["tags"]}

    def record(self, run_id: str) -> dict[str, Any]:
        """The run as the service's own API answers it."""
        return taken(self.api.get(f"/runs/{run_id}"))


def taken(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code in (200, 201), response.text
    document: dict[str, Any] = response.json()
    return document


def refused(response: httpx.Response, status: int, code: str) -> str:
    """The message of an error as MLflow's clients read it."""
    assert (response.status_code, response.json()["error_code"]) == (status, code), response.text
    message: str = response.json()["message"]
    assert len(message) > 10
    return message


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    key = service.key(service.project())
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{service.url}/mlflow/api/2.0/mlflow/"
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
        yield Client(http, service.client(key))


def metrics(key: str, values: list[float], start: int = 0) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": value, "step": step, "timestamp": 1_700_000_000_000 + step}
        for step, value in enumerate(values, start)
    ]


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


def test_a_run_is_watched(client: Client) -> None:
    """What is logged is judged as it comes, and the run's tags tell its trainer to stop and what to ship."""
    experiment_id = client.post("experiments/create", {"name": "alignment"})["experiment_id"]
    tags = [{"key": "gpus", "value": "8"}]
    run_id = client.run(experiment_id=experiment_id, run_name="ppo", user_id="dana", tags=tags)
    client.post("runs/set-tag", {"run_id": run_id, "key": "evalstop.checkpoint.1", "value": "s3://b/1"})
    batch = {
        "run_id": run_id,
        "metrics": metrics("eval_accuracy", RISE_AND_FALL),
        "params": [{"key": "lr", "value": "1"}],
    }
    assert client.post("runs/log-batch", batch) == {}
    told = client.tags(run_id)
    assert (told["evalstop.should_stop"], told["evalstop.verdict"]) == ("true", "stop")
    assert told["evalstop.best_checkpoint"] == "s3://b/1"
    record = client.record(run_id)
    assert record["name"] == "alignment/ppo"
    assert record["labels"]["gpus"] == "8"
    assert record["params"] == {"lr": "1"}
    assert record["metrics"] == {"eval_accuracy": {"role": "eval", "direction": "maximize"}}
    assert record["should_stop"] is True
    run = client.get("runs/get", run_id=run_id)["run"]
    assert run["info"]["experiment_id"] == experiment_id
    assert run["data"]["metrics"][0]["value"] == RISE_AND_FALL[-1]
    assert client.post("runs/update", {"run_id": run_id, "status": "FINISHED"})["run_info"]["status"] == "FINISHED"
    assert client.record(run_id)["status"] == "completed"


def test_sent_again(client: Client) -> None:
    """A batch that is sent again changes nothing, and a value that contradicts the record is passed over in peace."""
    run_id = client.run()
    batch = {"run_id": run_id, "metrics": metrics("eval_accuracy", [0.1, 0.2, 0.3])}
    client.post("runs/log-batch", batch)
    client.post("runs/log-batch", batch)
    other = {"run_id": run_id, "key": "eval_accuracy", "value": 0.9, "timestamp": 1, "step": 1}
    assert client.post("runs/log-metric", other) == {}
    found = client.get("metrics/get-history", run_id=run_id, metric_key="eval_accuracy")["metrics"]
    assert [(item["step"], item["value"]) for item in found] == [(0, 0.1), (1, 0.2), (2, 0.3)]
    assert found[0]["timestamp"] == 1_700_000_000_000


def test_a_thousand_metrics(client: Client) -> None:
    """A batch holds a thousand metrics and no more, as in MLflow."""
    run_id = client.run()
    many = metrics("m", [float(value) for value in range(1001)])
    client.post("runs/log-batch", {"run_id": run_id, "metrics": many[:1000]})
    message = refused(
        client.http.post("runs/log-batch", json={"run_id": run_id, "metrics": many}), 400, "INVALID_PARAMETER_VALUE"
    )
    assert "metrics" in message
    first = client.get("metrics/get-history", run_id=run_id, metric_key="m", max_results=600)
    rest = client.get("metrics/get-history", run_id=run_id, metric_key="m", page_token=first["next_page_token"])
    assert len(first["metrics"]) + len(rest["metrics"]) == 1000
    both = {"run_id": run_id, "metrics": many[:1000], "params": [{"key": "p", "value": "v"}]}
    refused(client.http.post("runs/log-batch", json=both), 400, "INVALID_PARAMETER_VALUE")


def test_what_is_not_finite(client: Client) -> None:
    """NaN and the infinities come and go as texts, and a missing step is step 0."""
    run_id = client.run()
    for key, value in (("a", "NaN"), ("b", "Infinity"), ("c", "-Infinity")):
        client.post("runs/log-metric", {"run_id": run_id, "key": key, "value": value, "timestamp": 1})
    data = client.get("runs/get", run_id=run_id)["run"]["data"]
    assert [(item["value"], item["step"]) for item in data["metrics"]] == [
        ("NaN", 0),
        ("Infinity", 0),
        ("-Infinity", 0),
    ]


def test_steps_without_a_place_do_no_harm(client: Client) -> None:
    """A negative step is left out, and what came with it is stored."""
    run_id = client.run()
    client.post("runs/log-batch", {"run_id": run_id, "metrics": metrics("m", [1.0, 2.0], start=-1)})
    found = client.get("metrics/get-history", run_id=run_id, metric_key="m")["metrics"]
    assert [item["step"] for item in found] == [0]


FOREIGN: list[tuple[str, dict[str, Any]]] = [
    ("runs/log-metric", {"key": "m", "value": 1, "timestamp": 1, "step": 1}),
    ("runs/log-metric", {"key": "m", "value": 1, "timestamp": 1, "step": -1}),
    ("runs/log-batch", {}),
    ("runs/log-batch", {"metrics": [{"key": "m", "value": 1, "timestamp": 1, "step": -1}]}),
    ("runs/log-inputs", {"datasets": [{}]}),
    ("runs/outputs", {"models": [{}]}),
    ("runs/log-model", {}),
    ("runs/log-batch", {"params": [{"key": "p", "value": "v"}]}),
    ("runs/log-parameter", {"key": "p", "value": "v"}),
    ("runs/set-tag", {"key": "evalstop.checkpoint.1", "value": "s3://b/1"}),
    ("runs/delete-tag", {"key": "t"}),
    ("runs/update", {}),
    ("runs/update", {"status": "SCHEDULED", "end_time": 1}),
    ("runs/update", {"status": "RUNNING"}),
    ("runs/update", {"status": "FINISHED"}),
    ("runs/update", {"run_name": "mine"}),
    ("runs/delete", {}),
    ("runs/restore", {}),
]


def test_foreign_runs(service: Service, client: Client) -> None:
    """A run of another project is not there, whatever is said or asked of it, and stays as it is."""
    experiment_id = client.post("experiments/create", {"name": "a"})["experiment_id"]
    run_id = client.run(experiment_id=experiment_id, tags=[{"key": "t", "value": "v"}])
    before = client.get("runs/get", run_id=run_id)
    headers = {"Authorization": f"Bearer {service.key(service.project())}"}
    with httpx.Client(base_url=client.http.base_url, headers=headers, timeout=60, trust_env=False) as other:
        for verb, body in FOREIGN:
            refused(other.post(verb, json={"run_id": run_id} | body), 404, "RESOURCE_DOES_NOT_EXIST")
        for verb in ("runs/get", "artifacts/list", "metrics/get-history"):
            asked = {"run_id": run_id, "metric_key": "m"}
            refused(other.get(verb, params=asked), 404, "RESOURCE_DOES_NOT_EXIST")
        refused(other.get("experiments/get", params={"experiment_id": experiment_id}), 404, "RESOURCE_DOES_NOT_EXIST")
        for verb, body in (
            ("runs/create", {"experiment_id": experiment_id}),
            ("runs/search", {"experiment_ids": [experiment_id]}),
            *((f"experiments/{verb}", {"experiment_id": experiment_id}) for verb in ("delete", "restore")),
            ("experiments/update", {"experiment_id": experiment_id, "new_name": "b"}),
            ("experiments/set-experiment-tag", {"experiment_id": experiment_id, "key": "k", "value": "v"}),
            ("logged-models", {"experiment_id": experiment_id}),
            ("logged-models/search", {"experiment_ids": [experiment_id]}),
        ):
            refused(other.post(verb, json=body), 404, "RESOURCE_DOES_NOT_EXIST")
        assert taken(other.post("runs/search", json={"experiment_ids": ["0"]}))["runs"] == []
        found = taken(other.post("experiments/search", json={}))["experiments"]
        assert [item["name"] for item in found] == ["Default"]
    assert client.get("runs/get", run_id=run_id) == before


def test_a_refusal_is_no_fault(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """What is refused is not logged as a fault of the service, and the connection stays for the next request."""
    body = {"run_id": "0" * 32, "key": "m", "value": 1, "timestamp": 1}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            refused(client.http.post("runs/log-metric", json=body), 404, "RESOURCE_DOES_NOT_EXIST")
            refused(client.http.post("runs/log-metric", json=[]), 400, "INVALID_PARAMETER_VALUE")
            refused(client.http.post("runs/log-metric", content=b"{}"), 400, "INVALID_PARAMETER_VALUE")
    assert caplog.records == []


def test_what_is_kept_of_a_run(client: Client) -> None:
    """A tag takes the place of nothing that the service keeps or says of a run."""
    run_id = client.run(tags=[{"key": "mlflow.experiment", "value": "b"}])
    client.post("runs/log-parameter", {"run_id": run_id, "key": "lr", "value": "1"})
    before = client.record(run_id)["labels"]
    for key in (
        *("", "\x00", "mlflow.experiment", "mlflow.tee_run_id"),
        *("evalstop.best_checkpoint", "\x00evalstop.best_checkpoint", "mlflow.\x00tee_run_id"),
    ):
        if key:
            client.post("runs/set-tag", {"run_id": run_id, "key": key, "value": "v"})
            assert client.record(run_id)["labels"] == before, key
        body = {"run_id": run_id, "key": key}
        assert client.http.post("runs/delete-tag", json=body).status_code == 400 or "\x00" in key
    assert client.record(run_id)["labels"] == before
    assert client.get("runs/get", run_id=run_id)["run"]["info"]["experiment_id"] == "0"


def test_places_of_checkpoints(client: Client) -> None:
    """A checkpoint is known from the tag that tells of it, at the opening too; a place that is cut would be another."""
    run_id = client.run(tags=[{"key": "evalstop.checkpoint.1", "value": "s3://b/1"}])
    long = {"run_id": run_id, "key": "evalstop.checkpoint.2", "value": "s3://b/" + "2" * 2000}
    client.post("runs/set-tag", long)
    found = taken(client.api.get(f"/runs/{run_id}/checkpoints"))["items"]
    assert [(item["step"], item["uri"]) for item in found] == [(1, "s3://b/1")]


def test_names_that_are_taken(client: Client) -> None:
    """Runs of the same name are runs of their own, as in MLflow; both go by it there."""
    first, second = client.run(run_name="ppo"), client.run(run_name="ppo")
    assert first != second
    assert client.record(first)["name"] == "ppo"
    assert client.record(second)["name"] == "ppo-2"
    assert [client.record(client.run(run_name="ppo"))["name"] for _ in range(4)] == [f"ppo-{n}" for n in (3, 4, 5, 6)]
    assert client.get("runs/get", run_id=second)["run"]["info"]["run_name"] == "ppo"
    nameless = client.run(run_name="\x00", tags=[{"key": "k", "value": "a\x00b"}])
    assert client.tags(nameless)["k"] == "ab"


def test_tags_and_params(client: Client) -> None:
    """The first value of a param stands, the last of a tag; a tag can be deleted; runs end, go on and are hidden."""
    run_id = client.run()
    for value in ("1", "2"):
        client.post("runs/log-parameter", {"run_id": run_id, "key": "lr", "value": value})
        client.post("runs/set-tag", {"run_id": run_id, "key": "t", "value": value})
    run = client.get("runs/get", run_uuid=run_id)["run"]
    assert run["data"]["params"] == [{"key": "lr", "value": "1"}]
    assert client.tags(run_id)["t"] == "2"
    client.post("runs/delete-tag", {"run_id": run_id, "key": "t"})
    assert "t" not in client.tags(run_id)
    client.post("runs/update", {"run_id": run_id, "status": "KILLED"})
    assert client.record(run_id)["status"] == "failed"
    assert client.post("runs/update", {"run_id": run_id, "status": "RUNNING"})["run_info"]["status"] == "RUNNING"
    client.post("runs/delete", {"run_id": run_id})
    assert client.post("runs/search", {"experiment_ids": ["0"]})["runs"] == []
    client.post("runs/restore", {"run_id": run_id})
    assert len(client.post("runs/search", {"experiment_ids": ["0"]})["runs"]) == 1


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


BAD: list[tuple[str, Any]] = [
    ("runs/create", {"experiment_id": "no such"}),
    ("runs/log-metric", {"key": "m", "value": 1.0}),
    ("runs/log-metric", {"run_id": "%s", "key": "m", "value": "many"}),
    ("runs/log-metric", {"run_id": "%s", "key": "a(b)", "value": 1}),
    ("runs/log-metric", {"run_id": "0" * 32, "key": "m", "value": 1, "timestamp": 1}),
    ("runs/log-metric", {"run_id": "%s", "key": "m", "value": 1}),
    ("runs/log-batch", {"run_id": "0" * 32}),
    ("experiments/delete", {"experiment_id": "0"}),
    ("experiments/update", {"experiment_id": "1", "new_name": "b"}),
    ("runs/log-batch", {"run_id": "%s", "metrics": "m"}),
    ("runs/log-batch", {"run_id": "%s", "tags": [{"value": "v"}]}),
    ("runs/log-batch", []),
    ("runs/update", {"run_id": "%s", "status": "DONE"}),
    ("runs/set-tag", {"run_id": "../x", "key": "k", "value": "v"}),
    ("runs/delete-tag", {"run_id": "%s", "key": "mlflow.experiment"}),
    ("experiments/create", {"name": ""}),
    ("experiments/create", {"name": "a\x00"}),
]


@pytest.mark.parametrize(("verb", "body"), BAD)
def test_bad_input(client: Client, verb: str, body: Any) -> None:
    """What cannot be taken is refused at once, by a code that no client tries again, and says what is wrong."""
    run_id = client.run()
    if isinstance(body, dict) and body.get("run_id") == "%s":
        body = body | {"run_id": run_id}
    response = client.http.post(verb, json=body)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error_code"] in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
    assert len(response.json()["message"]) > 10


def test_no_json(client: Client) -> None:
    """A body that is no JSON is refused in MLflow's words."""
    headers = {"Content-Type": "application/json"}
    refused(client.http.post("runs/log-batch", content=b"{", headers=headers), 400, "INVALID_PARAMETER_VALUE")
    asked = {"run_id": client.run(), "metric_key": "a\x00"}
    refused(client.http.get("metrics/get-history", params=asked), 400, "INVALID_PARAMETER_VALUE")


def test_no_body_for_any_route(client: Client) -> None:
    """What is refused before any route is asked is refused in MLflow's words, and at once: it stays too large."""
    long = b" " * (8 * 2**20 + 1)
    said = refused(client.http.post("runs/log-batch", content=long), 400, "INVALID_PARAMETER_VALUE")
    assert "8388608 bytes" in said
    said = refused(client.http.post("runs/log-batch", content=iter([long])), 400, "INVALID_PARAMETER_VALUE")
    assert "8388608 bytes" in said
    said = refused(client.http.post("runs/log-batch", content=b"[" * 1_100_001), 400, "INVALID_PARAMETER_VALUE")
    assert "smaller batches" in said
    packed = {"Content-Encoding": "gzip"}
    said = refused(client.http.post("runs/log-batch", content=b"x", headers=packed), 400, "INVALID_PARAMETER_VALUE")
    assert "Content-Encoding" in said


def test_what_is_not_there(client: Client) -> None:
    """Registered models and traces are refused by name, at once."""
    message = refused(client.http.post("registered-models/create", json={"name": "m"}), 404, "ENDPOINT_NOT_FOUND")
    assert "registered-models/create" in message


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


def test_params_leave_room_for_tags(client: Client) -> None:
    """A run with more params than labels have room keeps them all, and the tags by which a receiver finds its job."""
    run_id = client.run()
    for start in range(0, 600, 100):
        params = [{"key": f"p{number}", "value": "v"} for number in range(start, start + 100)]
        client.post("runs/log-batch", {"run_id": run_id, "params": params})
    client.post("runs/set-tag", {"run_id": run_id, "key": "slurm_job_id", "value": "4711"})
    record = client.record(run_id)
    assert (len(record["params"]), record["labels"]["slurm_job_id"]) == (600, "4711")


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


def test_keys(service: Service, client: Client) -> None:
    """A key speaks as bearer or as password of any name; none, a wrong one, or one that may not, is told so."""
    run_id = client.run()
    project = service.project()
    ingest, read = service.key(project, "ingest"), service.key(project, "read")
    url = f"{client.http.base_url}experiments/get-by-name?experiment_name=Default"
    basic = base64.b64encode(f"anyone:{ingest}".encode()).decode()
    assert httpx.get(url, headers={"Authorization": f"Basic {basic}"}, trust_env=False).status_code == 200
    for header in (
        {},
        {"Authorization": "Bearer esk_no"},
        {"Authorization": "Basic !"},
        {"Authorization": "Basic YTo="},
    ):
        refused(httpx.get(url, headers=header, trust_env=False), 401, "UNAUTHENTICATED")
    body = {"run_id": run_id, "key": "m", "value": 1, "timestamp": 1}
    for key, status, code in ((read, 403, "PERMISSION_DENIED"), (ingest, 404, "RESOURCE_DOES_NOT_EXIST")):
        headers = {"Authorization": f"Bearer {key}"}
        response = httpx.post(f"{client.http.base_url}runs/log-metric", json=body, headers=headers, trust_env=False)
        refused(response, status, code)
    anonymous = httpx.post(f"{client.http.base_url}runs/log-batch", content=b"{", trust_env=False)
    refused(anonymous, 401, "UNAUTHENTICATED")
