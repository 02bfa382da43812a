"""MLflow's tracking API on the wire: what is accepted, ignored and refused, and what is returned."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.service.web.api.conftest import Service
from tests.service.web.mlflow.conftest import MlflowClient, expect_error, expect_json

RISE_AND_FALL = [0.5, 0.9, 0.8, 0.7, 0.6]
"""Three declines: the policy `paper` stops at step 4."""


def build_metrics(key: str, values: list[float], start: int = 0) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": value, "step": step, "timestamp": 1_700_000_000_000 + step}
        for step, value in enumerate(values, start)
    ]


def test_logged_evals_lead_to_a_stop(client: MlflowClient) -> None:
    """The run's tags tell its trainer to stop and which checkpoint is best."""
    experiment_id = client.post("experiments/create", {"name": "alignment"})["experiment_id"]
    tags = [{"key": "gpus", "value": "8"}]
    run_id = client.create_run(experiment_id=experiment_id, run_name="ppo", user_id="dana", tags=tags)
    client.post("runs/set-tag", {"run_id": run_id, "key": "evalstop.checkpoint.1", "value": "s3://b/1"})
    batch = {
        "run_id": run_id,
        "metrics": build_metrics("eval_accuracy", RISE_AND_FALL),
        "params": [{"key": "lr", "value": "1"}],
    }
    assert client.post("runs/log-batch", batch) == {}
    tags_after = client.get_tags(run_id)
    assert (tags_after["evalstop.should_stop"], tags_after["evalstop.verdict"]) == ("true", "stop")
    assert tags_after["evalstop.best_checkpoint"] == "s3://b/1"
    stored_run = client.get_run(run_id)
    assert stored_run["name"] == "alignment/ppo"
    assert stored_run["labels"]["gpus"] == "8"
    assert stored_run["params"] == {"lr": "1"}
    assert stored_run["metrics"] == {"eval_accuracy": {"role": "eval", "direction": "maximize"}}
    assert stored_run["should_stop"] is True
    run = client.get("runs/get", run_id=run_id)["run"]
    assert run["info"]["experiment_id"] == experiment_id
    assert run["data"]["metrics"][0]["value"] == RISE_AND_FALL[-1]
    assert client.post("runs/update", {"run_id": run_id, "status": "FINISHED"})["run_info"]["status"] == "FINISHED"
    assert client.get_run(run_id)["status"] == "completed"


def test_repeated_batch_changes_nothing(client: MlflowClient) -> None:
    """A value that contradicts the stored one is accepted and ignored."""
    run_id = client.create_run()
    batch = {"run_id": run_id, "metrics": build_metrics("eval_accuracy", [0.1, 0.2, 0.3])}
    client.post("runs/log-batch", batch)
    client.post("runs/log-batch", batch)
    conflicting = {"run_id": run_id, "key": "eval_accuracy", "value": 0.9, "timestamp": 1, "step": 1}
    assert client.post("runs/log-metric", conflicting) == {}
    history = client.get("metrics/get-history", run_id=run_id, metric_key="eval_accuracy")["metrics"]
    assert [(item["step"], item["value"]) for item in history] == [(0, 0.1), (1, 0.2), (2, 0.3)]
    assert history[0]["timestamp"] == 1_700_000_000_000


def test_batch_holds_at_most_1000_items(client: MlflowClient) -> None:
    """Metrics and params count together, as in MLflow."""
    run_id = client.create_run()
    many = build_metrics("m", [float(value) for value in range(1001)])
    client.post("runs/log-batch", {"run_id": run_id, "metrics": many[:1000]})
    message = expect_error(
        client.http.post("runs/log-batch", json={"run_id": run_id, "metrics": many}), 400, "INVALID_PARAMETER_VALUE"
    )
    assert "metrics" in message
    first = client.get("metrics/get-history", run_id=run_id, metric_key="m", max_results=600)
    rest = client.get("metrics/get-history", run_id=run_id, metric_key="m", page_token=first["next_page_token"])
    assert len(first["metrics"]) + len(rest["metrics"]) == 1000
    both = {"run_id": run_id, "metrics": many[:1000], "params": [{"key": "p", "value": "v"}]}
    expect_error(client.http.post("runs/log-batch", json=both), 400, "INVALID_PARAMETER_VALUE")


