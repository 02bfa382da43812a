"""Runs examples as programs: one by itself, or those of all frameworks in one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from evalstop_lab.service_process import Service

from tests.acceptance.docs import trainer_snippets
from tests.acceptance.docs.connect_pages import read_block
from tests.acceptance.examples.conftest import build_environment, open_api

EXAMPLES = Path(__file__).parents[3] / "examples"
TIMEOUT_SECONDS = 560.0  # importing a framework takes up to 30 s
EXPECTED_WARNINGS = (
    "this run is called",
    "without a value of its eval",
    "the stop is requested",
    "no endpoint subscribes",
    "is to continue from step",
)
"""Of scripts that start two runs with one name, log no eval, are stopped, cannot be parked by anything, and copy
another run."""
END_LINE = re.compile(r"ended at step (\d+) of (\d+)")


def run_example(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Run an example, which must succeed without an unexpected warning; returns its output."""
    result = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if "evalstop:" in line]
    unexpected = [line for line in lines if not any(words in line for words in EXPECTED_WARNINGS)]
    assert unexpected == [], unexpected
    return result.stdout


def find_run(service: Service, name: str) -> dict[str, Any]:
    """The only run whose name contains `name`."""
    with open_api(service) as api:
        (run,) = api.get("/runs", params={"name": name}).raise_for_status().json()["items"]
    return dict(run)


CALLBACK_EXAMPLES = ("transformers_trainer", "lightning_trainer", "keras_fit")

RUN_ALL_SCRIPT = """
import gc, os, runpy, sys
from pathlib import Path
gc.set_threshold(100_000, 20, 20)  # collections would take a tenth of the time: what is imported is never freed
import torch._dynamo  # each rank would import it at its first step
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def run(file):
    runpy.run_path(file, run_name="__main__")

def run_ranks(file):  # as torchrun does, but forked, so that torch is imported once
    ranks = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork")
    elastic_launch(ranks, run)(file)

for example in map(Path, sys.argv[1:]):
    folder = Path.cwd() / example.stem
    folder.mkdir()
    os.chdir(folder)
    print(f"example: {example.stem}", flush=True)
    (run_ranks if example.stem == "pytorch_ddp" else run)(str(example))
    os.chdir(folder.parent)
"""

RESUMED_SCRIPT = """
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

PINNED_SCRIPT = """
from pathlib import Path
import torch
from evalstop_client.callbacks.transformers import EvalStopCallback
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

class Score(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        trainer.log({"score": (1.0, 9.0, 3.0, 2.0, 1.0)[state.global_step - 1]})

class Flush(TrainerCallback):
    def on_prediction_step(self, args, state, control, **kwargs):
        watch._run.flush(60)  # the service names the best checkpoint during the eval, before the next is saved

watch = EvalStopCallback(name="pinned", metrics={"score": {"role": "eval"}})
rows = [{"input_ids": words, "labels": words} for words in torch.randint(0, 32, (16, 8))]
trainer = Trainer(
    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=32, n_layer=1, n_head=2)),
    TrainingArguments(
        output_dir="pinned",
        max_steps=5,
        logging_strategy="no",
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_total_limit=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=rows,
    eval_dataset=rows,
    callbacks=[Score(), watch, Flush()],
)
trainer.train()
print(sorted(path.name for path in Path("pinned").iterdir()))
"""


ENFORCED_SCRIPT = """
import os, httpx
project = {"default_policy": "paper", "default_mode": "enforce", "max_mode": "enforce", "held_out_share": 0}
project |= {"veto_window_seconds": 0, "stops_per_hour": None, "stops_share": None}
key = {"Authorization": f"Bearer {os.environ['EVALSTOP_KEY']}"}
address = f"{os.environ['EVALSTOP_URL']}/api/v1/project"
httpx.patch(address, json=project, headers=key, timeout=60, trust_env=False).raise_for_status()
"""
"""For what follows, which does not ask for a policy or mode."""

MLFLOW_TRAINERS = ("lightning", "optuna", "artifacts", "fluent", "transformers")
"""The last one sets MLflow's experiment for whatever runs after it in its process."""


def write_documented_script() -> str:
    """The code of the pages on callbacks, in trainers whose evals fall and a loop that a person stops."""
    parts = (
        read_block("callbacks tab") + "(callback,) = callbacks",
        trainer_snippets.TRANSFORMERS_TRAINER.replace("eval_gsm8k", "eval_accuracy"),
        "import os\nos.environ['EVALSTOP_RUN_NAME'] = 'tuned'",
        read_block("transformers"),
        trainer_snippets.TRANSFORMERS_TRAINER,
        "del os.environ['EVALSTOP_RUN_NAME']",
        trainer_snippets.LOSS_STOPPED_BY_A_PERSON,
        read_block("many processes"),
    )
    return "\n".join(parts)


QUICK_EXAMPLES = ("transformers_trainer", "mlflow_client")
"""What tests without the mark `nightly` look at."""


class Outputs(dict[str, str]):
    """The output of each framework's example. They run one after another in one process, which imports torch once."""

    def __init__(self, service: Service, folder: Path) -> None:
        super().__init__()
        self._service, self._folder = service, folder

    def __missing__(self, name: str) -> str:
        files = [EXAMPLES / f"{quick}.py" for quick in QUICK_EXAMPLES]
        if name not in QUICK_EXAMPLES:
            files = self._list_other_files()
        folder = self._folder / name
        folder.mkdir()
        command = [sys.executable, "-c", RUN_ALL_SCRIPT, *map(str, files)]
        parts = run_example(command, build_environment(self._service, folder), folder).split("example: ")[1:]
        self.update({name: output for name, _, output in (part.partition("\n") for part in parts)})
        return self[name]

    def _list_other_files(self) -> list[Path]:
        scripts = {"resumed": RESUMED_SCRIPT, "pinned": PINNED_SCRIPT, "enforced": ENFORCED_SCRIPT}
        scripts["documented"] = write_documented_script()
        written = {name: self._folder / f"{name}.py" for name in scripts}
        for name, script in scripts.items():
            written[name].write_text(script)
        here = Path(__file__).parent
        return [
            # The ranks are forked first, before other examples start threads.
            *(EXAMPLES / f"{name}.py" for name in ("pytorch_ddp", *CALLBACK_EXAMPLES[1:], "trl_grpo")),
            written["resumed"],
            written["pinned"],
            *(here / f"{name}.py" for name in ("several_eval_sets", "train_twice")),
            written["enforced"],
            *(here / "mlflow_trainers" / f"mlflow_{name}.py" for name in MLFLOW_TRAINERS),
            written["documented"],  # the runs would be found by a search of an MLflow trainer
        ]
