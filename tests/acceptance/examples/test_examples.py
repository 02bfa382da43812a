"""Every example does what it says, as a program, with the real framework, against a real service."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from evalstop_lab.service_process import Service

from tests.acceptance.examples.conftest import environment_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[3] / "examples"
PATIENCE_SECONDS = 560.0  # a framework alone takes half a minute to import on a busy machine
CALLBACKS = ("transformers_trainer", "lightning_trainer", "keras_fit")
EXPECTED = ("this run is called", "without a value of its eval")
"""Warnings of the scripts that start twice by one name, and of those that log no eval."""
ENDED = re.compile(r"ended at step (\d+) of (\d+)")


def play(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """What an example prints; it has to end well."""
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if "evalstop:" in line]
    complaints = [line for line in lines if not any(words in line for words in EXPECTED)]
    assert complaints == []
    return done.stdout


def run_of(service: Service, name: str) -> dict[str, Any]:
    """The one run whose name begins so, as the service has it."""
    headers = {"Authorization": f"Bearer {service.key}"}
    with httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, trust_env=False) as api:
        (found,) = api.get("/runs", params={"name": name}).raise_for_status().json()["items"]
    return dict(found)


def stopped(service: Service, name: str, said: str) -> dict[str, Any]:
    """The run, which was stopped at its turn, before its end, by the service's word, with a checkpoint to ship."""
    ((at, planned),) = set(ENDED.findall(said))
    assert int(at) < int(planned)
    run = run_of(service, name)
    assert run["decision"] is not None
    assert run["decision"]["state"] == "obeyed"
    assert run["status"] != "running"
    best = run["best_checkpoint"]
    assert best["step"] < run["decision"]["verdict"]["step"]
    assert Path(best["uri"].removeprefix("file://")).exists()
    return run


def test_a_plain_loop_is_stopped(service: Service, environment: dict[str, str], tmp_path: Path) -> None:
    """The example of the README, with a model that learns noise by heart."""
    said = play([sys.executable, str(EXAMPLES / "plain_loop.py")], environment, tmp_path)
    run = stopped(service, "plain-loop", said)
    assert run["best_checkpoint"]["uri"] in said


def test_all_ranks_stop_at_the_same_step(service: Service, environment: dict[str, str], tmp_path: Path) -> None:
    """Two real processes under DDP and gloo: one poster, and nobody is left waiting for the other."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = play([*command, str(EXAMPLES / "pytorch_ddp.py")], environment, tmp_path)
    assert len(ENDED.findall(said)) == 2
    stopped(service, "pytorch-ddp", said)


ONE_BY_ONE = """
import os, runpy, sys
from pathlib import Path

for example in map(Path, sys.argv[1:]):
    folder = Path.cwd() / example.stem
    folder.mkdir()
    os.chdir(folder)
    print(f"example: {example.stem}")
    runpy.run_path(str(example), run_name="__main__")
    os.chdir(folder.parent)
"""

RESUMING = """
from evalstop_client import Run
from evalstop_client.callbacks.transformers import EvalStopCallback
from transformers import TrainerControl, TrainerState, TrainingArguments

with Run(name="resumed") as before:
    for step in range(10, 90, 10):
        before.log({"loss": 1.0}, step=step)
arguments = TrainingArguments(output_dir="checkpoints", use_cpu=True, report_to="none")
state, control = TrainerState(global_step=50, max_steps=100), TrainerControl()
callback = EvalStopCallback(name="resumed", metrics=None)
callback.on_train_begin(arguments, state, control)
state.global_step = 60
callback.on_log(arguments, state, control, {"loss": 2.0, "note": "no number"})
callback.on_train_end(arguments, state, control)
"""

PINNED = """
from pathlib import Path
from evalstop_client.callbacks.transformers import EvalStopCallback
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

arguments = TrainingArguments(output_dir="checkpoints", save_total_limit=2, use_cpu=True, report_to="none")
callback = EvalStopCallback(name="pinned", metrics={"score": {"role": "eval"}})
state, control = TrainerState(max_steps=100), TrainerControl()
callback.on_train_begin(arguments, state, control)
for step, score in ((10, 1.0), (20, 9.0), (30, 3.0), (40, 2.0), (50, 1.0)):
    state.global_step = step
    callback.on_log(arguments, state, control, {"score": score})
    callback.on_step_end(arguments, state, control)
    Path(f"checkpoints/checkpoint-{step}").mkdir(parents=True)
    rotate_checkpoints("checkpoints", arguments.save_total_limit, state.best_model_checkpoint)  # as the Trainer does
    callback.on_save(arguments, state, control)
    callback._run.run.flush(60)
callback.on_train_end(arguments, state, control)
print(sorted(path.name for path in Path("checkpoints").iterdir()))
"""


@pytest.fixture(scope="module")
def printed(service: Service, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example with a framework prints: one after another in one process, which imports torch once."""
    folder = tmp_path_factory.mktemp("callbacks")
    resumed = folder / "resumed.py"
    resumed.write_text(RESUMING)
    pinned = folder / "pinned.py"
    pinned.write_text(PINNED)
    examples = [EXAMPLES / f"{name}.py" for name in (*CALLBACKS, "trl_grpo", "mlflow_client")]
    beside = Path(__file__).parent
    files = [
        *examples,
        resumed,
        pinned,
        beside / "several_eval_sets.py",
        beside / "kubeflow_reporter.py",
        beside / "train_twice.py",
    ]
    command = [sys.executable, "-c", ONE_BY_ONE, *map(str, files)]
    parts = play(command, environment_of(service, folder), folder).split("example: ")[1:]
    return {name: said for name, _, said in (part.partition("\n") for part in parts)}


