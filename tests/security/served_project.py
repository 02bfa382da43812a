"""A server with one project on it, and clients with keys to that project."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from evalstop_service.app import create_app
from evalstop_service.clock import utc_now
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.store.keys import KeyLimits
from fastapi import FastAPI

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import serve_app
from tests.fixtures.projects import create_named_key, create_project
from tests.service.web.api.api_calls import create_decision, expect_json

PROJECT = "p"


@dataclass
class ServedProject:
    """The running app and its address; clients are closed with the stack."""

    app: FastAPI
    url: str
    database: Database
    stack: ExitStack

    def create_key(self, *scopes: str, name: str = "k", **limits: Any) -> str:
        """The secret of a new key, an admin key without scopes."""
        return create_named_key(self.database, PROJECT, name, scopes or ("admin",), utc_now(), KeyLimits(**limits))[1]

    def open_client(self, *scopes: str, name: str = "k", path: str = "/api/v1") -> httpx.Client:
        """A client with a new key, an admin key without scopes, to paths under this one."""
        return self.open_client_with_key(self.create_key(*scopes, name=name), path=path)

    def open_client_with_key(self, key: str, address: str | None = None, path: str = "/api/v1") -> httpx.Client:
        """A client with this key; a trusted proxy reports that it comes from the address."""
        headers = {"Authorization": f"Bearer {key}"} | ({"X-Forwarded-For": address} if address else {})
        client = httpx.Client(
            verify=get_ssl_context(), base_url=f"{self.url}{path}", headers=headers, timeout=60, trust_env=False
        )
        return self.stack.enter_context(client)

    def count_refused(self, reason: str) -> float:
        """The number of requests that were refused for this reason, as /metrics shows it."""
        start = f'evalstop_refused_requests_total{{reason="{reason}"}}'
        lines = httpx.get(
            f"{self.url}/metrics", verify=get_ssl_context(), trust_env=False, timeout=60
        ).text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(start)), 0.0)


@contextmanager
def serve_project(
    database: Database, settings: Settings | None = None, veto_window_seconds: float = 0.0
) -> Iterator[ServedProject]:
    """Serve a new project that enforces the policy `paper`, until the end of the block."""
    create_project(database, PROJECT, "enforce", veto_window_seconds, utc_now(), "paper")
    app = create_app(settings or Settings(), database, session_secret="s" * 32)
    with serve_app(app) as url, ExitStack() as stack:
        yield ServedProject(app, url, database, stack)


def create_pending_decision(client: httpx.Client) -> str:
    """The id of a decision to stop a new run, within its veto window."""
    decision_id = create_decision(client)
    assert expect_json(client.get(f"/decisions/{decision_id}"), 200)["state"] == "pending"
    return decision_id
