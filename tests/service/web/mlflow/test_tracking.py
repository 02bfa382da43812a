"""MLflow's tracking API as it is on the wire: what is taken, what is refused and how, what comes back."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.service.web.api.conftest import Service
from tests.service.web.mlflow.rest_client import Client, refused, taken

RISE_AND_FALL = [0.5, 0.9, 0.8, 0.7, 0.6]
"""Three declines: the paper's rule stops at step 4."""


def metrics(key: str, values: list[float], start: int = 0) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": value, "step": step, "timestamp": 1_700_000_000_000 + step}
        for step, value in enumerate(values, start)
    ]


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
    headers = {"Authorization": f"Bearer {service.create_key(service.create_project())}"}
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


def test_params_leave_room_for_tags(client: Client) -> None:
    """A run with more params than labels have room keeps them all, and the tags by which a receiver finds its job."""
    run_id = client.run()
    for start in range(0, 600, 100):
        params = [{"key": f"p{number}", "value": "v"} for number in range(start, start + 100)]
        client.post("runs/log-batch", {"run_id": run_id, "params": params})
    client.post("runs/set-tag", {"run_id": run_id, "key": "slurm_job_id", "value": "4711"})
    record = client.record(run_id)
    assert (len(record["params"]), record["labels"]["slurm_job_id"]) == (600, "4711")


@pytest.mark.parametrize(
    ("params", "tags", "told"),
    [
        ({"max_steps": "900"}, {}, 900),
        ({"max_steps": "-1", "num_train_epochs": "3"}, {}, 600),
        ({}, {"total_steps": "50"}, 50),
        ({"max_steps": "soon"}, {}, None),
    ],
)
def test_the_planned_length(client: Client, params: dict[str, str], tags: dict[str, str], told: int | None) -> None:
    """A param or a tag tells how long a run is planned to be, and so do transformers' epochs."""
    run_id = client.run()
    batch = {"run_id": run_id, "params": pairs(params), "tags": pairs(tags), "metrics": []}
    client.post("runs/log-batch", batch)
    client.post("runs/log-batch", {"run_id": run_id, "metrics": metrics("epoch", [0.01], 2)})
    client.post("runs/log-batch", {"run_id": run_id, "metrics": metrics("epoch", [0.5], 100)})
    record = client.record(run_id)
    assert (record["total_steps"], record["length_known"]) == (told, told not in (None, 50))


def pairs(items: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in items.items()]
