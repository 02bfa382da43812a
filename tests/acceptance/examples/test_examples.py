"""Every example runs as a program, with the real framework, against a real service."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from evalstop_lab.service_process import Service

from tests.acceptance.examples.conftest import open_api
from tests.acceptance.examples.programs import CALLBACK_EXAMPLES, END_LINE, EXAMPLES, Outputs, find_run, run_example

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def assert_stopped(service: Service, name: str, output: str) -> dict[str, Any]:
    """Check that the service stopped the run after its turn and before its end, with a checkpoint that exists."""
    ((end, planned),) = set(END_LINE.findall(output))
    assert int(end) < int(planned)
    run = find_run(service, name)
    assert run["decision"] is not None
    assert run["decision"]["state"] == "obeyed"
    assert run["status"] != "running"
    best = run["best_checkpoint"]
    assert best["step"] < run["decision"]["verdict"]["step"]
    assert Path(best["uri"].removeprefix("file://")).exists()
    return run


def test_plain_loop_is_stopped(service: Service, environment: dict[str, str], tmp_path: Path) -> None:
    """The example of the README, with a model that overfits, prints the checkpoint to ship."""
    output = run_example([sys.executable, str(EXAMPLES / "plain_loop.py")], environment, tmp_path)
    run = assert_stopped(service, "plain-loop", output)
    assert run["best_checkpoint"]["uri"] in output


@pytest.fixture(scope="module")
def outputs(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return Outputs(service, tmp_path_factory.mktemp("callbacks"))


@pytest.mark.nightly
def test_all_ranks_stop_at_the_same_step(service: Service, outputs: Outputs) -> None:
    """With two processes under DDP and gloo, one posts and both end at the same step."""
    assert len(END_LINE.findall(outputs["pytorch_ddp"])) == 2
    assert_stopped(service, "pytorch-ddp", outputs["pytorch_ddp"])


@pytest.mark.parametrize(
    "example",
    [CALLBACK_EXAMPLES[0], *(pytest.param(name, marks=pytest.mark.nightly) for name in CALLBACK_EXAMPLES[1:])],
)
def test_framework_is_stopped_by_its_callback(example: str, service: Service, outputs: Outputs) -> None:
    """The framework's own metrics and checkpoints are used, and the framework ends the training."""
    run = assert_stopped(service, example.replace("_", "-"), outputs[example])
    roles = {role["role"]: metric for metric, role in run["metrics"].items()}
    assert roles["eval"] in ("eval_loss", "val_loss")  # recognized, not declared


@pytest.mark.nightly
def test_resumed_training_starts_a_new_attempt(service: Service, outputs: Outputs) -> None:
    """Resuming from the checkpoint of step 50 supersedes what was logged after it."""
    assert outputs["resumed"] is not None
    run = find_run(service, "resumed")
    assert (run["attempt"], run["last_step"], run["status"], run["total_steps"]) == (2, 60, "completed", 100)


@pytest.mark.nightly
def test_best_checkpoint_survives_save_total_limit(outputs: Outputs) -> None:
    """transformers keeps the newest checkpoint and the one that EvalStop calls the best, also after the training."""
    assert outputs["pinned"].splitlines()[-1] == "['checkpoint-2', 'checkpoint-5']"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("framework", "steps"),
    [("transformers", {"twice-transformers": 4, "twice-transformers-2": 4}), ("keras", {"twice-keras": 8})],
)
def test_training_again(framework: str, steps: dict[str, int], service: Service, outputs: Outputs) -> None:
    """`Trainer.train()` called twice with one callback gives two runs; `fit()` of Keras goes on with the same model."""
    assert outputs["train_twice"] is not None
    with open_api(service) as api:
        runs = api.get("/runs", params={"name": f"twice-{framework}"}).raise_for_status().json()["items"]
    assert {run["name"]: run["last_step"] for run in runs} == steps
    assert {(run["status"], run["attempt"]) for run in runs} == {("completed", 1)}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["callback-1", "tuned", "sft-7b"])
def test_documented_callbacks_end_with_a_stop(name: str, service: Service, outputs: Outputs) -> None:
    """One added line stops a trainer that declares no roles, as does the policy of the page one that declares them; the
    distributed run is stopped by a person."""
    assert outputs["documented"] is not None
    assert find_run(service, name)["decision"]["state"] == "obeyed"


@pytest.mark.nightly
def test_reward_hacking_in_grpo_is_stopped(service: Service, outputs: Outputs) -> None:
    """In TRL's GRPO the score that is not optimized is declared as eval, so that it can stop the run."""
    run = assert_stopped(service, "trl-grpo", outputs["trl_grpo"])
    roles = {role["role"]: metric for metric, role in run["metrics"].items()}
    assert (roles["eval"], roles["proxy"], roles["kl"]) == ("eval_score", "reward", "kl")
    assert set(run["recognition"]["origins"].values()) == {"declared"}


@pytest.mark.nightly
def test_improving_losses_of_several_eval_sets_stop_nothing(service: Service, outputs: Outputs) -> None:
    """Losses named after benchmarks are minimized: the run ends as planned, with a late best checkpoint."""
    assert END_LINE.findall(outputs["several_eval_sets"]) == [("40", "40")]
    run = find_run(service, "several-eval-sets")
    for metric in ("eval_gsm8k_loss", "eval_math_loss"):
        assert run["metrics"][metric] == {"role": "eval", "direction": "minimize"}
        assert run["recognition"]["origins"][metric] == "recognized"
    assert run["decision"] is None
    assert run["best_checkpoint"]["step"] > 20