def test_non_finite_values_are_strings(client: MlflowClient) -> None:
    """NaN and the infinities are sent and returned as strings; a missing step is step 0."""
    run_id = client.create_run()
    for key, value in (("a", "NaN"), ("b", "Infinity"), ("c", "-Infinity")):
        client.post("runs/log-metric", {"run_id": run_id, "key": key, "value": value, "timestamp": 1})
    data = client.get("runs/get", run_id=run_id)["run"]["data"]
    assert [(item["value"], item["step"]) for item in data["metrics"]] == [
        ("NaN", 0),
        ("Infinity", 0),
        ("-Infinity", 0),
    ]


def test_negative_step_is_ignored(client: MlflowClient) -> None:
    """The other metrics of the batch are stored."""
    run_id = client.create_run()
    client.post("runs/log-batch", {"run_id": run_id, "metrics": build_metrics("m", [1.0, 2.0], start=-1)})
    history = client.get("metrics/get-history", run_id=run_id, metric_key="m")["metrics"]
    assert [item["step"] for item in history] == [0]


RUN_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("runs/log-metric", {"key": "m", "value": 1, "timestamp": 1, "step": 1}),
    ("runs/log-metric", {"key": "m", "value": 1, "timestamp": 1, "step": -1}),
    ("runs/log-batch", {}),
    ("runs/log-batch", {"metrics": [{"key": "m", "value": 1, "timestamp": 1, "step": -1}]}),
    ("runs/log-inputs", {"datasets": [{}]}),
    ("runs/outputs", {"models": [{}]}),
    ("runs/log-batch", {"params": [{"key": "p", "value": "v"}]}),
    ("runs/log-parameter", {"key": "p", "value": "v"}),
    ("runs/set-tag", {"key": "evalstop.checkpoint.1", "value": "s3://b/1"}),
    ("runs/update", {}),
    ("runs/update", {"status": "SCHEDULED", "end_time": 1}),
    ("runs/update", {"status": "RUNNING"}),
    ("runs/update", {"status": "FINISHED"}),
    ("runs/update", {"run_name": "mine"}),
]


def test_runs_of_another_project_are_not_found(service: Service, client: MlflowClient) -> None:
    """No request of another project reads or changes the run or its experiment."""
    experiment_id = client.post("experiments/create", {"name": "a"})["experiment_id"]
    run_id = client.create_run(experiment_id=experiment_id, tags=[{"key": "t", "value": "v"}])
    before = client.get("runs/get", run_id=run_id)
    headers = {"Authorization": f"Bearer {service.create_key(service.create_project())}"}
    with httpx.Client(base_url=client.http.base_url, headers=headers, timeout=60, trust_env=False) as other:
        for verb, body in RUN_REQUESTS:
            expect_error(other.post(verb, json={"run_id": run_id} | body), 404, "RESOURCE_DOES_NOT_EXIST")
        for verb in ("runs/get", "artifacts/list", "metrics/get-history"):
            params = {"run_id": run_id, "metric_key": "m"}
            expect_error(other.get(verb, params=params), 404, "RESOURCE_DOES_NOT_EXIST")
        expect_error(
            other.get("experiments/get", params={"experiment_id": experiment_id}), 404, "RESOURCE_DOES_NOT_EXIST"
        )
        for verb, body in (
            ("runs/create", {"experiment_id": experiment_id}),
            ("logged-models", {"experiment_id": experiment_id}),
        ):
            expect_error(other.post(verb, json=body), 404, "RESOURCE_DOES_NOT_EXIST")
        for own_id in (experiment_id, "0"):
            chosen = {"experiment_ids": [own_id]}
            assert expect_json(other.post("runs/search", json=chosen))["runs"] == []
        experiments = expect_json(other.post("experiments/search", json={}))["experiments"]
        assert [item["name"] for item in experiments] == ["Default"]
    assert client.get("runs/get", run_id=run_id) == before


def test_tags_cannot_change_labels_of_the_service(client: MlflowClient) -> None:
    """Tags with the names of such labels, also hidden by NUL, do not set them."""
    run_id = client.create_run(tags=[{"key": "mlflow.experiment", "value": "b"}])
    client.post("runs/log-parameter", {"run_id": run_id, "key": "lr", "value": "1"})
    before = client.get_run(run_id)["labels"]
    for key in (
        *("\x00", "mlflow.experiment", "mlflow.\x00experiment"),
        *("evalstop.best_checkpoint", "\x00evalstop.best_checkpoint"),
    ):
        client.post("runs/set-tag", {"run_id": run_id, "key": key, "value": "v"})
        assert client.get_run(run_id)["labels"] == before, key
    assert client.get_run(run_id)["labels"] == before
    assert client.get("runs/get", run_id=run_id)["run"]["info"]["experiment_id"] == "0"


