"""MLflow's tracking API: runs that log to MLflow are watched when `MLFLOW_TRACKING_URI` names this service.

    client ──> routes ──> run_logger ──> committer (metrics)       the same path as for all other clients
                 │            └────────> labels (tags), mlflow_runs (params)
                 └──────> artifacts                                files, as they arrive; checkpoints, by their names

It has what a training script calls. Everything else, such as registered models, is refused with a clear error.
"""

from __future__ import annotations

from functools import cache

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import RedirectResponse
from fastapi.telemetry import TelemetryConfig
from starlette.routing import BaseRoute

from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.web.context import Context
from evalstop_service.web.mlflow import artifacts, experiments, protocol, runs
from evalstop_service.web.mlflow.artifacts import ArtifactFolder
from evalstop_service.web.mlflow.protocol import MlflowError, problem_response

__all__ = ["UPLOADS", "ArtifactFolder", "create_app", "problem_response"]

UPLOADS = f"{artifacts.PREFIX}/"
"""Prefix of the paths whose routes read files as they arrive."""


def create_app(context: Context, service_metrics: ServiceMetrics, artifact_folder: ArtifactFolder) -> FastAPI:
    """The app to mount at `/mlflow`."""
    telemetry = TelemetryConfig(tracing=False, metrics=False, logs=False)  # RequestLog measures
    app = FastAPI(openapi_url=None, redirect_slashes=False, telemetry=telemetry)
    app.state.context, app.state.service_metrics, app.state.artifacts = context, service_metrics, artifact_folder
    protocol.install_error_handlers(app)
    app.router.routes.extend(_routes())
    return app


@cache
def _routes() -> list[BaseRoute]:
    """The routes of MLflow's API, built once per process, because that takes FastAPI long."""
    routers = runs.router, experiments.router, artifacts.tracking_router, artifacts.router, _others
    return [route for router in routers for route in router.routes]


_others = APIRouter()


@_others.get("/")
def open_link() -> RedirectResponse:
    """Redirect the links that MLflow's clients print, `.../mlflow/#/experiments/ID/runs/ID`, to the pages.

    Browsers keep the part after `#`, and a script of the pages finds the run in it.
    """
    return RedirectResponse("/runs", headers={"Referrer-Policy": "no-referrer"})


@_others.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
def refuse_unsupported(path: str, request: Request) -> None:
    """Name what is supported instead."""
    message = (
        f"EvalStop does not support {request.method} /{path}. It creates, reads and searches experiments and runs, and "
        "takes metrics, params, tags, artifacts and logged models; it deletes and renames nothing, and has no "
        "registered models, prompts or traces"
    )
    raise MlflowError(404, "ENDPOINT_NOT_FOUND", message)
