"""A training loop that logs with MLflow's fluent API; prints the id of its run."""

from __future__ import annotations

import mlflow

SCORES = [0.5, 0.9, 0.8, 0.7, 0.6]

mlflow.set_experiment("alignment")
with mlflow.start_run(run_name="ppo", tags={"gpus": "8"}) as run:
    mlflow.log_params({"learning_rate": 1e-6, "trainer": "ppo"})
    mlflow.set_tag("evalstop.checkpoint.1", "file:///checkpoints/1")
    for step, score in enumerate(SCORES):
        metrics = {"reward": step / 10, "kl": step / 100, "eval_accuracy": score, "grad_norm": float("nan")}
        mlflow.log_metrics(metrics, step=step, synchronous=False)
    mlflow.flush_async_logging()
    mlflow.log_metric("eval_accuracy", SCORES[-1], step=len(SCORES) - 1)  # sent again
    mlflow.log_metric("eval_accuracy", 0.99, step=0)  # contradicts the stored value
    mlflow.log_metric("loss", float("inf"))
    mlflow.set_tag("note", "done")
    tags = mlflow.get_run(run.info.run_id).data.tags
    assert tags["evalstop.should_stop"] == "true", tags
    assert tags["evalstop.best_checkpoint"] == "file:///checkpoints/1"
ended_run = mlflow.get_run(run.info.run_id)
assert ended_run.info.status == "FINISHED", ended_run.info.status
assert ended_run.data.metrics["eval_accuracy"] == SCORES[-1]
assert ended_run.data.params["trainer"] == "ppo"
print(run.info.run_id)