def test_checkpoint_is_recorded_by_its_tag(client: MlflowClient) -> None:
    """A tag records a checkpoint, at the opening too; a URI that is too long is ignored, as cut it would be another."""
    run_id = client.create_run(tags=[{"key": "evalstop.checkpoint.1", "value": "s3://b/1"}])
    long_uri = {"run_id": run_id, "key": "evalstop.checkpoint.2", "value": "s3://b/" + "2" * 2000}
    client.post("runs/set-tag", long_uri)
    checkpoints = expect_json(client.api.get(f"/runs/{run_id}/checkpoints"))["items"]
    assert [(item["step"], item["uri"]) for item in checkpoints] == [(1, "s3://b/1")]


def test_runs_of_one_name_are_distinct(client: MlflowClient) -> None:
    """As in MLflow, each run keeps the name that it was given; here it has a number."""
    first, second = client.create_run(run_name="ppo"), client.create_run(run_name="ppo")
    assert first != second
    assert client.get_run(first)["name"] == "ppo"
    assert client.get_run(second)["name"] == "ppo-2"
    assert [client.get_run(client.create_run(run_name="ppo"))["name"] for _ in range(4)] == [
        f"ppo-{n}" for n in (3, 4, 5, 6)
    ]
    assert client.get("runs/get", run_id=second)["run"]["info"]["run_name"] == "ppo"
    nameless = client.create_run(run_name="\x00", tags=[{"key": "k", "value": "a\x00b"}])
    assert client.get_tags(nameless)["k"] == "ab"


def test_params_keep_their_first_value_and_tags_the_last(client: MlflowClient) -> None:
    """Runs are ended and resumed."""
    run_id = client.create_run()
    for value in ("1", "2"):
        client.post("runs/log-parameter", {"run_id": run_id, "key": "lr", "value": value})
        client.post("runs/set-tag", {"run_id": run_id, "key": "t", "value": value})
    run = client.get("runs/get", run_id=run_id)["run"]
    assert run["data"]["params"] == [{"key": "lr", "value": "1"}]
    assert client.get_tags(run_id)["t"] == "2"
    client.post("runs/update", {"run_id": run_id, "status": "KILLED"})
    assert client.get_run(run_id)["status"] == "failed"
    assert client.post("runs/update", {"run_id": run_id, "status": "RUNNING"})["run_info"]["status"] == "RUNNING"


def test_params_do_not_use_up_the_limit_of_labels(client: MlflowClient) -> None:
    """With 600 params a run keeps the tags by which a receiver finds its job."""
    run_id = client.create_run()
    for start in range(0, 600, 100):
        params = [{"key": f"p{number}", "value": "v"} for number in range(start, start + 100)]
        client.post("runs/log-batch", {"run_id": run_id, "params": params})
    client.post("runs/set-tag", {"run_id": run_id, "key": "slurm_job_id", "value": "4711"})
    stored_run = client.get_run(run_id)
    assert (len(stored_run["params"]), stored_run["labels"]["slurm_job_id"]) == (600, "4711")


@pytest.mark.parametrize(
    ("params", "tags", "total_steps"),
    [
        ({"max_steps": "900"}, {}, 900),
        ({"max_steps": "-1", "num_train_epochs": "3"}, {}, 600),
        ({}, {"total_steps": "50"}, 50),
        ({"max_steps": "soon"}, {}, None),
    ],
)
def test_planned_length_is_read_from_params_and_tags(
    client: MlflowClient, params: dict[str, str], tags: dict[str, str], total_steps: int | None
) -> None:
    """Without either it is computed from the epochs that transformers logs."""
    run_id = client.create_run()
    batch = {"run_id": run_id, "params": build_items(params), "tags": build_items(tags), "metrics": []}
    client.post("runs/log-batch", batch)
    client.post("runs/log-batch", {"run_id": run_id, "metrics": build_metrics("epoch", [0.01], 2)})
    client.post("runs/log-batch", {"run_id": run_id, "metrics": build_metrics("epoch", [0.5], 100)})
    stored_run = client.get_run(run_id)
    assert (stored_run["total_steps"], stored_run["length_known"]) == (total_steps, total_steps not in (None, 50))


def build_items(items: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in items.items()]
