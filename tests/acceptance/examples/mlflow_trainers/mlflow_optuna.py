"""Optuna's MLflow callback, which creates a run for each trial; prints their ids."""

from __future__ import annotations

import os
import warnings

import mlflow
import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.integration import MLflowCallback

warnings.simplefilter("ignore", ExperimentalWarning)
optuna.logging.set_verbosity(optuna.logging.WARNING)

callback = MLflowCallback(tracking_uri=os.environ["MLFLOW_TRACKING_URI"], metric_name="score")
study = optuna.create_study(study_name="widths", direction="maximize")
study.optimize(lambda trial: -((trial.suggest_float("x", -1, 1) - 0.5) ** 2), n_trials=3, callbacks=[callback])
experiment = mlflow.get_experiment_by_name("widths")
assert experiment is not None
for run in mlflow.search_runs([experiment.experiment_id], output_format="list"):
    print(run.info.run_id)
