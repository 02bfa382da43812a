"""MLflow's tracking API: whoever logs to MLflow is watched once `MLFLOW_TRACKING_URI` names this service.

    client ──> verbs ──> labels (params and tags)      one transaction under the run's lock
                 │  └──> committer (metrics)           the same way in as all others
                 └─────> tee ──> an MLflow server      afterwards, by a thread of its own; nobody waits for it

What MLflow keeps and this service does not, such as artifacts, models and traces, is refused by name.
"""

from evalstop_service.web.mlflow.errors import refusal
from evalstop_service.web.mlflow.forwarding import Tee
from evalstop_service.web.mlflow.routes import create

__all__ = ["Tee", "create", "refusal"]
