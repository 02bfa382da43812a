"""A training loop that logs by MLflow's fluent API, as it would to any MLflow server; prints the run's id."""

from __future__ import annotations

import mlflow

SCORES = [0.5, 0.9, 0.8, 0.7, 0.6]

mlflow.set_experiment("alignment")
with mlflow.start_run(run_name="ppo", tags={"gpus": "8"}) as run:
    mlflow.log_params({"learning_rate": 1e-6, "trainer": "ppo"})
    mlflow.set_tag("evalstop.checkpoint.1", "file:///checkpoints/1")
    for step, score in enumerate(SCORES):
        logged = {"reward": step / 10, "kl": step / 100, "eval_accuracy": score, "grad_norm": float("nan")}
        mlflow.log_metrics(logged, step=step, synchronous=False)
    mlflow.flush_async_logging()
    mlflow.log_metric("eval_accuracy", SCORES[-1], step=len(SCORES) - 1)  # sent again
    mlflow.log_metric("eval_accuracy", 0.99, step=0)  # contradicts what is on record
    mlflow.log_metric("loss", float("inf"))
    mlflow.set_tag("note", "done")
    told = mlflow.get_run(run.info.run_id).data.tags
    assert told["evalstop.should_stop"] == "true", told
    assert told["evalstop.best_checkpoint"] == "file:///checkpoints/1"
found = mlflow.get_run(run.info.run_id)
assert found.info.status == "FINISHED", found.info.status
assert found.data.metrics["eval_accuracy"] == SCORES[-1]
assert found.data.params["trainer"] == "ppo"
print(run.info.run_id)
