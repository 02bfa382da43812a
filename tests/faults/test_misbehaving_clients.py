"""Oversized requests and bodies are refused while other clients are served."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
from evalstop_service.store.database import Database

from tests.faults import raw_sockets
from tests.faults.conftest import Installation
from tests.faults.retrying_clients import (
    DEADLINE_SECONDS,
    Trainer,
    run_trainers,
    wait_for_batches,
    wait_until,
)
from tests.faults.run_records import create_project_and_key
from tests.faults.servers import start_replica

pytestmark = pytest.mark.real

LIMIT_BYTES = 8 * 2**20
MAX_EXTRA_MB = 600
"""The most memory that a service may use in addition under attack."""


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[Installation]:
    """A service on an embedded database."""
    folder = tmp_path_factory.mktemp("installation")
    file = folder / "evalstop.db"
    shutil.copyfile(migrated_file, file)
    with ExitStack() as stack:
        database = Database(f"sqlite:///{file}")
        stack.callback(database.close)
        project, key = create_project_and_key(database)
        yield Installation(project, stack.enter_context(start_replica(folder, f"sqlite:///{file}")), key)


@contextmanager
def check_others_are_served(installation: Installation, name: str) -> Iterator[None]:
    """Check that a trainer is served during and after the block, and that no connection stays open."""
    (program,) = installation.service.programs
    before, end = raw_sockets.count_open_sockets(program.pid), threading.Event()
    # Without a pause, the trainer itself would be most of the load.
    trainer = Trainer(installation.open_client(), name, end, pause_seconds=0.03)
    with run_trainers([trainer], end):
        wait_for_batches([trainer], 3)
        yield
        wait_for_batches([trainer], 3)
    assert trainer.client.refusals == []
    wait_until(lambda: raw_sockets.count_open_sockets(program.pid) <= before + 3, "all connections are closed")


@pytest.mark.nightly
def test_idle_connection_takes_another_request(installation: Installation) -> None:
    """A connection that was idle for 6 s is still open: a load balancer, which keeps some for a minute, would answer a
    post that it sends into a closed one with 502."""
    with raw_sockets.connect(installation.service.url) as connection:
        for pause_seconds in (6.0, 0.0):
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: service\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):  # head and body may come apart
                answer += connection.recv(65536)
            assert b"200 OK" in answer
            time.sleep(pause_seconds)


@pytest.mark.nightly
def test_endless_headers_are_refused(installation: Installation) -> None:
    """Endless request headers are refused before they fill the memory."""
    (program,) = installation.service.programs
    with check_others_are_served(installation, "during-headers"), ExitStack() as stack:
        before = raw_sockets.read_resident_mb(program.pid)
        for number in range(4):
            connection = stack.enter_context(raw_sockets.connect(installation.service.url))
            line = b"X-Long: " + b"x" * 60_000 + b"\r\n" if number % 2 else b"x" * 60_000
            connection.sendall(
                raw_sockets.build_request_head("GET", "/livez", installation.key)[:-2] + b"X-Very-Long: "
            )
            with pytest.raises(ConnectionError):
                connection.sendall(line * 5000)
            # No answer (0) if the bytes sent after the close reset the connection.
            assert raw_sockets.read_answer(connection)[0] in (0, 400)
        assert raw_sockets.read_resident_mb(program.pid, peak=True) - before < MAX_EXTRA_MB


def test_trailers_are_ignored(installation: Installation) -> None:
    """Headers after a body fill no memory and authenticate nobody."""
    (program,) = installation.service.programs
    before = raw_sockets.read_resident_mb(program.pid)
    head = raw_sockets.build_request_head(
        "POST",
        "/api/v1/runs",
        "none",
        Content_Type="application/json",
        Transfer_Encoding="chunked",
        Connection="close",
    ).replace(b"Authorization: Bearer none\r\n", b"")
    trailer = f"Authorization: Bearer {installation.key}\r\n".encode()
    with raw_sockets.connect(installation.service.url) as connection:
        connection.sendall(head + b"2\r\n{}\r\n0\r\n" + trailer + b"A: b\r\n" * 5_000_000 + b"\r\n")
        status, problem = raw_sockets.read_answer(connection)
    assert (status, problem["code"]) == (401, "no_key")
    assert raw_sockets.read_resident_mb(program.pid, peak=True) - before < 100


@pytest.mark.parametrize(("count", "status"), [(200, 200), (201, 400)])
def test_request_with_many_headers_is_refused(installation: Installation, count: int, status: int) -> None:
    """Thousands of short headers would take thirty times their size in memory, on each of many connections."""
    lines = [b"GET /livez HTTP/1.1", b"Connection: close", *[b"A: b"] * (count - 1), b"\r\n"]
    with raw_sockets.connect(installation.service.url) as connection:
        connection.sendall(b"\r\n".join(lines))
        assert raw_sockets.read_answer(connection)[0] == status


def test_quoted_cookie_is_ignored(installation: Installation) -> None:
    """Other cookies are read beside one of backslashes, which takes Python seconds: all exceed the test's timeout."""
    quoted = 'a="' + "\\" * 30_000 + '"'
    with httpx.Client(base_url=installation.service.url, timeout=DEADLINE_SECONDS, trust_env=False) as client:
        page = client.get("/login").text
        token = page.split('name="csrf" value="')[1].split('"')[0]
        client.post("/login", data={"key": installation.key, "csrf": token})
        session = f"evalstop_session={client.cookies['evalstop_session']}"
        client.cookies.clear()
        for cookies in (f"{quoted}; {session}", f"{session}; {quoted}", f'b="\\054"; {session}'):
            for _ in range(40):
                assert client.get("/session", headers={"Cookie": cookies}).json() == {"signed_in": True}
        assert client.get("/runs", headers={"Cookie": quoted}).status_code == 303


