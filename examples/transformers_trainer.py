"""transformers' Trainer, watched: `python examples/transformers_trainer.py`.

The callback is all that is new. A tiny model learns a few random sentences by heart, so that its loss on held-out ones
turns after some steps. TRL, Axolotl and LLaMA-Factory train by this Trainer and take the same callback.
"""

import torch
from evalstop_client.callbacks.transformers import EvalStopCallback
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.set_num_threads(1)
torch.manual_seed(0)


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": words, "labels": words} for words in torch.randint(0, 32, (count, 8))]


model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=32, n_layer=1, n_head=2))
arguments = TrainingArguments(
    output_dir="checkpoints",
    max_steps=3_000,
    learning_rate=3e-3,
    per_device_train_batch_size=8,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=10,
    save_steps=10,
    save_only_model=True,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
watch = EvalStopCallback(
    name="transformers-trainer",
    policy="paper",
    mode="enforce",
)
trainer = Trainer(model, arguments, train_dataset=sentences(16), eval_dataset=sentences(64), callbacks=[watch])
trainer.train()
print(f"ended at step {trainer.state.global_step} of {arguments.max_steps}")
