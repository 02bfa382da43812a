"""Calls `Trainer.train()` and Keras' `fit()` twice with one callback, as in a notebook."""

import keras
import numpy as np
import torch
from evalstop_client.callbacks import keras as keras_callback
from evalstop_client.callbacks import transformers as transformers_callback
from transformers import Trainer, TrainingArguments
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

torch.set_num_threads(1)
torch.manual_seed(0)
rows = [{"input_ids": words, "labels": words} for words in torch.randint(0, 32, (16, 8))]
arguments = TrainingArguments(
    output_dir="checkpoints",
    max_steps=4,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(
    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=32, n_layer=1, n_head=2)),
    arguments,
    train_dataset=rows,
    callbacks=[transformers_callback.EvalStopCallback(name="twice-transformers")],
)
trainer.train()
trainer.train()

points = np.random.default_rng(1).normal(size=(8, 2))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", loss="mse")
watch = keras_callback.EvalStopCallback(name="twice-keras")
for _ in range(2):
    model.fit(points, points[:, :1], epochs=4, callbacks=[watch], verbose=0)