@pytest.mark.parametrize("example", CALLBACKS)
def test_a_framework_is_stopped_by_its_callback(example: str, service: Service, printed: dict[str, str]) -> None:
    """The trainer's own logs and checkpoints are the run's, and it ends the training by its own means."""
    run = stopped(service, example.replace("_", "-"), printed[example])
    roles = {role["role"]: metric for metric, role in run["metrics"].items()}
    assert roles["eval"] in ("eval_loss", "val_loss")  # nobody said so


def test_a_training_that_goes_on_says_so(service: Service, printed: dict[str, str]) -> None:
    """From its checkpoint of step 50 on: what was logged after it belongs to an attempt that is over."""
    assert "resumed" in printed
    run = run_of(service, "resumed")
    assert (run["attempt"], run["last_step"], run["status"], run["total_steps"]) == (2, 60, "completed", 100)


def test_the_best_checkpoint_outlives_save_total_limit(printed: dict[str, str]) -> None:
    """transformers deletes all but two, and leaves the one that EvalStop calls the best beside the newest."""
    assert printed["pinned"].strip() == "['checkpoint-20', 'checkpoint-50']"


@pytest.mark.parametrize("framework", ["transformers", "keras"])
def test_a_second_training_of_a_script_is_a_run_of_its_own(
    framework: str, service: Service, printed: dict[str, str]
) -> None:
    """`Trainer.train()` twice and `fit()` twice with one callback: both are watched, the second as name-2."""
    assert "train_twice" in printed
    again = run_of(service, f"twice-{framework}-2")
    assert (again["status"], again["attempt"], again["last_step"]) == ("completed", 1, 4)
    headers = {"Authorization": f"Bearer {service.key}"}
    with httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, trust_env=False) as api:
        found = api.get("/runs", params={"name": f"twice-{framework}"}).raise_for_status().json()["items"]
    assert [(run["name"], run["last_step"]) for run in found] == [
        (f"twice-{framework}-2", 4),
        (f"twice-{framework}", 4),
    ]


def test_a_policy_that_cheats_its_reward_is_stopped(service: Service, printed: dict[str, str]) -> None:
    """TRL's GRPO: the score that is not optimized is declared, so that it may stop the run."""
    run = stopped(service, "trl-grpo", printed["trl_grpo"])
    roles = {role["role"]: metric for metric, role in run["metrics"].items()}
    assert (roles["eval"], roles["proxy"], roles["kl"]) == ("eval_score", "reward", "kl")
    assert set(run["recognition"]["origins"].values()) == {"declared"}


def test_falling_losses_of_several_eval_sets_stop_nothing(service: Service, printed: dict[str, str]) -> None:
    """They are named after benchmarks and minimized: the run has its time, and its best checkpoint is a late one."""
    assert ENDED.findall(printed["several_eval_sets"]) == [("100", "100")]
    run = run_of(service, "several-eval-sets")
    assert run["metrics"]["eval_gsm8k_loss"] == {"role": "eval", "direction": "minimize"}
    assert run["recognition"]["origins"]["eval_gsm8k_loss"] == "recognized"
    assert run["decision"] is None
    assert run["best_checkpoint"]["step"] > 50


def test_one_trial_of_ray_tune_is_stopped(service: Service, environment: dict[str, str], tmp_path: Path) -> None:
    """And the other one, which goes on rising, has its time."""
    said = play([sys.executable, str(EXAMPLES / "ray_tune.py")], environment, tmp_path)
    (rising, falling) = sorted(ENDED.findall(said), key=lambda found: -int(found[0]))
    assert rising[0] == rising[1]
    assert int(falling[0]) < int(falling[1])


def test_a_client_of_mlflow_is_watched(service: Service, printed: dict[str, str]) -> None:
    """It knows nothing of it: its run has roles and a decision, in the shadow as every project begins."""
    assert "mlflow_client" in printed
    run = run_of(service, "mlflow-client")
    assert {role["role"]: metric for metric, role in run["metrics"].items()} == {
        "eval": "eval_accuracy",
        "proxy": "reward",
        "kl": "kl",
    }
    assert (run["status"], run["last_step"], run["labels"]["gpus"]) == ("completed", 290, "1")


def test_the_kubeflow_callback_of_transformers_ends_here(service: Service, printed: dict[str, str]) -> None:
    """Unmodified, with nothing but an address and a file that holds a key."""
    assert "kubeflow_reporter" in printed
    run = run_of(service, "from-a-pod")
    assert run["total_steps"] == 10
    headers = {"Authorization": f"Bearer {service.key}"}
    with httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, trust_env=False) as api:
        page = api.get(f"/runs/{run['id']}/observations", params={"metric": "eval_accuracy"}).raise_for_status().json()
    assert [(item["step"], item["value"]) for item in page["items"]] == [(5, 0.25)]


def test_three_requests_by_curl_are_a_trainer(service: Service, environment: dict[str, str], tmp_path: Path) -> None:
    """In a shell, with nothing of ours installed."""
    if shutil.which("curl") is None:
        assert os.environ.get("CI") != "true", "there is no curl to run the example with"
        pytest.skip("there is no curl to run the example with")
    said = play(["bash", str(EXAMPLES / "curl.sh")], environment, tmp_path)
    assert ENDED.findall(said) == [("80", "1000")]
    assert run_of(service, "curl")["best_checkpoint"]["step"] == 50


def test_every_example_is_in_the_index() -> None:
    """And the index names none that is not there."""
    named = re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(named) == sorted(file.name for file in EXAMPLES.iterdir() if file.name != "README.md")
