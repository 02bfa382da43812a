"""The Trainer of transformers with `report_to="mlflow"` on a tiny model, with its checkpoints; prints the run's id."""

from __future__ import annotations

from typing import Any

import mlflow
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)


class RunIdCallback(TrainerCallback):
    """Stores the id of the run that transformers' own callback opened."""

    run_id = ""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        run = mlflow.active_run()
        RunIdCallback.run_id = run.info.run_id if run is not None else self.run_id


model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
)
data = [{"input_ids": torch.randint(0, 16, (6,)), "labels": torch.randint(0, 16, (6,))} for _ in range(8)]
arguments = TrainingArguments(
    output_dir="output",
    run_name="tiny",
    report_to="mlflow",
    max_steps=6,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    per_device_train_batch_size=2,
    use_cpu=True,
    disable_tqdm=True,
    save_strategy="steps",
    save_steps=3,
)
Trainer(
    model=model,
    args=arguments,
    train_dataset=data,
    eval_dataset=data,
    compute_metrics=lambda _: {"accuracy": 0.5},
    callbacks=[RunIdCallback()],
).train()
mlflow.flush_async_logging()
print(RunIdCallback.run_id)
