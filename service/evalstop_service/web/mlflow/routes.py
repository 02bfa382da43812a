"""The app of MLflow's tracking API: its routes below each prefix that clients use, and errors for other paths."""

from __future__ import annotations

from functools import cache

from fastapi import APIRouter, FastAPI, Request
from starlette.routing import BaseRoute

from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.web.context import Context
from evalstop_service.web.mlflow import artifacts, errors, experiments, logged_models, runs, web_links
from evalstop_service.web.mlflow.artifact_folder import ArtifactFolder
from evalstop_service.web.mlflow.errors import MlflowError
from evalstop_service.web.mlflow.forwarding import Forwarder

PREFIXES = ("/api/2.0", "/ajax-api/2.0", "/api/2.0/preview")
"""Clients use the first, pages in a browser the second, and old clients the third."""

UPLOADS = tuple(f"{prefix}{artifacts.PREFIX}/" for prefix in PREFIXES)
"""Prefixes of the paths whose routes read files as they arrive."""


def create_app(
    context: Context, service_metrics: ServiceMetrics, forwarder: Forwarder | None, artifact_folder: ArtifactFolder
) -> FastAPI:
    """The app to mount at `/mlflow`."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.context, app.state.service_metrics, app.state.forwarder = context, service_metrics, forwarder
    app.state.artifacts = artifact_folder
    errors.install_error_handlers(app)
    app.router.routes.extend(_routes())
    return app


@cache
def _routes() -> list[BaseRoute]:
    """The routes of MLflow's API, built once per process, because that takes FastAPI long."""
    tracking = APIRouter(prefix="/mlflow")
    for part in (experiments, runs, logged_models):
        tracking.include_router(part.router)
    router = APIRouter()
    for prefix in PREFIXES:
        router.include_router(tracking, prefix=prefix)
        router.include_router(artifacts.router, prefix=prefix)
    router.include_router(web_links.router)
    router.include_router(_unsupported)
    return router.routes


_unsupported = APIRouter()


@_unsupported.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
def refuse_unsupported(path: str, request: Request) -> None:
    """Answer that registered models, traces and others are not supported."""
    message = (
        f"EvalStop does not support {request.method} /{path}. It has experiments, runs, metrics, params, tags, inputs, "
        "artifacts and logged models, but no registered models, prompts or traces"
    )
    raise MlflowError(404, "ENDPOINT_NOT_FOUND", message)