def test_mlflow_client_is_watched(service: Service, outputs: Outputs) -> None:
    """An unmodified MLflow script gets roles and stays in shadow mode, as in every new project."""
    assert outputs["mlflow_client"] is not None
    run = find_run(service, "mlflow-client")
    assert {role["role"]: metric for metric, role in run["metrics"].items()} == {
        "eval": "eval_accuracy",
        "proxy": "reward",
        "kl": "kl",
    }
    assert (run["status"], run["last_step"], run["labels"]["gpus"]) == ("completed", 290, "1")


def read_runs(service: Service, output: str) -> list[dict[str, Any]]:
    """The runs whose ids an MLflow trainer printed, with the values of their metrics."""
    ids = [line for line in output.splitlines() if len(line) == 32 and line.isalnum()]
    assert ids, output
    with open_api(service) as api:
        return [get_run_with_series(api, run_id) for run_id in ids]


def get_run_with_series(client: httpx.Client, run_id: str) -> dict[str, Any]:
    document: dict[str, Any] = client.get(f"/runs/{run_id}").raise_for_status().json()
    series = {}
    for metric in document["metrics"]:
        page = client.get(f"/runs/{run_id}/observations", params={"metric": metric}).raise_for_status().json()
        series[metric] = [(item["step"], item["value"]) for item in page["items"]]
    return document | {"series": series}


@pytest.mark.nightly
def test_fluent_api_run_is_recognized_and_stopped(service: Service, outputs: Outputs) -> None:
    """Roles are recognized by name, the first value counts, and the run is stopped, also with asynchronous logging."""
    (run,) = read_runs(service, outputs["mlflow_fluent"])
    assert run["name"] == "alignment/ppo"
    assert {role["role"]: metric for metric, role in run["metrics"].items()} == {
        "eval": "eval_accuracy",
        "proxy": "reward",
        "kl": "kl",
        "loss": "loss",
        "gradient_norm": "grad_norm",
    }
    assert run["series"]["eval_accuracy"] == [(0, 0.5), (1, 0.9), (2, 0.8), (3, 0.7), (4, 0.6)]
    assert run["series"]["loss"] == [(0, "Infinity")]
    assert (run["status"], run["verdict"]["verdict"], run["labels"]["gpus"]) == ("completed", "stop", "8")


@pytest.mark.nightly
def test_transformers_trainer_is_recorded(service: Service, outputs: Outputs) -> None:
    """Every eval has its step, the arguments are params, the saved models are checkpoints, and the run is completed."""
    (run,) = read_runs(service, outputs["mlflow_transformers"])
    assert run["best_checkpoint"]["step"] == 6
    eval_metric = next(metric for metric, role in run["metrics"].items() if role["role"] == "eval")
    assert eval_metric == "eval_accuracy"
    assert [step for step, _ in run["series"][eval_metric]] == [2, 4, 6]
    assert run["params"]["max_steps"] == "6"
    assert run["status"] == "completed"


@pytest.mark.nightly
def test_lightning_logger_and_autologging_are_recorded(service: Service, outputs: Outputs) -> None:
    """The validation score is the eval metric, at the steps of its values; a saved file is the best checkpoint."""
    run, autologged = read_runs(service, outputs["mlflow_lightning"])
    assert run["best_checkpoint"]["step"] in (3, 7, 11)
    assert "epoch=" in run["best_checkpoint"]["uri"]
    assert run["name"] == "lines/tiny"
    assert run["recognition"]["sources"].keys() == run["metrics"].keys()
    eval_metric = next(metric for metric, role in run["metrics"].items() if role["role"] == "eval")
    assert eval_metric == "val_accuracy"
    assert len(run["series"][eval_metric]) == 3
    assert run["status"] == "completed"
    assert autologged["name"].startswith("autologged/")
    assert autologged["status"] == "completed"
    assert len(autologged["series"]["val_accuracy"]) == 2


@pytest.mark.nightly
def test_optuna_trials_are_runs_of_one_experiment(service: Service, outputs: Outputs) -> None:
    """Each trial is a run of the study's experiment, with its parameters."""
    trials = read_runs(service, outputs["mlflow_optuna"])
    assert len(trials) == 3
    assert {run["labels"]["mlflow.experiment"] for run in trials} == {"widths"}
    assert all("x" in run["params"] for run in trials)


@pytest.mark.nightly
def test_unsupported_calls_do_not_fail_the_job(service: Service, outputs: Outputs) -> None:
    """Trackers, 568 params, artifacts, models, inputs and searches leave room for the job's tags."""
    (run,) = read_runs(service, outputs["mlflow_artifacts"])
    assert (run["name"], run["status"], len(run["params"])) == ("scripts/ppo", "completed", 569)
    assert run["labels"]["slurm_job_id"] == "4711"


def test_curl_example_is_stopped(service: Service, environment: dict[str, str], tmp_path: Path) -> None:
    """Three requests make a trainer, without EvalStop's client."""
    if shutil.which("curl") is None:
        assert os.environ.get("CI") != "true", "the example needs curl"
        pytest.skip("the example needs curl")
    output = run_example(["bash", str(EXAMPLES / "curl.sh")], environment, tmp_path)
    assert END_LINE.findall(output) == [("80", "1000")]
    assert find_run(service, "curl")["best_checkpoint"]["step"] == 50


def test_index_lists_every_example() -> None:
    """examples/README.md links to exactly the files of the folder."""
    linked = re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(linked) == sorted(file.name for file in EXAMPLES.iterdir() if file.name != "README.md")
