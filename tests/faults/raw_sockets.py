"""Raw bytes on sockets, for clients that break HTTP, and the resources that a process uses for them."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.faults.retrying_clients import DEADLINE_SECONDS


def connect(url: str) -> socket.socket:
    """Connect to a server."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = socket.socket()
    connection.settimeout(DEADLINE_SECONDS)
    connection.connect((parts.hostname, parts.port))
    return connection


def build_request_head(method: str, path: str, key: str, **headers: str) -> bytes:
    """The request line and the headers of a request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: evalstop", f"Authorization: Bearer {key}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def read_answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and JSON body, if any, of an answer, read until the server closes the connection; status 0 without one."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionError:
        pass
    if not received:
        return 0, {}
    status, _, body = received.partition(b"\r\n\r\n")
    return int(status.split()[1]), json.loads(body) if body.startswith(b"{") else {}


def count_closed(connections: Sequence[socket.socket]) -> int:
    """How many connections the server has closed or answered."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN | select.POLLRDHUP)
    return len(poll.poll(0))


def count_open_sockets(pid: int) -> int:
    """Count the open sockets of a process."""
    count = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += str(file.readlink()).startswith("socket:")
    return count


def read_resident_mb(pid: int, peak: bool = False) -> float:
    """Resident memory of a process, now or at its peak."""
    name = "VmHWM:" if peak else "VmRSS:"
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {name}")
