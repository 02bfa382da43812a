"""Code that logs to MLflow, watched without a change to it: `python examples/mlflow_client.py`.

Nothing of EvalStop is imported. All it takes is two variables:

    export MLFLOW_TRACKING_URI=$EVALSTOP_URL/mlflow MLFLOW_TRACKING_TOKEN=$EVALSTOP_KEY

MLflow's clients cannot be told to stop: that is done by a receiver beside the scheduler, which finds the job by tags
such as `slurm_job_id`. Which metric is the eval is recognised from the names.
"""

import mlflow

mlflow.set_experiment("examples")
with mlflow.start_run(run_name="mlflow-client"):
    mlflow.set_tag("gpus", "1")
    for step in range(0, 300, 10):
        score = 1 - ((step - 100) / 100) ** 2  # stands for an evaluation
        mlflow.log_metrics({"reward": step / 100, "kl": step / 1000, "eval_accuracy": score}, step=step)