def build_expensive_bodies() -> dict[str, bytes]:
    """JSON bodies of the largest size that is accepted, which need many times their size when decoded."""
    size = LIMIT_BYTES - 1024
    points = b'{"observations":[%s]}'
    return {
        "lists in lists": b"[" * size,
        "empty lists": points % (b"[]," * (size // 3))[:-1],
        "empty objects": points % (b"{}," * (size // 3))[:-1],
        "objects in objects": b'{"a":' * (size // 5),
        "small numbers": points % (b"1.5," * (size // 4))[:-1],
        "just under the limit of numbers": points % (b"1.5," * 1_090_000)[:-1],
        "a large number": points % (b"9" * size),
        "names": b'{"observations":[{%s}]}' % b",".join(b'"%d":0' % number for number in range(size // 12)),
        "escapes": b'{"observations":["%s"]}' % (b"\\u00e9" * (size // 6)),
        "points": points % (b'{"metric":"a","step":1,"value":1},' * (size // 34))[:-1],
    }


def test_expensive_bodies_are_refused_within_bounded_memory(installation: Installation) -> None:
    """Bodies that decode to many times their size are refused; memory stays bounded and the service stays up."""
    (program,) = installation.service.programs
    headers = {"Authorization": f"Bearer {installation.key}", "Content-Type": "application/json"}
    with installation.open_client() as client:
        run_id = client.post("/runs", {"name": "expensive-bodies"})["id"]
    url = f"{installation.service.url}/api/v1/runs/{run_id}/observations"
    bodies = build_expensive_bodies()
    statuses: dict[str, list[int]] = {}
    with check_others_are_served(installation, "during-expensive-bodies"):
        before = raw_sockets.read_resident_mb(program.pid)

        def post_body(name: str, known_key: bool) -> None:
            request_headers = headers if known_key else headers | {"Authorization": "Bearer esk_nobody"}
            response = httpx.post(
                url, content=bodies[name], headers=request_headers, timeout=DEADLINE_SECONDS, trust_env=False
            )
            statuses.setdefault(name, []).append(response.status_code)

        posts = list(bodies)
        for known_key in (True, False):
            with ThreadPoolExecutor(len(posts)) as threads:
                list(threads.map(partial(post_body, known_key=known_key), posts))
        assert all(len(statuses[name]) == 2 for name in bodies)
        assert all(status in (400, 401, 413, 422, 429, 503) for group in statuses.values() for status in group)
        assert raw_sockets.read_resident_mb(program.pid, peak=True) - before < MAX_EXTRA_MB


@pytest.mark.parametrize(
    "known_key", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["known-key", "unknown-key"]
)
def test_large_bodies_beyond_the_memory_limit_are_refused(installation: Installation, known_key: bool) -> None:
    """Of many large bodies that arrive together, those that exceed the memory limit are refused."""
    (program,) = installation.service.programs
    headers = {"Content_Type": "application/json", "Content_Length": str(LIMIT_BYTES)}
    path = "/api/v1/runs/0198c0de-0000-7000-8000-000000000000/observations"
    body = b" " * (LIMIT_BYTES - 1)
    with check_others_are_served(installation, f"during-large-{known_key}"), ExitStack() as stack:
        before = raw_sockets.read_resident_mb(program.pid)
        connections = [stack.enter_context(raw_sockets.connect(installation.service.url)) for _ in range(80)]

        def send(connection: socket.socket) -> None:
            connection.sendall(
                raw_sockets.build_request_head("POST", path, installation.key if known_key else "esk_nobody", **headers)
            )
            with suppress(ConnectionError):
                connection.sendall(body)

        with ThreadPoolExecutor(len(connections)) as threads:
            list(threads.map(send, connections))
        wait_until(
            lambda: raw_sockets.count_closed(connections) > len(connections) // 4, "bodies beyond the limit are refused"
        )
        if known_key:  # without a valid key, all large bodies are refused
            assert raw_sockets.count_closed(connections) < len(connections)
        assert raw_sockets.read_resident_mb(program.pid) - before < MAX_EXTRA_MB
