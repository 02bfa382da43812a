"""Nobody keeps a veto from being heard: bodies of strangers and of busy keys leave room for those who decide."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from evalstop_service.app import create_app
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.web.dashboard.responses import PageRoute
from evalstop_service.web.dashboard.routes import PAGES
from evalstop_service.web.decision_paths import is_decision_path, is_veto_path

from tests.faults.retrying_clients import wait_until
from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_project
from tests.security.stops import create_pending_decision
from tests.service.web.api.api_calls import expect_json

MEBIBYTE = 2**20

ESTABLISHED = "01"
"""The state of an open connection in /proc/net/tcp."""


@pytest.fixture
def project(database: Database) -> str:
    return create_project(database, "p", "enforce", 3600.0, utc_now(), "paper").name


def new_key(database: Database, project: str, *scopes: str) -> str:
    return api_keys.create_named_key(database, project, "-".join(scopes), scopes, utc_now())[1]


@contextmanager
def connected(url: str, key: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(
        base_url=f"{url}/api/v1", headers=headers, timeout=30, trust_env=False, verify=get_ssl_context()
    ) as client:
        yield client


def hold(url: str, path: str, size: int, header: str = "") -> socket.socket:
    """A connection that has sent all of a body but its last byte, or as much as the server takes."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=30)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n{header}\r\n"
    )
    connection.sendall(head.encode())
    with suppress(OSError):  # it may be refused and closed
        connection.sendall(b" " * (size - 1))
    return connection


def count_unread(url: str) -> int:
    """The bytes that have come to the server's port, and that it has not read yet."""
    port = f":{urlsplit(url).port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].split(":")[1], 16) for row in rows if row[1].endswith(port) and row[3] == ESTABLISHED)


def assert_heard(url: str, admin: httpx.Client, decision: str) -> None:
    """Whoever decides is heard once the server has taken in what it takes of the bodies."""
    wait_until(lambda: count_unread(url) == 0, "what the server takes has been read", 60)
    expect_json(admin.post("/project/pause", json={"actor": "dana", "reason": "look"}), 200)
    expect_json(admin.post("/project/resume", json={"actor": "dana"}), 200)
    signing_in = httpx.post(f"{url}/login", data={"key": "wrong"}, trust_env=False, verify=get_ssl_context())
    assert signing_in.status_code != 503
    expect_json(admin.post(f"/decisions/{decision}/veto", json={"actor": "dana", "reason": "broken eval"}), 200)


@pytest.mark.parametrize("path", ["/nothing", "/api/v1/runs", "/login", "/mlflow/api/2.0/mlflow/runs/create"])
def test_bodies_without_a_key_leave_room_for_a_veto(database: Database, project: str, path: str) -> None:
    """Whoever has no key can hold nothing that a veto, a pause or a sign-in needs, whichever path is asked."""
    with (
        start_server(database) as url,
        connected(url, new_key(database, project, "admin")) as admin,
        ExitStack() as held,
    ):
        decision = create_pending_decision(admin)
        for _ in range(8):
            held.enter_context(hold(url, path, 8 * MEBIBYTE))
        assert_heard(url, admin, decision)


@pytest.mark.parametrize("path", ["/api/v1/runs", "/api/v1/runs/01900000-0000-7000-8000-000000000000/observations"])
def test_bodies_of_one_key_leave_room_for_others(database: Database, project: str, path: str) -> None:
    """A key that holds as much as it may takes nothing from those who decide, nor from another key's batches."""
    busy = new_key(database, project, "ingest")
    with (
        start_server(database) as url,
        connected(url, new_key(database, project, "admin")) as admin,
        connected(url, new_key(database, project, "ingest")) as trainer,
        ExitStack() as held,
    ):
        decision = create_pending_decision(admin)
        run = expect_json(trainer.post("/runs", json={"name": "other"}), 201)["id"]
        for _ in range(8):
            held.enter_context(hold(url, path, 8 * MEBIBYTE, f"Authorization: Bearer {busy}\r\n"))
        assert_heard(url, admin, decision)
        large = {"observations": [{"metric": f"m{index:0200}", "step": 1, "value": 0.5} for index in range(1000)]}
        expect_json(trainer.post(f"/runs/{run}/observations", json=large), 200)


def test_a_large_body_without_a_key_is_refused_before_it_comes(database: Database) -> None:
    """Nobody's body of more than 64 KiB is answered before it has arrived."""
    with start_server(database) as url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
            head = f"POST /api/v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: {MEBIBYTE}\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(12) == b"HTTP/1.1 401"


def test_every_path_that_decides_is_a_route(embedded_database: Database) -> None:
    """The paths with a pool of their own are those by which routes veto, report and stop, under their present names."""
    document = create_app(Settings(), embedded_database, session_secret="none").openapi()
    posted = {path for path, methods in document["paths"].items() if "post" in methods}
    posted |= {route.path for part in PAGES for route in part.router.routes if isinstance(route, PageRoute)}
    endings = ("/veto", "/undo", "/release", "/report", "/pause", "/stop", "/claim", "/settle")
    wanted = {path for path in posted if path.endswith(endings)} | {"/api/v1/project/resume", "/settings/resume"}
    assert wanted <= posted
    assert {path for path in posted if is_decision_path(path)} == wanted
    assert {path for path in posted if is_veto_path(path)} == {
        *("/api/v1/decisions/{decision_id}/veto", "/decisions/{decision_id}/veto"),
        *("/api/v1/project/pause", "/settings/pause", "/login"),
    }
