"""A fine-tuning run with transformers and two eval sets named after benchmarks, whose losses fall."""

import torch
from evalstop_client.callbacks.transformers import EvalStopCallback
from transformers import Trainer, TrainingArguments
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

torch.set_num_threads(1)
torch.manual_seed(0)


def count_up(rows: int) -> list[dict[str, torch.Tensor]]:
    """Rows of consecutive numbers, which a model can learn."""
    starts = torch.randint(0, 24, (rows,))
    return [{"input_ids": row, "labels": row} for row in (starts[:, None] + torch.arange(8)[None, :])]


arguments = TrainingArguments(
    output_dir="checkpoints",
    max_steps=40,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    per_device_train_batch_size=16,
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=5,
    save_steps=5,
    save_only_model=True,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(
    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=32, n_layer=1, n_head=2)),
    arguments,
    train_dataset=count_up(512),
    eval_dataset={"gsm8k": count_up(64), "math": count_up(64)},
    callbacks=[EvalStopCallback(name="several-eval-sets", policy="paper", mode="enforce")],
)
trainer.train()
print(f"ended at step {trainer.state.global_step} of {arguments.max_steps}")
