"""Calls transformers' KubeflowCallback as a training would: begin, one eval, end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import KubeflowCallback

token = Path("token")
token.write_text(os.environ["EVALSTOP_KEY"])
os.environ["KUBEFLOW_TRAINER_SERVER_URL"] = f"{os.environ['EVALSTOP_URL']}/api/v1/kubeflow/from-a-pod"
os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"] = str(token)

Callback: Any = KubeflowCallback  # without type annotations
callback, control = Callback(), TrainerControl()
arguments = TrainingArguments(output_dir="unused", report_to="none", use_cpu=True)
state = TrainerState(max_steps=10, global_step=0, is_world_process_zero=True)
callback.on_train_begin(arguments, state, control)
state.global_step = 5
callback.on_log(arguments, state, control, logs={"eval_accuracy": 0.25, "loss": 1.5})
callback._last_update_time = 0.0  # as if five seconds had passed
callback.on_step_end(arguments, state, control)
state.global_step = 10
callback.on_train_end(arguments, state, control)
