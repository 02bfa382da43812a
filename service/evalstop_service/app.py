"""Creates the application: the only module that imports all parts."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from evalstop_service import background
from evalstop_service.clock import Clock, utc_now
from evalstop_service.decisions import deadlines, notices, stale_runs, sweeps
from evalstop_service.decisions.commands import offer_exploit, tell_trainer
from evalstop_service.decisions.veto_windows import VetoListener
from evalstop_service.evaluation import change_point, digest, rollout_stage
from evalstop_service.ingest import Committer, RunCache
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.projects import audit_trail
from evalstop_service.projects.key_cache import KeyCache
from evalstop_service.runs import retention
from evalstop_service.security.openid import OpenIdProvider
from evalstop_service.settings import Settings, reveal
from evalstop_service.store.database import Database, read_now
from evalstop_service.store.tables.columns import prepare_structs
from evalstop_service.web import mlflow, pages, problems
from evalstop_service.web.api import (
    audit,
    checkpoints,
    decisions,
    endpoints,
    groups,
    health,
    keys,
    observations,
    policies,
    precision,
    projects,
    proposals,
    pull,
    roles,
    runs,
)
from evalstop_service.web.api import openapi as description
from evalstop_service.web.api.ingest_endpoint import IngestEndpoint
from evalstop_service.web.api.json_body import API, name_operation
from evalstop_service.web.body import BodyLimit, HearVetoes, create_identify
from evalstop_service.web.context import Context
from evalstop_service.web.limits import Entrance, Limits
from evalstop_service.web.mlflow import ArtifactFolder
from evalstop_service.web.request_log import HeadRequests, RequestLog, SubPath
from evalstop_service.webhooks.delivery.send import Sender
from evalstop_service.webhooks.delivery.worker import DeliveryWorker, WorkerLimits
from evalstop_service.webhooks.retry import Backoff

_log = logging.getLogger(__name__)

prepare_structs()  # here, because no thread can decode a struct before this module is imported

RESOURCES = (  # the busiest first: FastAPI tries one route after the other
    *(runs, pull, observations, decisions, checkpoints, health),
    *(projects, keys, policies, groups, roles, endpoints, audit, precision, proposals),
)

MLFLOW = "/mlflow"

UPLOADS = f"{MLFLOW}{mlflow.UPLOADS}"
"""Prefix of the paths whose routes read the body as it arrives."""


def create_app(
    settings: Settings,
    database: Database,
    clock: Clock = utc_now,
    *,
    session_secret: str,
    deliver: bool = False,
    service_metrics: ServiceMetrics | None = None,
) -> FastAPI:
    """The web application on a database whose schema is at head; `deliver` also runs a delivery worker."""
    service_metrics = service_metrics or create_service_metrics(database, clock)
    committer = Committer(
        *(database, RunCache(settings.cache_mib * 2**20), clock, service_metrics),
        read_time=partial(read_now, here=clock),
    )
    key_cache = KeyCache(database, clock=clock)
    context = _create_context(settings, database, clock, committer, key_cache, service_metrics)
    listener = VetoListener(database, clock, context.limits.run_in_thread)

    def live(_app: FastAPI) -> AbstractAsyncContextManager[None]:
        delivering = _delivering(settings, database, service_metrics) if deliver else nullcontext()
        return _living(context, listener, delivering)

    app = _App(
        lifespan=live,
        title="EvalStop",
        version="0.1.0",
        summary="Stops training jobs that no longer improve, and keeps their best checkpoints.",
        openapi_tags=[{"name": name, "description": text} for name, text in description.TAGS.items()],
        generate_unique_id_function=name_operation,
        responses=problems.RESPONSES,
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        telemetry=TelemetryConfig(tracing=False, metrics=False, logs=False),  # RequestLog measures
    )
    app.state.context, app.state.service_metrics = context, service_metrics
    artifacts = ArtifactFolder(settings.data_folder / "artifacts", settings.mlflow_artifact_root)
    app.mount(MLFLOW, mlflow.create_app(context, service_metrics, artifacts))
    problems.install(app)
    description.install(app)
    app.router.routes.extend(route for resource in RESOURCES for route in resource.router.routes)
    pages.install(app, context, session_secret, _openid(settings))
    _put_in_front(app, settings, listener, service_metrics)
    return app


def _create_context(
    settings: Settings,
    database: Database,
    clock: Clock,
    committer: Committer,
    key_cache: KeyCache,
    service_metrics: ServiceMetrics,
) -> Context:
    return Context(
        database,
        clock,
        committer,
        key_cache,
        settings.address_policy,
        settings.create_encryption(),
        settings.delivery_timeout_seconds,
        settings.public_url,
        settings,
        limits=Limits(
            # More would compete for the interpreter, and on SQLite for its one writer, without doing more.
            8 if database.embedded else database.ordinary_connections,
            lambda limit: service_metrics.refused.labels(limit).inc(),
            service_metrics.delayed.inc,
        ),
    )


def _put_in_front(app: _App, settings: Settings, listener: VetoListener, service_metrics: ServiceMetrics) -> None:
    """Add the middleware, the last one first."""
    context: Context = app.state.context
    app.add_middleware(
        BodyLimit,
        limits=context.limits,
        identify=create_identify(app.state.pages),
        compressible=[f"{API}{observations.PATH_OF_MANY}"],
        streamed_below=(UPLOADS,),
        refusal=_refusal,
    )
    ingest_endpoint = IngestEndpoint(
        app.behind,
        context.committer,
        context.key_cache,
        context.clock,
        partial(tell_trainer, context.database, context.clock),
        partial(offer_exploit, context.database, context.clock),
        context.limits,
    )
    entrance = Entrance(ingest_endpoint, context.limits)
    addressed: ASGIApp = entrance
    if settings.trusted_proxies:
        addressed = ProxyHeadersMiddleware(entrance, settings.trusted_proxies)  # type: ignore[arg-type, assignment]
    logged = RequestLog(addressed, service_metrics)
    app.front = HearVetoes(HeadRequests(logged), listener, context.clock)
    if path := urlsplit(settings.public_url or "").path.rstrip("/"):
        app.front = SubPath(app.front, path)


def _refusal(problem: problems.Problem, path: str) -> ASGIApp:
    """A problem as the response of a middleware: in MLflow's format below /mlflow, else as RFC 9457."""
    return mlflow.problem_response(problem) if path.startswith(f"{MLFLOW}/") else problems.answer(problem, path)


