"""How the process and the installation are: probes at /livez and /readyz, and /metrics for Prometheus."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_type_hints

import sqlalchemy as sa
from anyio import CapacityLimiter, to_thread
from fastapi import Request, Response
from prometheus_client import start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import Field

from evalstop_service.clock import Clock
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.store import counts, schema
from evalstop_service.store.counts import InstallationCounts
from evalstop_service.store.database import Database
from evalstop_service.web.api.json_body import create_router
from evalstop_service.web.api.schemas import Answer
from evalstop_service.web.context import Commit, Db
from evalstop_service.web.limits import in_thread
from evalstop_service.web.problems import Problem, ProblemKind

log = logging.getLogger(__name__)

MIN_SECONDS_BETWEEN_QUERIES = 5.0
MAX_WAIT_SECONDS = 1.0


@contextmanager
def listening(service_metrics: ServiceMetrics, host: str, port: int) -> Iterator[int]:
    """Serve the same on a separate port, for a process that serves no other HTTP; returns the port (0 takes any)."""
    server, thread = start_http_server(port, host, service_metrics.registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Installation(Collector):
    """Queries the database when it is scraped, at most every 5 s, and never delays a scrape for long.

    If the database does not answer, `evalstop_database_up` is 0 and the other figures are missing: old ones would
    mislead.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None
        self._asked_at = float("-inf")
        self._latest: InstallationCounts | None = None

    def describe(self) -> list[Metric]:
        """The families, without querying their values."""
        return list(_create_families(None))

    def collect(self) -> Iterator[Metric]:
        """The families with their current values."""
        with self._lock:
            if self._asking is None and time.monotonic() - self._asked_at >= MIN_SECONDS_BETWEEN_QUERIES:
                self._asking = threading.Thread(target=self._read_counts, name="figures", daemon=True)
                self._asking.start()
            asking = self._asking
        if asking is not None:
            asking.join(MAX_WAIT_SECONDS)
        yield from _create_families(None if asking is not None and asking.is_alive() else self._latest)

    def _read_counts(self) -> None:
        latest = None
        try:
            with self._database.reading() as tx:
                latest = counts.read_counts(tx, self._clock())
        except sa.exc.SQLAlchemyError as error:
            log.warning("the database does not answer for /metrics: %s", error)
        except Exception:
            log.exception("cannot read the figures for /metrics")
        self._latest, self._asked_at, self._asking = latest, time.monotonic(), None


def _create_families(counts: InstallationCounts | None) -> Iterator[Metric]:
    up = "1 if the database answered the last query, else 0."
    yield GaugeMetricFamily("evalstop_database_up", up, 0 if counts is None else 1)
    for name, hint in get_type_hints(InstallationCounts, include_extras=True).items():
        description, *labels = hint.__metadata__  # a count that is split has the label of its parts
        family = GaugeMetricFamily(f"evalstop_{name}", description.description, labels=labels)
        if counts is not None:
            value = getattr(counts, name)
            for keys, number in [([key], number) for key, number in value.items()] if labels else [([], value)]:
                family.add_metric(keys, number)
        yield family


router = create_router("health", prefix="")

_own_threads = CapacityLimiter(2)  # all threads of the routes may be waiting for the database


@router.get("/metrics", include_in_schema=False)
async def show_metrics(request: Request) -> Response:
    """The metrics, for anybody: they name no run, project, metric or path."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    registry = request.app.state.service_metrics.registry
    body = await to_thread.run_sync(encode, registry, limiter=_own_threads)
    return Response(body, headers={"Content-Type": media_type, "Cache-Control": "no-store"})


class Health(Answer):
    """The probe succeeded."""

    status: str = Field("ok", description="always ok; a failing probe returns a problem")


@router.get("/livez")
async def check_liveness() -> Health:
    """The process is running."""
    return Health()


@router.get("/readyz")
async def check_readiness(database: Db, committer: Commit) -> Health:
    """The schema is up to date, and requests and observations, each on connections of their own, may be written."""
    await _check_connection(database)
    await committer.read(schema.require_writing)
    return Health()


@in_thread
def _check_connection(database: Database) -> None:
    revision = schema.current_revision(database)
    if not schema.is_served(revision):
        raise Problem(
            503,
            ProblemKind.SCHEMA_TOO_OLD,
            f"the schema is at {revision}, but {schema.head_revision()} is required; run `evalstop migrate`",
        )
    with database.reading() as tx:
        schema.require_writing(tx)
