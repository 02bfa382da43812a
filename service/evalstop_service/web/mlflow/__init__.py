"""MLflow's tracking API: runs that log to MLflow are watched when `MLFLOW_TRACKING_URI` names this service.

    client ──> routes ──> labels (params and tags)         one transaction under the run's lock
                 │   └──> committer (metrics)              the same way in as for all other clients
                 └──────> forwarding ──> an MLflow server  in a background thread

Parts of MLflow that this service does not have, such as artifacts, models and traces, are refused with a clear error.
"""

from evalstop_service.web.mlflow.errors import problem_response
from evalstop_service.web.mlflow.forwarding import Forwarder
from evalstop_service.web.mlflow.routes import create_app

__all__ = ["Forwarder", "create_app", "problem_response"]
