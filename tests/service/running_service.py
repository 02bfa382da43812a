"""The whole service with its metrics, behind a real server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from evalstop_service.app import create_app, create_service_metrics
from evalstop_service.clock import utc_now
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.store.keys import SCOPES

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import serve_app
from tests.fixtures.projects import create_named_key, create_project


@dataclass
class RunningService:
    """A running service, its metrics, and a client with all scopes in its project."""

    url: str
    database: Database
    service_metrics: ServiceMetrics
    key: str
    client: httpx.Client

    def scrape(self, **headers: str) -> str:
        """Request /metrics without a key."""
        answer = httpx.get(f"{self.url}/metrics", headers=headers, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.text


@contextmanager
def run_service(
    database: Database,
    *,
    deliver: bool = False,
) -> Iterator[RunningService]:
    """Run a service on this database, with a project of its own, until the block ends."""
    service_metrics = create_service_metrics(database)
    app = create_app(
        Settings(),
        database,
        session_secret="the secret of the sessions",
        deliver=deliver,
        service_metrics=service_metrics,
    )
    project = create_project(database, uuid.uuid4().hex, "enforce", 0.0, utc_now(), "paper")
    key = create_named_key(database, project.name, "test", SCOPES, utc_now())[1]
    with (
        serve_app(app) as url,
        httpx.Client(
            verify=get_ssl_context(),
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
            trust_env=False,
        ) as client,
    ):
        yield RunningService(url, database, service_metrics, key, client)
