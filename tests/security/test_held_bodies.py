"""Buffered bodies without a key, and those of busy keys, leave memory for vetoes and pauses."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from evalstop_service.app import create_app
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.web.limits import is_decision_path, is_veto_path
from evalstop_service.web.pages.responses import PageRoute
from evalstop_service.web.pages.routes import PAGES

from tests.faults.retrying_clients import wait_until
from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import start_server
from tests.security.served_project import create_pending_decision, serve_project
from tests.service.web.api.api_calls import expect_json

MEBIBYTE = 2**20

ESTABLISHED = "01"
"""The state of an open connection in /proc/net/tcp."""


def send_incomplete_body(url: str, path: str, size: int, header: str = "") -> socket.socket:
    """A connection that has sent all of a body but its last byte, or as much as the server accepts."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=30)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n{header}\r\n"
    )
    connection.sendall(head.encode())
    with suppress(OSError):  # it may be refused and closed
        connection.sendall(b" " * (size - 1))
    return connection


def count_unread_bytes(url: str) -> int:
    """The bytes that have arrived at the server's port and that it has not read."""
    port = f":{urlsplit(url).port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].split(":")[1], 16) for row in rows if row[1].endswith(port) and row[3] == ESTABLISHED)


def assert_decisions_are_accepted(url: str, admin: httpx.Client, decision: str) -> None:
    """A pause, a sign-in and a veto succeed once the server has read what it accepts of the bodies."""
    wait_until(lambda: count_unread_bytes(url) == 0, "the server has read what it accepts", 60)
    expect_json(admin.post("/project/pause", json={"reason": "look"}), 200)
    expect_json(admin.post("/project/resume", json={}), 200)
    signing_in = httpx.post(
        f"{url}/login", data={"key": "wrong"}, trust_env=False, verify=get_ssl_context(), timeout=60
    )
    assert signing_in.status_code != 503
    expect_json(admin.post(f"/decisions/{decision}/veto", json={"reason": "broken eval"}), 200)


@pytest.mark.parametrize("path", ["/nothing", "/api/v1/runs", "/login", "/mlflow/api/2.0/mlflow/runs/create"])
def test_bodies_without_a_key_leave_room_for_a_veto(database: Database, path: str) -> None:
    """Bodies without a key, on any path, hold no memory that a veto, a pause or a sign-in needs."""
    with serve_project(database, veto_window_seconds=3600.0) as project, ExitStack() as connections:
        admin = project.open_client()
        decision = create_pending_decision(admin)
        for _ in range(8):
            connections.enter_context(send_incomplete_body(project.url, path, 8 * MEBIBYTE))
        assert_decisions_are_accepted(project.url, admin, decision)


@pytest.mark.parametrize("path", ["/api/v1/runs", "/api/v1/runs/01900000-0000-7000-8000-000000000000/observations"])
def test_bodies_of_one_key_leave_room_for_others(database: Database, path: str) -> None:
    """A key at its limit of buffered bodies delays neither vetoes and pauses nor the batches of another key."""
    with serve_project(database, veto_window_seconds=3600.0) as project, ExitStack() as connections:
        admin, trainer = project.open_client(), project.open_client("ingest", name="trainer")
        decision = create_pending_decision(admin)
        run = expect_json(trainer.post("/runs", json={"name": "other"}), 201)["id"]
        header = f"Authorization: Bearer {project.create_key('ingest', name='busy')}\r\n"
        for _ in range(8):
            connections.enter_context(send_incomplete_body(project.url, path, 8 * MEBIBYTE, header))
        assert_decisions_are_accepted(project.url, admin, decision)
        large = {"observations": [{"metric": f"m{index:0200}", "step": 1, "value": 0.5} for index in range(1000)]}
        expect_json(trainer.post(f"/runs/{run}/observations", json=large), 200)


def test_large_body_without_a_key_is_refused_unread(database: Database) -> None:
    """A body over 64 KiB without a key is a 401 before it has arrived."""
    with start_server(database) as url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
            head = f"POST /api/v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: {MEBIBYTE}\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(12) == b"HTTP/1.1 401"


def test_reserved_memory_covers_all_decision_routes(embedded_database: Database) -> None:
    """The paths with memory of their own are those that veto, report and stop, and each is an existing route."""
    document = create_app(Settings(), embedded_database, session_secret="none").openapi()
    posted = {path for path, methods in document["paths"].items() if "post" in methods}
    posted |= {route.path for part in PAGES for route in part.router.routes if isinstance(route, PageRoute)}
    endings = ("/veto", "/undo", "/release", "/report", "/pause", "/stop", "/claim", "/settle", "/wait")
    decision_paths = {path for path in posted if path.endswith(endings)} | {
        "/api/v1/project/resume",
        "/settings/resume",
    }
    assert decision_paths <= posted
    assert {path for path in posted if is_decision_path(path)} == decision_paths
    assert {path for path in posted if is_veto_path(path)} == {
        *("/api/v1/decisions/{decision_id}/veto", "/decisions/{decision_id}/veto"),
        *("/api/v1/project/pause", "/settings/pause", "/login"),
        *("/act/{delivery_id}/{token}/veto", "/act/{delivery_id}/{token}/wait"),
    }