def _openid(settings: Settings) -> OpenIdProvider | None:
    grants = settings.grants
    if settings.oidc_issuer is None or settings.oidc_client_id is None or grants is None:
        return None
    # Imported only where it is used: Authlib takes 45 ms of each start, and few installations have a provider.
    from evalstop_service.security.openid_client import Client

    secret = reveal(settings.oidc_client_secret)
    client = Client(settings.oidc_issuer, settings.oidc_client_id, secret, settings.oidc_scopes)
    return OpenIdProvider(client, grants)


def create_service_metrics(database: Database, clock: Clock = utc_now) -> ServiceMetrics:
    """The metrics of the process and of the installation."""
    service_metrics = ServiceMetrics()
    service_metrics.registry.register(health.Installation(database, clock))
    return service_metrics


class _App(FastAPI):
    """The application with middleware in front: FastAPI runs its own middleware too late."""

    front: ASGIApp
    document: ClassVar[dict[str, Any]] = {}
    """The OpenAPI document, generated once per process: that takes FastAPI a third of a second."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)

    async def behind(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application without the middleware in front."""
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if not self.document:
            self.document.update(description.complete_openapi(super().openapi()))
        return self.document


async def deliver(settings: Settings, database: Database, stop: asyncio.Event, service_metrics: ServiceMetrics) -> None:
    """Run a delivery worker and the periodic jobs until `stop` is set, then finish the deliveries in progress."""
    jobs = (
        retention.create_job(database, utc_now, service_metrics),
        deadlines.create_job(database, utc_now),
        stale_runs.create_job(database, utc_now),
        notices.create_job(database, utc_now),
        sweeps.create_job(database, utc_now),
        rollout_stage.create_job(database, utc_now),
        digest.create_job(database, utc_now),
        audit_trail.create_job(database),
        change_point.create_job(),
    )
    async with Sender(
        settings.delivery_timeout_seconds,
        address_policy=settings.address_policy,
        mail=settings,
    ) as sender:
        worker = DeliveryWorker(
            database,
            sender,
            clock=utc_now,
            chance=random.Random(),
            backoff=Backoff(cap_seconds=settings.delivery_longest_pause_seconds),
            limits=WorkerLimits(lease_seconds=2 * settings.delivery_timeout_seconds),
            encryption=settings.create_encryption(),
            public_url=settings.public_url,
            service_metrics=service_metrics,
        )
        with background.run_jobs(*jobs):
            await worker.run(stop)


@asynccontextmanager
async def _living(
    context: Context, listener: VetoListener, delivering: AbstractAsyncContextManager[None]
) -> AsyncIterator[None]:
    with background.run_jobs(change_point.create_job(), context.key_cache.create_job()):
        async with context.committer.run(), delivering, listener.listening():
            yield


@asynccontextmanager
async def _delivering(settings: Settings, database: Database, service_metrics: ServiceMetrics) -> AsyncIterator[None]:
    def ended(worker: asyncio.Task[None]) -> None:
        error = None if worker.cancelled() else worker.exception()
        if error is not None:  # a service that accepts observations but delivers no stops must not appear healthy
            _log.critical("the delivery worker failed; the service exits", exc_info=error)
            signal.raise_signal(signal.SIGTERM)

    stop = asyncio.Event()
    worker = asyncio.create_task(deliver(settings, database, stop, service_metrics))
    worker.add_done_callback(ended)
    try:
        yield
    finally:
        stop.set()
        await worker
