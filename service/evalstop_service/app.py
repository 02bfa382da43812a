"""Joins the parts: the only place that knows them all."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from evalstop_service.api import (
    checkpoints,
    decisions,
    deliveries,
    endpoints,
    health,
    keys,
    observations,
    policies,
    problems,
    projects,
    runs,
)
from evalstop_service.api.context import Context
from evalstop_service.api.limits import BodyLimit
from evalstop_service.clock import Clock, utc_now
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database

RESOURCES = (projects, keys, policies, runs, observations, checkpoints, decisions, endpoints, deliveries)


def create_database(settings: Settings) -> Database:
    """The database that the settings name; the folder of an embedded one is made."""
    if settings.database_url is None:
        settings.data_folder.mkdir(parents=True, exist_ok=True)
    return Database(settings.url, settings.sqlite_synchronous, settings.database_connections)


def create_app(settings: Settings, database: Database, clock: Clock = utc_now) -> FastAPI:
    """The web application on a database whose schema is at head."""
    app = FastAPI(
        title="EvalStop",
        version="0.1.0",
        summary="Stops training jobs that no longer get better, and keeps their best checkpoints.",
        responses={"4XX": {"model": problems.ProblemDetails}, "5XX": {"model": problems.ProblemDetails}},
    )
    app.state.context = Context(database, clock)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    problems.install(app)
    api = APIRouter(prefix="/api/v1")
    for resource in RESOURCES:
        api.include_router(resource.router)
    app.include_router(api)
    app.include_router(health.router)
    return app
