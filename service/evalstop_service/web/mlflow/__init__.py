"""MLflow's tracking API: runs that log to MLflow are watched when `MLFLOW_TRACKING_URI` names this service.

    client ──> routes ──> run_logger ──> committer (metrics)       the same path as for all other clients
                 │            └────────> labels (tags), mlflow_runs (params)
                 ├──────> artifacts                                files, as they arrive; checkpoints, by their names
                 └──────> forwarding ──> an MLflow server          in a background thread

Parts of MLflow that this service does not have, such as registered models and traces, are refused with a clear error.
"""

from evalstop_service.web.mlflow.artifacts import ArtifactFolder
from evalstop_service.web.mlflow.errors import problem_response
from evalstop_service.web.mlflow.forwarding import Forwarder
from evalstop_service.web.mlflow.routes import UPLOADS, create_app

__all__ = ["UPLOADS", "ArtifactFolder", "Forwarder", "create_app", "problem_response"]
