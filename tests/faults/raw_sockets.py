"""Clients that no library would be: bytes on sockets, and what a process holds open for them."""

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


def connected(url: str, receive_bytes: int | None = None) -> socket.socket:
    """A connection to a server; with so small a buffer for what it answers."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    end = socket.socket()
    if receive_bytes is not None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    end.settimeout(DEADLINE_SECONDS)
    end.connect((parts.hostname, parts.port))
    return end


def head(method: str, path: str, key: str, **headers: str) -> bytes:
    """A request up to its body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: evalstop", f"Authorization: Bearer {key}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def answered(end: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the document of an answer after which the server closes the connection; 0 for none at all."""
    received = b""
    try:
        while data := end.recv(65536):
            received += data
    except ConnectionError:
        pass
    if not received:
        return 0, {}
    status, _, body = received.partition(b"\r\n\r\n")
    return int(status.split()[1]), json.loads(body)


def is_closed(end: socket.socket) -> bool:
    """Whether the server has given up the connection, whatever has not been read yet."""
    watching = select.poll()
    watching.register(end, 0)  # errors and hangups alone
    return bool(watching.poll(0))


def ended(ends: Sequence[socket.socket]) -> int:
    """How many of these connections the server has ended; nothing is expected to be read from them."""
    watching = select.poll()
    for end in ends:
        watching.register(end, select.POLLIN | select.POLLRDHUP)
    return len(watching.poll(0))


def open_sockets(pid: int) -> int:
    """How many sockets a process has open."""
    count = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += str(file.readlink()).startswith("socket:")
    return count


def resident_mb(pid: int, peak: bool = False) -> float:
    """Memory of a process, now or at its most so far."""
    name = "VmHWM:" if peak else "VmRSS:"
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {name}")
