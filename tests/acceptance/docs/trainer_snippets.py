"""Code that surrounds the documents' code blocks: trainers whose evals fall."""

EVALUATE_FUNCTION = """
def train_and_evaluate(step):
    run.flush()  # takes some time, as an evaluation would
    return 1 - ((step - 1000) / 1000) ** 2, 0.01, step / 1000
"""

TRANSFORMERS_TRAINER = """
from transformers import TrainerControl, TrainerState, TrainingArguments

arguments = TrainingArguments(output_dir="checkpoints", use_cpu=True, report_to="none")
state, control = TrainerState(max_steps=1000), TrainerControl()
callback.on_train_begin(arguments, state, control)
while not control.should_training_stop:
    state.global_step += 50
    score = 1 - ((state.global_step - 200) / 200) ** 2
    callback.on_save(arguments, state, control)
    logged = {"eval_gsm8k": score, "reward": 2 * score, "kl": state.global_step / 1000}
    callback.on_log(arguments, state, control, logged)
    callback._run.flush(60)
    callback.on_step_end(arguments, state, control)
callback.on_train_end(arguments, state, control)
"""

LOSS_STOPPED_BY_A_PERSON = """
import evalstop


class Loss:
    steps = 0

    def __float__(self):
        self.steps += 1
        if self.steps == 50:
            run.flush(60)
            evalstop.Api().run("sft-7b").stop("it diverges")
        elif self.steps > 50:
            run.flush(60)
        return 1.0


loss = Loss()
"""

RUN_WITH_DECLARED_METRICS = """
import sys
import evalstop

with evalstop.Run(sys.argv[1], metrics=metrics, total_steps=1000) as run:
    for step, score in enumerate((0.5, 0.9, 0.8, 0.7, 0.6)):
        scores = {name: -score if role.get("direction") == "minimize" else score for name, role in metrics.items()}
        run.log(scores, step=step)
        run.flush(60)
    assert run.should_stop
"""

LOG_TO_MLFLOW = """
import mlflow

with mlflow.start_run(run_name="logged") as run:
    mlflow.log_param("total_steps", 1000)
    mlflow.set_tag("gpus", "8")
    for step, score in enumerate((0.5, 0.9, 0.8, 0.7, 0.6)):
        mlflow.log_metrics({"eval_accuracy": score, "reward": step}, step=step)
"""

STOP_BY_MLFLOW_TAG = """
        if should_stop(run.info.run_id):
            break
assert step == 4
"""

WAIT_FOR_SIGNAL = """
import signal
signal.pause()
"""
