"""MLflow's tracking API: runs that log to MLflow are watched when `MLFLOW_TRACKING_URI` names this service.

    client ──> routes ──> run_logger ──> committer (metrics)       the same path as for all other clients
                 │            └────────> labels (tags), mlflow_runs (params)
                 ├──────> artifacts                                files, as they arrive; checkpoints, by their names
                 └──────> forwarding ──> an MLflow server          in a background thread

Parts of MLflow that this service does not have, such as registered models and traces, are refused with a clear error.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse
from fastapi.telemetry import TelemetryConfig
from starlette.routing import BaseRoute

from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.web.context import Context
from evalstop_service.web.mlflow import artifacts, experiments, protocol, runs
from evalstop_service.web.mlflow.artifacts import ArtifactFolder
from evalstop_service.web.mlflow.forwarding import Forwarder
from evalstop_service.web.mlflow.protocol import MlflowError, problem_response
from evalstop_service.web.route_index import RouteIndex

__all__ = ["UPLOADS", "ArtifactFolder", "Forwarder", "create_app", "problem_response"]

PREFIXES = ("/api/2.0", "/ajax-api/2.0", "/api/2.0/preview")
"""Clients use the first, pages in a browser the second, and old clients the third."""

UPLOADS = tuple(f"{prefix}{artifacts.PREFIX}/" for prefix in PREFIXES)
"""Prefixes of the paths whose routes read files as they arrive."""


def create_app(
    context: Context, service_metrics: ServiceMetrics, forwarder: Forwarder | None, artifact_folder: ArtifactFolder
) -> FastAPI:
    """The app to mount at `/mlflow`."""
    telemetry = TelemetryConfig(tracing=False, metrics=False, logs=False)  # RequestLog measures and traces
    app = FastAPI(openapi_url=None, redirect_slashes=False, telemetry=telemetry)
    app.state.context, app.state.service_metrics, app.state.forwarder = context, service_metrics, forwarder
    app.state.artifacts = artifact_folder
    protocol.install_error_handlers(app)
    app.router.routes.extend(_routes())
    return app


@cache
def _routes() -> list[BaseRoute]:
    """The routes of MLflow's API, built once per process, because that takes FastAPI long."""
    tracking = APIRouter(prefix="/mlflow")
    for router in (experiments.router, runs.router, artifacts.tracking_router):
        tracking.include_router(router)
    router = APIRouter()
    for prefix in PREFIXES:
        router.include_router(tracking, prefix=prefix)
        router.include_router(artifacts.router, prefix=prefix)
    router.include_router(_web_links)
    router.include_router(_unsupported)
    return [RouteIndex(router.routes), *router.routes]


_unsupported = APIRouter()


@_unsupported.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
def refuse_unsupported(path: str, request: Request) -> None:
    """Answer that registered models, traces and others are not supported."""
    message = (
        f"EvalStop does not support {request.method} /{path}. It has experiments, runs, metrics, params, tags, inputs, "
        "artifacts and logged models, but no registered models, prompts or traces"
    )
    raise MlflowError(404, "ENDPOINT_NOT_FOUND", message)


_web_links = APIRouter()

_SCRIPT = """
const run = /\\/runs\\/([0-9a-f]{8})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{12})/.exec(location.hash);
location.replace(new URL(run ? "../runs/" + run.slice(1).join("-") : "../runs", location.href));
"""

_PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>EvalStop</title><script>{_SCRIPT}</script></head>
<body><p>The runs are <a href="../runs">here</a>.</p></body></html>
"""

_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src 'sha256-{_DIGEST}'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


@_web_links.get("/", include_in_schema=False)
def open_link() -> HTMLResponse:
    """Redirect the links that MLflow clients print, `.../mlflow/#/experiments/ID/runs/ID`, to EvalStop's pages.

    Browsers do not send the part after `#`, so a script in an otherwise empty page redirects.
    """
    return HTMLResponse(_PAGE, headers=_HEADERS)
